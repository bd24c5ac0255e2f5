"""Spawned ranks start, return, fail and hang: the messages of `spawn` and of the watchdog under it."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from common import comm
from common.comm import blocked_in
from common.errors import RankError, UsageError
from common.launch import spawn as module
from common.launch import watchdog
from common.launch.launcher import Launch
from common.launch.runtime import Runtime
from common.launch.spawn import spawn


def add_up(rt: Runtime, extra: int) -> tuple[int, float]:
    x = torch.tensor([float(rt.rank + extra)])
    comm.all_reduce(x, rt.world)
    return rt.rank, x.item()


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_results_come_in_rank_order(world: int) -> None:
    total = sum(rank + 10 for rank in range(world))
    assert spawn(add_up, world, 10) == [(rank, total) for rank in range(world)]


def terminated_while_it_fails(rt: Runtime) -> None:
    """Fail on rank 0, with a SIGTERM before the report, as from a launcher that ends all ranks."""
    if rt.rank == 0:
        describe = watchdog.describe

        def later(error: BaseException, rank: int) -> str:
            os.kill(os.getpid(), signal.SIGTERM)
            return describe(error, rank)

        watchdog.describe = later
        raise ArithmeticError("the reason")
    comm.barrier(rt.world)


def test_a_rank_reports_before_its_launcher_ends_it() -> None:
    with pytest.raises(RankError, match="ArithmeticError: the reason"):
        spawn(terminated_while_it_fails, 2)


def raise_on_one(rt: Runtime, bad: int) -> None:
    if rt.rank == bad:
        raise ArithmeticError("the reason")
    comm.barrier(rt.world)


@pytest.mark.parametrize("bad", [0, 2])
def test_first_traceback_is_the_one_shown(bad: int) -> None:
    with pytest.raises(RankError) as error:
        spawn(raise_on_one, 3, bad)
    assert f"rank {bad} failed" in str(error.value)
    assert "ArithmeticError: the reason" in str(error.value)
    assert "Connection closed" not in str(error.value)


def die(rt: Runtime) -> None:
    if rt.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(torch.ones(1000), rt.world)


def test_killed_rank_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 was ended by SIGKILL"):
        spawn(die, 3)


def leave_in_silence(rt: Runtime) -> None:
    if rt.rank == 1:
        os._exit(5)
    comm.all_reduce(torch.ones(1000), rt.world)


def test_rank_that_ends_without_a_word_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 ended with exit code 5 and no result"):
        spawn(leave_in_silence, 3)


def write_and_sleep(rt: Runtime, folder: str) -> None:
    Path(folder, f"{rt.rank}").write_text(str(os.getpid()))
    time.sleep(1000)


@pytest.fixture
def long_folder(tmp_path: Path) -> str:
    """Return a folder for temporary files, with spaces and umlauts, too long for a socket's address."""
    folder = tmp_path / "ein längerer Weg, an dessen Ende kein Socket mehr einen Namen hätte"
    folder.mkdir()
    return str(folder)


def test_ranks_go_with_their_parent(tmp_path: Path, long_folder: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from common.launch.spawn import spawn\nfrom test_spawn import write_and_sleep\n"
        f"if __name__ == '__main__':\n    spawn(write_and_sleep, 2, {str(tmp_path)!r}, timeout=600)\n"
    )
    here = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "TMPDIR": long_folder}
    parent = subprocess.Popen([sys.executable, str(script)], env=here)
    while not all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "01"):
        assert parent.poll() is None
        time.sleep(0.1)
    ranks = [int((tmp_path / name).read_text()) for name in "01"]
    parent.kill()
    parent.wait()
    while any(map(psutil.pid_exists, ranks)):  # pytest's own timeout ends a wait that has no end
        time.sleep(0.1)


def test_a_rank_without_a_parent_ends(tmp_path: Path) -> None:
    """The folder of its store has gone with the parent: FileStore would wait for it for five minutes."""
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    given = Launch("spawn", 0, 1, 0, 1), str(tmp_path / "gone" / "store"), "cpu", "gloo", 60.0, there, {}, b""
    rank = context.Process(target=module._rank, args=(*given, (None, None)), daemon=True)
    here.close()
    rank.start()
    there.close()
    rank.join(60)
    assert rank.exitcode == 1


