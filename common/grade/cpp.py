"""Grading of an exercise in C++: the answer is compiled with its targets and run by mpirun.

The answer may call the functions of MPI that a line of the targets file, `// allowed: MPI_Send ...`, names, and the
standard library. MPI's profiling interface counts its messages (cpp/include/fived/lesson/grade.hpp).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from common.grade.exercises import ROOT, Exercise, Outcome

COMPILE = ("-std=c++20", "-O0", "-Wall", "-Wextra", f"-I{ROOT / 'cpp' / 'include'}", "-pthread")
HEADER = ROOT / "cpp" / "include" / "fived" / "lesson" / "grade.hpp"
WORLD = 4  # ranks, unless a line `// ranks: 8` of the targets says otherwise; a target runs on the first ones
STARTS_WITHIN = 60.0  # seconds for mpirun to start and end


def refused_in_cpp(source: str, targets: str) -> str:
    """Return what an answer in C++ uses that it must not; empty if there is nothing."""
    found = re.search(r"^// allowed: (.*)$", targets, re.MULTILINE)
    allowed = set(found[1].split() if found else ())
    for number, line in enumerate(source.splitlines(), 1):
        code = line.split("//")[0]
        if (include := re.match(r"\s*#\s*include\s*(\S+)", code)) and not re.fullmatch(
            r"<\w+(\.h)?>", include[1]
        ):
            return (
                f"line {number} includes {include[1]}; write it yourself, with MPI and the standard library"
            )
        for name in re.findall(r"\b(?:P?MPI_\w+|system|popen|dlsym|dlopen|asm|fork)\b", code):
            if re.fullmatch(r"MPI_[A-Z][a-z]\w*", name) and name in allowed:
                continue
            if not re.fullmatch(r"MPI_([A-Z_0-9]+|Comm|Request|Status|Datatype)", name):
                return (
                    f"line {number} calls {name}; write it with {', '.join(sorted(allowed)) or 'no message'}"
                )
    return ""


def _object_of(exercise: Exercise) -> Path:
    """Return the compiled targets, which are compiled anew only if they or the grader's header changed."""
    text = exercise.targets.read_bytes() + HEADER.read_bytes()
    name = f"{exercise.path.stem}-{hashlib.sha256(text).hexdigest()[:16]}.o"
    compiled = ROOT / "build" / "exercises" / name
    if not compiled.exists():
        compiled.parent.mkdir(parents=True, exist_ok=True)
        unfinished = compiled.with_suffix(f".{os.getpid()}")
        command = ["mpicxx", *COMPILE, "-c", str(exercise.targets), "-o", str(unfinished)]
        subprocess.run(command, check=True)
        unfinished.rename(compiled)
    return compiled


def _run(launch: list[str], limit: float) -> tuple[str, str]:
    """Return (stdout, stderr) of mpirun. After `limit` seconds mpirun is told to end, and ends its ranks."""
    run = subprocess.Popen(launch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        return run.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        run.terminate()
        with suppress(subprocess.TimeoutExpired):
            run.communicate(timeout=10)
        run.kill()
        return "", f"it did not end within {limit:g} s"


def attempt_in_cpp(exercise: Exercise, seed: int, source: str, wait: float) -> Outcome:
    """Compile and run an answer; `wait`: seconds after which ranks that wait for one another are ended."""
    text = exercise.targets.read_text()
    names = tuple(re.findall(r'^ *\{\s*"([^"]+)", \{', text, re.MULTILINE))
    if why := refused_in_cpp(source, text):
        return Outcome(names, 0, why)
    if not (shutil.which("mpicxx") and shutil.which("mpirun")):
        return Outcome(names, 0, "mpicxx and mpirun are not found: activate the environment of `make setup`")
    with tempfile.TemporaryDirectory() as folder:
        answer, program = Path(folder) / exercise.path.name, Path(folder) / "graded"
        answer.write_text(source)
        command = ["mpicxx", *COMPILE, str(answer), str(_object_of(exercise)), "-o", str(program)]
        compiled = subprocess.run(command, capture_output=True, text=True)
        if compiled.returncode:
            errors = [line for line in compiled.stderr.splitlines() if "error" in line or "undefined" in line]
            said = (errors or compiled.stderr.splitlines() or ["the compiler gave no reason"])[0]
            return Outcome(names, 0, "it does not compile: " + said.replace(f"{folder}/", ""))
        ranks = re.search(r"^// ranks: (\d+)$", text, re.MULTILINE)
        world = ranks[1] if ranks else str(WORLD)
        launch = ["mpirun", "-np", world, "--oversubscribe", str(program), str(seed), str(wait)]
        if os.geteuid() == 0:
            launch.insert(1, "--allow-run-as-root")
        out, err = _run(launch, wait + STARTS_WITHIN)
    for line in out.splitlines():
        if line.startswith("{"):
            said = json.loads(line)
            wrong = said["wrong"]
            return Outcome(
                tuple(said["targets"]),
                said["met"],
                wrong.removeprefix("not written: "),
                wrong.startswith("not written"),
            )
    if missed := sorted(re.findall(r"^missed (\d+) (.*)$", out, re.MULTILINE)):
        return Outcome(names, int(missed[0][0]), missed[0][1])
    stands = sorted({line for line in out.splitlines() if re.match(r"rank \d+ waits in", line)})
    if stands:
        return Outcome(names, 0, "the ranks wait for one another: " + "; ".join(stands))
    return Outcome(names, 0, "it ends before its result: " + (err.strip().splitlines() or ["no reason"])[0])
