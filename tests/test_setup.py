"""The set-up: its messages for missing programs, a second run, and the mpirun that it installs.

The script runs with stand-ins for Python, cmake and the compiler, so that a run takes a fraction of a second.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = "bash cat chmod cp dirname env grep mkdir nproc rm sh touch uname"

# Answers `-m venv` and `-m pip` in an instant and notes the calls; everything else goes to the real interpreter.
PYTHON = f"""#!/bin/sh
case "$*" in
"-m venv "*)
    mkdir -p "$3/bin" "$3/etc"
    [ -e "$3/bin/python" ] || cp "$0" "$3/bin/python"
    if [ "$FAILS" = venv ]; then exit 1; fi
    touch "$3/bin/activate" ;;
*"pip --disable-pip-version-check --version") ;;
"-m pip "*)
    echo "$*" >>"$CALLS"
    if [ "$*" = "$FAILS" ]; then exit 1; fi
    touch "${{0%/*}}/mpiexec" "${{0%/*}}/../etc/prte-mca-params.conf" "${{0%/*}}/../etc/openmpi-mca-params.conf" ;;
"-m compileall "*) echo "$*" >>"$CALLS" ;;
"-m common.utils.environment") echo "what was found" ;;
*) exec "{sys.executable}" "$@" ;;
esac
"""
CMAKE = """#!/bin/sh
mkdir -p build
touch build/CMakeCache.txt build/build.ninja
echo "cmake $*" >>"$CALLS"
"""
COMPILER = "#!/bin/sh\necho '{} {}'\n"  # what the preprocessor makes of __GNUC__ __clang_major__


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


class Machine:
    """A checkout, and a PATH with chosen programs only."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.root = folder / "bin", folder / "a checkout"
        self.venv, self.calls = self.root / ".venv", folder / "calls"
        self.bin.mkdir()
        (self.root / "scripts").mkdir(parents=True)
        for name in ("requirements.txt", "pyproject.toml", "scripts/install_all.sh"):
            shutil.copy(ROOT / name, self.root / name)
        for tool in TOOLS.split():
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        program(self.bin / "python3", PYTHON)
        program(self.bin / "cmake", CMAKE)
        program(self.bin / "c++", COMPILER.format(12, "__clang_major__"))

    def setup(self, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "CALLS": str(self.calls), "HOME": str(self.root), **variables}
        self.calls.write_text("")
        command = [str(self.bin / "bash"), str(self.root / "scripts/install_all.sh")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)

    def says(self, *parts: str, **variables: str) -> None:
        """Check for one line on stderr that contains `parts`, exit code 1, and no environment begun."""
        run = self.setup(**variables)
        assert run.returncode == 1, run
        assert run.stderr.count("\n") == 1, run.stderr
        assert all(part in run.stderr for part in parts), run.stderr
        assert not self.venv.exists()
        assert self.calls.read_text() == ""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def old_python(machine: Machine, version: tuple[int, int]) -> str:
    """Return a script that runs this Python under another version number."""
    site = machine.bin / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"import sys\nsys.version_info = {(*version, 0, 'final', 0)}\n")
    return f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n'


@pytest.mark.parametrize("version", [(3, 9), (3, 14), (2, 7)])
def test_python_of_another_version(machine: Machine, version: tuple[int, int]) -> None:
    program(machine.bin / "python3", old_python(machine, version))
    machine.says("Python 3.10 to 3.13", f"is Python {version[0]}.{version[1]}", "apt install", "PYTHON=")


def test_no_python(machine: Machine) -> None:
    (machine.bin / "python3").unlink()
    machine.says("Python 3.10 to 3.13", "none found", "apt install")


def test_python_that_does_not_run_is_passed_over(machine: Machine) -> None:
    (machine.bin / "python3").rename(machine.bin / "python3.11")
    program(machine.bin / "python3", "#!/bin/sh\nexit 127\n")  # a version manager's shim
    assert machine.setup().returncode == 0


def test_named_python_is_the_only_one_tried(machine: Machine) -> None:
    machine.says("Python 3.10 to 3.13", "none found", PYTHON="python3.12")


def test_no_compiler(machine: Machine) -> None:
    (machine.bin / "c++").unlink()
    machine.says("C++20 compiler", "none found", "GCC 11", "Clang 14", "apt install g++", "CXX=")


@pytest.mark.parametrize(
    ("macros", "name"),
    [(("10", "__clang_major__"), "GCC 10"), (("4", "13"), "Clang 13"), (("", ""), "does not compile")],
)
def test_old_compiler(machine: Machine, macros: tuple[str, str], name: str) -> None:
    program(machine.bin / "c++", COMPILER.format(*macros))
    machine.says("C++20 compiler", name, "apt install g++")


