"""Grading of an exercise in C++: the answer is compiled with its targets and run by mpirun.

The answer may call the functions of MPI that a line of the targets file, `// allowed: MPI_Send ...`, names, and the
standard library. MPI's profiling interface counts its messages (cpp/include/fived/lesson/grade.hpp).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path

from common.errors import UsageError
from common.grade.exercises import ROOT, Exercise, Outcome

COMPILE = ("-std=c++20", "-O0", "-Wall", "-Wextra", f"-I{ROOT / 'cpp' / 'include'}", "-pthread")
HEADER = ROOT / "cpp" / "include" / "fived" / "lesson" / "grade.hpp"
WORLD = 4  # ranks, unless a line `// ranks: 8` of the targets says otherwise; a target runs on the first ones
STARTS_WITHIN = 60.0  # seconds for mpirun to start and end
STRING = r'"(?:\\.|[^"\\\n])*"|\B\'(?:\\.|[^\'\\\n])+\''  # no ' inside of a number: 1'000
BESIDE = re.compile(rf"//[^\n]*|/\*.*?\*/|(?P<string>{STRING})", re.DOTALL)
# beside calls of MPI: files, other programs, an early end; tokens pasted and lines spliced by the preprocessor
CALLS = re.compile(
    r"\bP?MPI_\w+|\b(?:system|popen|dlsym|dlopen|v?fork|exec[lv]\w*|f?open|freopen|_?exit|_Exit|quick_exit)(?=\()"
    r"|\b(?:asm|__asm__)\b|##|%:|\\$"
)
HEADERS = {"fstream", "filesystem", "unistd.h", "fcntl.h", "dlfcn.h", "spawn.h"}


def refused_in_cpp(source: str, targets: str) -> str:
    """Return what an answer in C++ uses that it must not; empty if there is nothing."""
    found = re.search(r"^// allowed: (.*)$", targets, re.MULTILINE)
    allowed = set(found[1].split() if found else ())
    code = BESIDE.sub(lambda beside: beside["string"] or "\n" * beside[0].count("\n"), source)
    for number, line in enumerate(code.splitlines(), 1):
        include = re.match(r"\s*#\s*include\s*(\S+)", line)
        if include and (not re.fullmatch(r"<\w+(\.h)?>", include[1]) or include[1][1:-1] in HEADERS):
            return (
                f"line {number} includes {include[1]}; write it yourself, with MPI and the standard library"
            )
        for name in CALLS.findall(re.sub(STRING, '""', line)):
            if re.fullmatch(r"MPI_[A-Z][a-z]\w*", name) and name in allowed:
                continue
            if not re.fullmatch(r"MPI_([A-Z_0-9]+|Comm|Request|Status|Datatype)", name):
                verb = "calls" if name.isidentifier() else "uses"
                with_what = ", ".join(sorted(allowed)) or "no message"
                return f"line {number} {verb} {name}; write it with {with_what}"
    return ""


def _compile(*files: str) -> str:
    """Run the compiler; return its first error, empty if there is none."""
    done = subprocess.run(["mpicxx", *COMPILE, *files], capture_output=True, text=True, errors="replace")
    if not done.returncode:
        return ""
    lines = done.stderr.splitlines()
    errors = [
        line for line in lines if re.search("error:|undefined reference|multiple def|duplicate sym", line)
    ]
    return (errors or lines or ["the compiler gave no reason"])[0]


def _object_of(exercise: Exercise, folder: Path) -> Path:
    """Return the compiled targets, which are compiled anew only if they or the grader's header changed.

    They are kept in build/, or in `folder` if that cannot be written. Raises UsageError.
    """
    text = exercise.targets.read_bytes() + HEADER.read_bytes()
    name = f"{exercise.path.stem}-{hashlib.sha256(text).hexdigest()[:16]}.o"
    compiled = ROOT / "build" / "exercises" / name
    if compiled.exists():
        return compiled
    unfinished = folder / "targets.o"
    if error := _compile("-c", str(exercise.targets), "-o", str(unfinished)):
        raise UsageError(f"mpicxx cannot compile the targets of {exercise.name}: {error}")
    try:
        compiled.parent.mkdir(parents=True, exist_ok=True)
        beside = compiled.with_suffix(f".{os.getpid()}")
        shutil.move(unfinished, beside)
        return beside.rename(compiled)
    except OSError:
        return unfinished


def _run(launch: list[str], limit: float) -> tuple[str, str]:
    """Return the ends of stdout and stderr of mpirun. After `limit` seconds it is told to end, with its ranks."""
    run = subprocess.Popen(launch, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout
    assert run.stderr
    ends: list[deque[bytes]] = [deque(maxlen=64), deque(maxlen=64)]
    readers = [
        threading.Thread(target=end.extend, args=[iter(partial(os.read, stream.fileno(), 2**16), b"")])
        for end, stream in zip(ends, (run.stdout, run.stderr), strict=True)
    ]
    for reader in readers:
        reader.start()
    try:
        run.wait(limit)
        late = ""
    except subprocess.TimeoutExpired:
        late = f"it did not end within {limit:g} s\n"
    finally:
        run.terminate()
        with suppress(subprocess.TimeoutExpired):
            run.wait(10)
        run.kill()
    for reader in readers:
        reader.join(10)
    out, err = (b"".join(end).decode(errors="replace") for end in ends)
    return out, late + err


def _said(err: str) -> str:
    """Return why the program ended, from what it and mpirun write to stderr."""
    lines = [re.sub(r"^\[.*?\] *", "", line) for line in err.splitlines()]
    told = [line for line in lines if re.search("^it did not|terminate called|Assertion|^Signal: ", line)]
    words = [line for line in lines if re.search("[a-z]", line)]
    return (told or words or ["no reason"])[0]


def attempt_in_cpp(exercise: Exercise, seed: int, source: str, wait: float) -> Outcome:
    """Compile and run an answer; `wait`: seconds after which ranks that wait for one another are ended."""
    text = exercise.targets.read_text()
    names = tuple(re.findall(r'^ *\{\s*"([^"]+)",\s*\{', text, re.MULTILINE))
    if why := refused_in_cpp(source, text):
        return Outcome(names, 0, why)
    if not (shutil.which("mpicxx") and shutil.which("mpirun")):
        return Outcome(names, 0, "mpicxx and mpirun are not found: activate the environment of `make setup`")
    with tempfile.TemporaryDirectory() as folder:
        answer, program = Path(folder) / exercise.path.name, Path(folder) / "graded"
        answer.write_text(source)
        if error := _compile(str(answer), str(_object_of(exercise, Path(folder))), "-o", str(program)):
            return Outcome(names, 0, "it does not compile: " + error.replace(f"{folder}/", ""))
        ranks = re.search(r"^// ranks: (\d+)$", text, re.MULTILINE)
        world, secret = ranks[1] if ranks else str(WORLD), secrets.token_hex(8)
        launch = ["mpirun", "-np", world, "--oversubscribe", str(program), str(seed), str(wait), secret]
        if os.geteuid() == 0:
            launch.insert(1, "--allow-run-as-root")
        out, err = _run(launch, wait + STARTS_WITHIN)
    if own := re.sub(rf"\n?(?:{secret}|rank \d+ waits) .*\n", "", out):  # what the answer prints
        print(own.removesuffix("\n"))
    if result := re.search(rf"^{secret} (\{{.*\}})$", out, re.MULTILINE):
        said = json.loads(result[1], strict=False)
        wrong = said["wrong"]
        return Outcome(
            names, said["met"], wrong.removeprefix("not written: "), wrong.startswith("not written")
        )
    if missed := sorted(re.findall(rf"^{secret} missed (\d+) (.*)$", out, re.MULTILINE)):
        return Outcome(names, int(missed[0][0]), missed[0][1])
    if stands := sorted(set(re.findall(r"^rank \d+ waits .*$", out, re.MULTILINE))):
        waits = any("waits in" in line for line in stands)
        why = "the ranks wait for one another" if waits else f"it does not end within {wait:g} s"
        return Outcome(names, 0, f"{why}: " + "; ".join(stands))
    return Outcome(names, 0, f"it ends before its result: {_said(err)}")
