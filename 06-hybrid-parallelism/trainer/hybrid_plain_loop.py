"""Overhead of the trainer on one rank: its step beside a loop of a dozen lines of plain PyTorch.

    for inputs, targets in micro-batches:
        (cross_entropy(model(inputs), targets, reduction="sum") / tokens).backward()
    clip_grad_norm_;  AdamW.step;  zero_grad

Both train on the same batches; their weights after the timed steps must be equal. In addition the trainer
runs the loop as a schedule of one stage, checks for a stop signal and for numbers that are not finite, and
counts.

    OMP_NUM_THREADS=1 python hybrid_plain_loop.py --model llama-10m --sequence 128 --steps 11
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch.nn.functional as F
from torch import nn

from common.errors import UsageError
from common.launch.command_line import Count
from common.launch.runtime import Runtime
from common.lesson.comparison import records, report
from common.lesson.equality import TOLERANCE, largest
from common.lesson.measure import in_turn
from common.lesson.runner import DTYPES, console, run
from common.lesson.training import make_model
from common.models.transformer import Transformer

from hybrid_log import Log
from hybrid_metrics import Meter
from hybrid_optimizer import learning_rate, make_optimizer
from hybrid_options import TrainOptions
from hybrid_signals import Signals
from hybrid_trainer import Trainer, start

WARM_UP = 2
OF_MANY_RANKS = (
    "pp dp ep sp tp schedule chunks attention sequence_parallel zero overlap checkpointing precision explain "
)
OF_A_LONG_RUN = (
    "config init log_every evaluate_every evaluation generate prompt temperature "
    "checkpoints checkpoint_every keep asynchronous resume export tensorboard trace "
    "balance balance_coefficient balance_rate z_coefficient"
)


@dataclass
class Options(TrainOptions, without=(OF_MANY_RANKS + OF_A_LONG_RUN).split()):
    """Options: the model and the batch; everything else is the trainer's default."""

    steps: Count = 7
    """Timed steps of each loop."""


def plain_loop(model: Transformer, trainer: Trainer) -> Callable[[], None]:
    """Return a training step in plain PyTorch, with the trainer's data, AdamW settings and learning rate."""
    o, batches, at = trainer.o, trainer.batches, iter(range(10**9))
    optimizer = make_optimizer(cast(Any, model), o)

    def step() -> None:
        t = next(at)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(t, o)
        optimizer.zero_grad()
        for tokens_BS, targets_BS in batches.parts(t):
            logits_NV = model(tokens_BS).flatten(0, 1)
            loss = F.cross_entropy(logits_NV, targets_BS.flatten(), reduction="sum") / (o.batch * o.sequence)
            loss.backward()
            loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        optimizer.step()

    return step


def main(rt: Runtime, o: Options) -> bool:
    """Time both in turn, then compare their weights; return True if these are equal."""
    if rt.world_size > 1:
        raise UsageError(f"a plain loop runs on one rank, not on {rt.world_size}; leave --nproc out")
    if not o.clip:
        raise UsageError("--clip 0: the plain loop clips; give a norm above 0, such as 1")
    timed, o.steps = o.steps, o.steps + WARM_UP
    trainer, model = start(rt, o), make_model(o, rt.device)
    loop = plain_loop(model, trainer)
    cases: dict[str, Callable[[], object]] = {"plain loop": loop, "trainer": trainer.train}
    with Log(rt, o, trainer.begin) as trainer.log, Signals() as trainer.signals:
        trainer.meter = Meter(rt, o)
        measured = in_turn(cases, timed, rt.world, WARM_UP, rt.device.type)
    difference = largest(dict(model.named_parameters()), dict(trainer.hybrid.named_parameters()), "")
    report(rt, o, records(rt, o, measured, dict.fromkeys(cases, 0), axis="hybrid"))
    out, equal = console(rt), difference.value <= TOLERANCE[DTYPES[o.dtype]]
    ratio = measured["trainer"].median / measured["plain loop"].median
    out.print(
        f"trainer / plain loop: {ratio:.3f}; weights differ by {difference.value:.1e} {difference.where}"
    )
    return equal


if __name__ == "__main__":
    run(main, Options)