def test_a_newer_compiler_is_found_behind_an_old_one(machine: Machine) -> None:
    program(machine.bin / "c++", COMPILER.format(8, "__clang_major__"))
    program(machine.bin / "g++-12", COMPILER.format(12, "__clang_major__"))
    assert machine.setup().returncode == 0


def test_unknown_options(machine: Machine) -> None:
    machine.says("TORCH=gpu", "TORCH=cpu", TORCH="gpu")
    machine.says("MPI=mpich", "MPI=system", MPI="mpich")
    machine.says("MPI=system", "mpicxx", "apt install libopenmpi-dev", MPI="system")


def test_second_run_is_up_to_date(machine: Machine) -> None:
    first = machine.setup()
    assert (first.returncode, first.stderr) == (0, "")
    assert "pip" in machine.calls.read_text()
    second = machine.setup()
    assert second.returncode == 0
    assert "up to date" in second.stdout
    assert "what was found" in second.stdout
    assert re.fullmatch(r"cmake --build build --parallel \d+\n", machine.calls.read_text())


def test_a_change_is_installed(machine: Machine) -> None:
    machine.setup()
    with (machine.root / "requirements.txt").open("a") as file:
        file.write("# another pin\n")
    assert "up to date" not in machine.setup().stdout
    assert "pip" in machine.calls.read_text()


def test_open_mpi_takes_more_ranks_than_cores_and_does_not_sleep_at_its_start(machine: Machine) -> None:
    for change in ("# a pin\n", "# another pin\n"):  # the second run finds the parameters of the first
        with (machine.root / "requirements.txt").open("a") as file:
            file.write(change)
        machine.setup()
    for file, line in (
        ("prte", "rmaps_default_mapping_policy = slot:oversubscribe"),
        ("openmpi", "btl = ^ofi"),
    ):
        assert (machine.venv / f"etc/{file}-mca-params.conf").read_text().split("\n")[1:] == [line, ""]


def test_interrupted_run_is_completed(machine: Machine) -> None:
    machine.setup()
    calls = [call for call in machine.calls.read_text().splitlines() if "pip" in call]
    shutil.rmtree(machine.venv)
    assert machine.setup(FAILS="venv").returncode != 0
    for call in calls:
        assert machine.setup(FAILS=call).returncode != 0
        assert (machine.venv / "bin/activate").exists()
        assert machine.calls.read_text().splitlines()[-1] == call
    assert "up to date" not in machine.setup().stdout
    assert "up to date" in machine.setup().stdout


def test_clean_build_is_configured_again(machine: Machine) -> None:
    machine.setup()
    shutil.rmtree(machine.root / "build")
    assert machine.setup().returncode == 0
    assert "--preset release" in machine.calls.read_text()


def test_packages_are_compiled_where_python_keeps_nothing(machine: Machine) -> None:
    machine.setup()
    assert "compileall" not in machine.calls.read_text()
    (machine.venv / "made-from.txt").unlink()
    assert machine.setup(PYTHONDONTWRITEBYTECODE="1").returncode == 0
    assert "-m compileall -qq -j 0" in machine.calls.read_text()


def test_torch_cpu_that_no_index_has(machine: Machine) -> None:
    torch = re.search("^torch==.*", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert torch
    run = machine.setup(
        TORCH="cpu", FAILS=f"-m pip --disable-pip-version-check install --no-compile --quiet {torch[0]}+cpu"
    )
    assert run.returncode == 1
    assert "PIP_EXTRA_INDEX_URL" in run.stderr
    assert run.stderr.count("\n") == 1


def test_mpirun_starts_more_ranks_than_cores_from_anywhere(tmp_path: Path) -> None:
    folder = Path(sys.prefix, "bin")
    if not (folder / "mpirun").exists():
        pytest.skip("MPI is not the environment's own")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PRTE_", "PMIX_"))}
    environment = {**kept, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    ranks = 2 * (os.cpu_count() or 1) + 1
    command = ["mpirun", "-np", str(ranks), "sh", "-c", "echo rank $OMPI_COMM_WORLD_RANK"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == sorted(f"rank {rank}" for rank in range(ranks))


def test_make_help_lists_every_target() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [line.split()[0] for line in shown.stdout.splitlines()] == targets
    assert set(targets) >= {"help", "setup", "test", "benchmark", "lint", "format", "clean"}


def test_the_demo_says_where_its_picture_is() -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    command, says = shown.stdout.splitlines()[-2:]
    (picture,) = re.findall(r"--plot (\S+)", command)
    (lesson,) = re.findall(r"python (\S+)", command)
    assert (ROOT / lesson).exists()
    assert picture in says
    assert subprocess.run(["git", "check-ignore", "--quiet", picture], cwd=ROOT).returncode == 0
