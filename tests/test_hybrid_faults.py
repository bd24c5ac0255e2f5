"""Faults in a run: messages, exit codes, and that no checkpoint is lost. The tests inject the faults."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi.launch import ROOT, run, torchrun
from test_hybrid_trainer import ALONE
from training_runs import Ran, file_of, go, options

from common.errors import RankError, UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.runner import write_records

from hybrid_checkpoint import Checkpoints, SaveFailed
from hybrid_files import Writer
from hybrid_log import records_of
from hybrid_options import TrainOptions
from hybrid_trainer import Trainer, start

SIZES = dict(
    seed=0, steps=6, batch=6, sequence=16, log_every=1, evaluate_every=0, checkpoint_every=2, peak_tflops=1
)


def arguments(**more: Any) -> list[str]:
    """Return the options of a command line."""
    return [f"--{key.replace('_', '-')}={value}" for key, value in (SIZES | more).items()]


def records(file: Path, kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind in a file of JSON lines."""
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [record for record in found if record["kind"] == kind]


def test_a_killed_rank_costs_nothing(tmp_path: Path) -> None:
    """After SIGKILL under torchrun, the restarted run ends with an undisturbed run's weights, bit for bit."""
    script = str(ROOT / "tests/scripts/killed_training.py")
    given = dict(model="nano-llama", dp=1, tp=2, checkpoints=tmp_path / "runs", json=tmp_path / "log")
    ended = torchrun(2, "--max-restarts=1", script, "3", *arguments(**given, export=tmp_path / "killed"))
    assert ended.returncode == 0, ended.stderr
    assert "failed (exitcode: -9) local_rank: 1" in ended.stderr
    assert "resumed after step 2 of 6 from" in ended.stdout
    assert [r["step"] for r in records(tmp_path / "log", "step")] == [1, 2, 3, 3, 4, 5, 6]
    whole = options(
        **SIZES | dict(model="nano-llama", dp=1, tp=2, dtype="float32", export=tmp_path / "whole")
    )
    # as the command line has them
    whole = replace(whole, learning_rate=TrainOptions.learning_rate, warm_up=TrainOptions.warm_up)
    spawn(go, 2, whole)
    assert file_of(tmp_path / "killed") == file_of(tmp_path / "whole")


def test_sigterm_stops_all_ranks_with_a_checkpoint(tmp_path: Path) -> None:
    """The parent process passes SIGTERM on to all ranks; the run saves a checkpoint and exits with code 0."""
    script = str(ROOT / "06-hybrid-parallelism/examples/train_llama.py")
    given = arguments(
        model="llama-tiny", steps=100000, nproc=2, checkpoints=tmp_path / "runs", json=tmp_path / "log"
    )
    process = subprocess.Popen(
        [sys.executable, script, *given], stdout=-1, stderr=-1, text=True, env=os.environ
    )
    while not records(tmp_path / "log", "step") and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    (ended,) = records(tmp_path / "log", "end")
    assert ended["stopped"]
    assert f"told to stop: after step {ended['step']} of 100000; a checkpoint is in" in out
    newest = max((tmp_path / "runs").iterdir())
    assert json.loads((newest / "about.json").read_text())["step"] == ended["step"]


def hangs(rt: Runtime, o: TrainOptions) -> None:
    """Train; rank 1 falls asleep in its third step."""

    def change(trainer: Trainer) -> None:
        step = trainer.hybrid.step
        trainer.hybrid.step = lambda *given, at: sleep_in_the_third(rt, partial(step, *given, at=at), at[0])  # type: ignore[method-assign]

    go(rt, o, change=change)


