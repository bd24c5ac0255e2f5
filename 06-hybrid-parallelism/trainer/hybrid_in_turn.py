"""Time the steps of a run with other options, in turn, so that a change of the machine's speed affects all alike.

    python hybrid_in_turn.py --model gpt2-tiny --nproc 4 --vary tp=2 "pp=2 micro-batches=4" precision=bfloat16

The first case is the run as the other options say. Each --vary is a case: its options, over the others. In every round
each case trains one step; no evaluation, text or checkpoint is written. A ratio is that of two steps of one
round, so it is above 1 where a case is faster than the first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from common.errors import UsageError
from common.launch import command_line
from common.launch.command_line import Count
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.measure import Measured, in_turn
from common.lesson.runner import console, run, write_records

from hybrid_log import Log
from hybrid_metrics import Meter
from hybrid_options import TrainOptions, parse
from hybrid_signals import Signals
from hybrid_trainer import Trainer, start

WARM_UP = 2
AS_GIVEN = "as given"


@dataclass
class Options(
    TrainOptions, without=("checkpoints", "save", "export", "tensorboard", "trace", "plot", "resume")
):
    """Options: a run's, and those that differ."""

    steps: Count = 5
    """Steps to time, of each case."""
    vary: tuple[str, ...] = ()
    """Cases: options as name=value, several in quotation marks; yes and no switch a flag."""

    def cases(self) -> dict[str, TrainOptions]:
        """Return the options of each case, the given ones first. Raises UsageError for options that do not exist."""
        found: dict[str, TrainOptions] = {AS_GIVEN: self}
        for text in self.vary:
            args = [argument(word, text) for word in text.split()]
            try:
                found[text] = command_line.parse(Options, args=args, default=self)
            except UsageError as error:
                raise UsageError(f"--vary {text!r}: {error}") from None
        return found


def argument(word: str, text: str) -> str:
    """Return name=value as an argument of the command line. Raises UsageError if the word is none."""
    name, equals, value = word.partition("=")
    if not (name and equals):
        raise UsageError(f"--vary {text!r}: give options as name=value, such as tp=2 or 'tp=2 zero=1'")
    return {"yes": f"--{name}", "no": f"--no-{name}"}.get(value, f"--{word}")


def rows(measured: dict[str, Measured]) -> Iterator[tuple[str, ...]]:
    """Yield the table's lines."""
    first = measured[AS_GIVEN].seconds
    for name, case in measured.items():
        ratios = [a / b for a, b in zip(first, case.seconds, strict=True)]
        between = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        blocked, sent = statistics.median(case.blocked), case.sent[-1] / 1e6
        yield name, f"{case.median:.3f}", f"{case.spread:.0%}", between, f"{blocked:.3f}", f"{sent:.1f}"


def main(rt: Runtime, o: Options) -> bool:
    """Time the cases in turn, print the table, and return True."""
    with Signals() as signals:
        trainers: dict[str, Trainer] = {}
        for name, case in o.cases().items():
            case = replace(case, steps=o.steps + WARM_UP)
            trainers[name] = trainer = start(rt, case)
            trainer.signals, trainer.log, trainer.meter = signals, Log(rt, case, 0), Meter(rt, case)
        steps: dict[str, Callable[[], object]] = {name: trainer.train for name, trainer in trainers.items()}
        measured = in_turn(steps, o.steps, rt.world, WARM_UP, rt.device.type)
    heads = ["options", ">s per step", ">spread", ">as given / this", ">blocked s", ">MB sent"]
    title = f"{o.model}, {o.steps} steps in turn; ratios of two steps of a round: median, and range"
    console(rt).print(make_table(title, heads, rows(measured)))
    if rt.rank == 0:
        write_records(o.json, [{"options": name, "step_seconds": m.seconds} for name, m in measured.items()])
    return True


if __name__ == "__main__":
    run(main, Options, parse)