def test_folders_of_killed_parents_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, dead, living, of_others = (tmp_path / f"pymp-{name}" for name in ("own", "dead", "living", "others"))
    for folder in (own, dead, living, of_others):
        folder.mkdir()
    for file in (dead / module.MARK, living / module.MARK, of_others / "other"):
        file.touch()
    monkeypatch.setattr(module, "_marks", {})  # as at the start of a process
    monkeypatch.setattr(module.util, "get_temp_dir", lambda: str(own))
    with (living / module.MARK).open() as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        assert module._folder() == own
        assert [folder.exists() for folder in (own, dead, living, of_others)] == [True, False, True, True]


def test_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without file locks no mark is made: an unlocked mark lets others remove a living process's folder."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module, "_marks", {})
    monkeypatch.setattr(module.util, "get_temp_dir", lambda: str(tmp_path))
    monkeypatch.setattr(module.fcntl, "flock", no_locks)
    assert module._folder() == tmp_path
    assert not (tmp_path / module.MARK).exists()


def sleep_forever(rt: Runtime, folder: Path) -> None:
    (folder / f"{rt.rank}").touch()
    if rt.rank == 1:
        time.sleep(1000)
    comm.all_reduce(torch.ones(10), rt.world)


def test_hang_names_every_rank_and_where_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names each rank's position; time counts only once all ranks hang."""
    up = SimpleNamespace(monotonic=lambda: 2.0 * (len(list(tmp_path.iterdir())) == 3))
    monkeypatch.setattr(sys.modules["common.launch.spawn"], "time", up)
    with pytest.raises(RankError) as error:
        spawn(sleep_forever, 3, tmp_path, limit=1)
    message = str(error.value)
    assert "all_reduce over 'world'" in message
    assert "(sleep_forever)" in message
    assert "rank 1" in message


def test_what_lies_in_no_file_is_refused() -> None:
    typed = "from common.launch.spawn import spawn\nspawn(print, 2)\n"
    done = subprocess.run([sys.executable, "-"], input=typed, text=True, capture_output=True, timeout=240)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ValueError: spawn's ranks import the script again")


def test_an_end_while_the_watchdog_is_inside_a_slow_store() -> None:
    script = Path(__file__).parent / "scripts" / "slow_store.py"
    cases = ("0.06", "4"), ("0.06", "0.001"), ("1000", "0.1")  # the last look never ends
    ends = [
        subprocess.Popen([sys.executable, script, *case], stdout=-1, stderr=-1, text=True) for case in cases
    ]
    for end in ends:
        out, err = end.communicate(timeout=240)
        assert (end.returncode, out, err) == (3, "proved\n", "")


def timed_out_alone(rt: Runtime) -> None:
    """Time out on rank 0, whose watchdog looks no more, while rank 1 is silent."""
    watchdog.LOOK_EVERY = 60
    time.sleep(1)  # the watchdog's last look
    if rt.rank == 1:
        time.sleep(60)
    comm.all_reduce(torch.zeros(1), rt.world)


def test_a_rank_whose_wait_ends_before_the_watchdog_looks_has_a_place() -> None:
    with pytest.raises(
        RankError, match=r"rank 0 stands in all_reduce over 'world'(.*\n)+ *rank 1 does not answer"
    ):
        spawn(timed_out_alone, 2, timeout=1, limit=5)


def blames_the_peer(rt: Runtime) -> None:
    if rt.rank == 0:
        blocked_in.update(op="send to 1", axis="world", since=time.perf_counter() - rt.timeout)
        raise RuntimeError("Connection closed by peer. This may be caused by a remote worker crashing")


def test_a_wait_that_timed_out_is_called_so() -> None:
    with pytest.raises(RankError, match=r"rank 0 failed in send to 1 .*: timed out after 60 s") as error:
        spawn(blames_the_peer, 2, timeout=60)
    assert "crash" not in str(error.value)


def misuse(rt: Runtime) -> None:
    raise UsageError("given 3, needed 4; 2 or 4 would work")


def test_bad_input_is_one_line() -> None:
    with pytest.raises(RankError) as error:
        spawn(misuse, 4)
    assert str(error.value) == "error: given 3, needed 4; 2 or 4 would work"
    assert error.value.code == 2