def shorten_waits(seconds: float = 3.0) -> None:
    """Shorten the timeout of this rank's process groups, once the run has started."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def sleep_in_the_third(rt: Runtime, step: Callable[[], torch.Tensor], t: int) -> torch.Tensor:
    if t == 2:
        shorten_waits()
        if rt.rank == 1:
            time.sleep(1000)
    return step()


def test_a_rank_that_hangs_is_named_with_where() -> None:
    with pytest.raises(RankError) as error:
        spawn(hangs, 2, options(), limit=None)
    assert "rank 0 failed in all_reduce over" in str(error.value)
    assert "rank 1 stood" in str(error.value)
    assert "(sleep_in_the_third)" in str(error.value)


def never_writes(rt: Runtime, o: TrainOptions) -> None:
    """Train; rank 1 falls asleep while it writes a checkpoint."""
    write = Writer.write_data

    def sleepy(self: Writer, *given: Any) -> Any:
        shorten_waits()
        if rt.rank == 1:
            time.sleep(1000)
        return write(self, *given)

    with patch.object(Writer, "write_data", sleepy):
        go(rt, o)


def test_a_checkpoint_that_never_comes_is_named_too(tmp_path: Path) -> None:
    """In an asynchronous checkpoint a thread of rank 1 hangs and rank 1 waits for it: the error says so."""
    o = options(checkpoints=tmp_path, checkpoint_every=2, asynchronous=True)
    with pytest.raises(RankError) as error:
        spawn(never_writes, 2, o, limit=None)
    assert "rank 0 failed in a checkpoint over 'world'" in str(error.value)
    assert "rank 1 stood in a checkpoint over 'world'" in str(error.value)
    assert not list(tmp_path.glob("step-????????"))


def not_a_number(trainer: Trainer) -> None:
    """Make the loss NaN in the third step, on rank 1 alone."""
    step, rank = trainer.hybrid.step, trainer.rt.rank

    def broken(*given: torch.Tensor, at: tuple[int, int]) -> torch.Tensor:
        loss = step(*given, at=at)
        return loss * math.nan if at[0] == 2 and rank == 1 else loss

    trainer.hybrid.step = broken  # type: ignore[method-assign]


def infinite_gradient(trainer: Trainer) -> None:
    """Make a gradient infinite in the third step, on rank 1 alone; every loss stays finite."""
    clip, rank = trainer.hybrid.clip, trainer.rt.rank

    def broken(*given: Any) -> torch.Tensor:
        if trainer.step == 2 and rank == 1:
            next(p for p in trainer.hybrid.parameters() if p.numel()).grad.mul_(math.inf)  # type: ignore[union-attr]

        return clip(*given)

    trainer.hybrid.clip = broken  # type: ignore[method-assign]


def left_out(trainer: Trainer) -> None:
    """Skip the optimizer in the third step, without any other fault."""
    step = trainer.optimizer.step

    def but_the_third(*given: Any) -> Any:
        return step(*given) if trainer.step != 2 else None

    trainer.optimizer.step = but_the_third  # type: ignore[method-assign]


def several(rt: Runtime, *given: tuple[TrainOptions, int, Callable[[Trainer], None] | None]) -> list[Ran]:
    """Run training with faults, one run after the other."""
    return [go(rt, *one) for one in given]


def test_what_is_not_finite_stops_all_ranks_or_is_left_out() -> None:
    o = options(zero=1)
    skip = replace(o, nonfinite="skip")
    ranks = spawn(
        several,
        2,
        (o, 0, not_a_number),
        (o, 1, None),
        (skip, 0, not_a_number),
        (o, 0, left_out),
        (replace(o, zero=0), 0, infinite_gradient),
        timeout=200,
    )
    for rank, (stopped, two_steps, skipped, by_hand, infinite) in enumerate(ranks):
        assert not stopped.finished
        assert list(stopped.losses) == [1, 2, 3]  # all in the same step
        assert two_steps.finished
        assert list(two_steps.losses) == [1, 2]
        assert skipped.finished
        assert list(skipped.losses) == [1, 2, 3, 4, 5, 6]
        assert stopped.errors.count("\n") == (rank == 0)
        assert by_hand.finished
        assert not infinite.finished
        assert list(infinite.losses) == [1, 2, 3]
    stopped, two_steps, skipped, by_hand, infinite = ranks[0]
    assert "norm nan)" in infinite.errors
    assert stopped.errors.startswith("error: in step 3 the loss or the gradient is not finite")
    for name, x in two_steps.weights.items():
        assert torch.equal(stopped.weights[name], x), name
        assert torch.equal(skipped.weights[name], by_hand.weights[name]), name
        assert not torch.equal(skipped.weights[name], x), name


def spoilt(rt: Runtime, o: TrainOptions) -> Ran:
    """Train with NaN as one of rank 1's weights, which all tokens need, as damaged memory would leave it."""

    def change(trainer: Trainer) -> None:
        if rt.rank == 1:
            named = trainer.hybrid.named_parameters()
            next(p for name, p in named if "norm" in name and p.numel()).data.view(-1)[0] = math.nan

    return go(rt, o, change=change)


