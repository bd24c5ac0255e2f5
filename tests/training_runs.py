"""Runs of chapter 06 for its tests: on one device, and of the trainer with tiny models and stops in the middle."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from common.comm import Group
from common.launch.runtime import Runtime
from common.lesson.equality import OPTIMIZERS, Followed, watch
from common.lesson.job import one_device
from common.lesson.training import make_model
from common.models.configs import CONFIGS, gpt2, llama, mixtral

from hybrid_export import weights_on_rank_0
from hybrid_layout import HybridOptions
from hybrid_log import Log
from hybrid_options import TrainOptions
from hybrid_signals import STOP
from hybrid_trainer import Trainer, start
from hybrid_training import alone

ALONE = Runtime(0, 1, 0, 1, "none", torch.device("cpu"), "gloo", 60.0, Group.alone("world"))
CONFIGS["nano-llama"] = llama(layers=2, width=16, heads=4, kv_heads=2, mlp_width=24, sequence=16)
CONFIGS["nano-mixtral"] = mixtral(
    layers=4, width=16, heads=4, kv_heads=2, mlp_width=12, sequence=16, experts=4
)
CONFIGS["nano-gpt2"] = gpt2(layers=2, width=16, heads=2, sequence=16)


@dataclass
class Ran:
    """Results of a run on one rank; weights are whole, on rank 0."""

    finished: bool = False
    losses: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    errors: str = ""


def on_one_device(rt: Runtime, o: HybridOptions, optimizer: str) -> Followed:
    """Train the plain model on one device; the layout of `o` does not count."""
    job = alone(rt, o, make_model(o, rt.device), OPTIMIZERS[optimizer])
    return watch(one_device(job), job)


def options(**given: Any) -> TrainOptions:
    """Return the options of a short run in float64."""
    short = dict(model="nano-llama", steps=6, batch=6, sequence=16, warm_up=2, learning_rate=1e-2)
    short |= dict(dtype="float64", evaluation=5, evaluate_every=0, log_every=100, peak_tflops=1.0)
    return TrainOptions(**(short | given))


def go(
    rt: Runtime,
    o: TrainOptions,
    stop_after: int = 0,
    change: Callable[[Trainer], None] | None = None,
    kind: type[Trainer] = Trainer,
) -> Ran:
    """Run training; after step `stop_after`, if any, the last rank gets SIGTERM. change: adds a fault."""
    ran, trainer = Ran(), start(rt, o, kind)
    if change:
        change(trainer)
    train = trainer.train

    def watched() -> dict[str, float]:
        found = train()
        ran.losses[trainer.step] = found["loss"]
        if stop_after == trainer.step and rt.rank == rt.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    trainer.train = watched  # type: ignore[method-assign]
    errors = io.StringIO()

    def noted(log: Log, kind: str, step: int, **values: Any) -> None:
        if kind == "evaluation":
            ran.validation[step] = values["validation_loss"]
        if kind == "text":
            ran.texts[step] = values["text"]
        record(log, kind, step, **values)

    record, before = Log.record, {number: signal.getsignal(number) for number in STOP}
    screen = contextlib.redirect_stdout(io.StringIO())
    with patch.object(Log, "record", noted), contextlib.redirect_stderr(errors), screen:
        ran.finished = trainer.run()
    for number, handler in before.items():  # a run that was told to stop leaves them ignored
        signal.signal(number, handler)
    ran.weights, ran.errors = weights_on_rank_0(trainer.hybrid), errors.getvalue()
    return ran


def file_of(folder: Path) -> bytes:
    """Return the bytes of the exported weights."""
    return (folder / "model.safetensors").read_bytes()