def test_a_weight_or_a_token_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    for rank, ran in enumerate(spawn(spoilt, 2, options(dp=1, tp=2))):
        assert not ran.finished
        assert list(ran.losses) == [1]
        said = "error: in step 1 the loss or the gradient is not finite (rank 0: loss nan"
        assert ran.errors.startswith(said if rank == 0 else "")
        assert ran.errors.count("\n") == (rank == 0)
    np.save(tmp_path / "tokens.npy", np.full(1000, math.nan))
    with pytest.raises(
        UsageError, match=r"holds float64 of shape \[1000\]; token numbers in a row are needed"
    ):
        start(ALONE, options(data=tmp_path / "tokens.npy"))


def test_nothing_grows_from_step_to_step() -> None:
    """The number of Python objects (tensors included) does not grow, also after evaluations and records."""
    alive: list[int] = []

    def change(trainer: Trainer) -> None:
        train = trainer.train

        def counted() -> dict[str, float]:
            gc.collect()
            alive.append(len(gc.get_objects()))
            return train()

        trainer.train = counted  # type: ignore[method-assign]

    gc.freeze()  # ignore objects that exist already
    go(ALONE, options(model="nano-mixtral", steps=30, evaluate_every=5), change=change)
    gc.unfreeze()
    assert max(alive[20:]) - max(alive[10:20]) < 15  # the progress bar keeps a thousand steps, an object each


def test_a_checkpoint_that_cannot_be_written_ends_no_run_but_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a checkpoint cannot be written, training goes on with a warning; at the end, the exit code is 1."""
    save = Checkpoints.save

    def full(self: Checkpoints, step: int, *given: Any) -> None:
        if step in bad:
            raise SaveFailed(f"checkpoint {step} was not written: No space left on device")
        save(self, step, *given)

    monkeypatch.setattr(Checkpoints, "save", full)
    o = options(checkpoints=tmp_path, checkpoint_every=2)
    bad = {4}
    assert start(ALONE, o).run()
    assert "warning: checkpoint 4 was not written: No space left" in capsys.readouterr().out
    assert [path.name for path in sorted(tmp_path.glob("step*"))] == ["step-00000002", "step-00000006"]
    bad, more = {8}, dict(steps=8, evaluate_every=8, export=tmp_path / "exported", json=tmp_path / "log")
    assert not start(ALONE, replace(o, **more)).run()
    with patch("hybrid_trainer.export", side_effect=UsageError("cannot write the model")):
        assert not start(ALONE, options(**more | dict(steps=2, json=None))).run()
    assert "warning: cannot write the model" in capsys.readouterr().out
    assert file_of(tmp_path / "exported")  # the export still works
    assert [r["step"] for r in records(tmp_path / "log", "evaluation")] == [8]


def test_told_to_stop_in_the_last_step_it_is_done(tmp_path: Path) -> None:
    o = options(json=tmp_path / "log", evaluate_every=3, export=tmp_path / "exported")
    assert go(ALONE, o, stop_after=5).finished  # the signal is seen in the sixth of six
    assert [r["step"] for r in records(tmp_path / "log", "evaluation")] == [3, 6]
    assert [r["stopped"] for r in records(tmp_path / "log", "end")] == [False]
    assert file_of(tmp_path / "exported")


def test_sigusr1_before_there_is_a_step_ends_nothing() -> None:
    code = "import hybrid_signals as s, os; s.pass_on(); os.kill(os.getpid(), s.TRACE); print('goes on')"
    assert run([sys.executable, "-c", code]).stdout == "goes on\n"


def test_a_full_disk_ends_the_records_and_not_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert start(ALONE, options(json=Path("/dev/full"))).run()
    said = capsys.readouterr().out
    assert (
        said.count("warning: --json /dev/full cannot be written: No space left on device; the run goes on")
        == 1
    )


def test_a_full_disk_ends_the_board_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    assert start(ALONE, options(tensorboard=tmp_path)).run()
    assert (
        capsys.readouterr().out.count("warning: --tensorboard cannot be written: No space left on device")
        == 1
    )


def test_a_line_that_a_crash_cut_short_costs_no_other(tmp_path: Path) -> None:
    file, whole = tmp_path / "run.jsonl", {"kind": "end", "step": 6}
    file.write_text('{"kind": "step", "st')
    write_records(file, [whole])
    write_records(file, [whole])
    assert list(records_of(file)) == [whole, whole]
