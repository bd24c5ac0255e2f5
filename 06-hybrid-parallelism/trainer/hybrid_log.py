"""Log of a run: the screen, a file of JSON lines, TensorBoard, a plot. Rank 0 alone writes.

A record is a line {"kind": ..., "step": ..., ...}: run (once per start), step, evaluation, text, checkpoint,
end. A run that resumes after a crash repeats the steps since its checkpoint; of each step the last record
counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from common.data.text import Text
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson.runner import console, write_records
from common.utils.visualizer import figure, run_curves

from hybrid_data import unigram_entropy
from hybrid_metrics import Meter
from hybrid_options import TrainOptions

# values of a record that go to TensorBoard
SHOWN = (
    *("loss", "learning_rate", "gradient_norm", "tokens_per_second", "mfu", "memory_mb", "validation_loss"),
    *("balance_loss", "z_loss", "load", "masked_accuracy"),
)


class Log:
    """Log of one run, open inside its `with` block."""

    def __init__(self, rt: Runtime, o: TrainOptions, begin: int) -> None:
        self.rt, self.begin = rt, begin
        self.speaks, self.file, self.out, self.board = rt.rank == 0, o.json, console(rt), None
        if o.tensorboard and self.speaks:
            try:
                from torch.utils.tensorboard import SummaryWriter  # optional, and takes a second to import
            except ImportError:
                raise UsageError("--tensorboard needs the package: pip install tensorboard") from None
            try:
                self.board = SummaryWriter(str(o.tensorboard), purge_step=begin + 1)
            except OSError as error:
                raise UsageError(
                    f"--tensorboard {o.tensorboard} cannot be written: {error.strerror}"
                ) from None
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        quiet = not (self.speaks and self.out.is_terminal)
        self.bar = Progress(*columns, console=self.out, disable=quiet, transient=True)
        self.task = self.bar.add_task("", total=o.steps)

    def __enter__(self) -> Log:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        if self.board:
            with suppress(OSError):
                self.board.close()

    def announce(self, o: TrainOptions, mesh: dict[str, int], text: Text, meter: Meter, source: str) -> None:
        """Print model, mesh, data, peak speed and first step; write the record of the run."""
        if not self.speaks:
            return
        axes = " x ".join(f"{axis} {n}" for axis, n in mesh.items() if n > 1) or "one rank"
        entropy, given = unigram_entropy(text), "given" if o.peak_tflops else "measured"
        where = f"{axes} ({self.rt.backend}, {self.rt.device.type})"
        tokens = f"{len(text.train) / 1e6:.3g} M tokens to train on, {o.batch * o.sequence} a step"
        self.say(f"{o.init or o.model}, {meter.parameters / 1e6:.3g} M parameters in {o.dtype}, on {where}")
        length = f", {text.bytes_per_token:.2f} bytes each" if text.bytes_per_token else ""
        self.say(f"{text.name}: {tokens}{length}; unigram entropy {entropy:.3f} nats")
        self.say(f"peak of all ranks {meter.peak / 1e9:,.0f} GFLOP/s, {given}")
        if self.begin:
            self.say(f"resumed after step {self.begin} of {o.steps} from {source}")
        if self.begin >= o.steps:
            self.say(f"nothing is left to do; more --steps than {self.begin} go on")
        else:
            self.say(
                "  step     loss   gradient norm   learning rate   tokens/s    MFU   MB of the largest rank"
                + ("   balance loss   z-loss   largest load / mean" if o.balances else "")
            )
        ranks, peak = self.rt.world_size, meter.peak
        self.record("run", self.begin, mesh=axes, ranks=ranks, unigram_entropy=entropy, peak=peak)

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        self.out.print(escape(text), soft_wrap=True)

    def at(self, step: int, loss: float) -> None:
        """Move the progress bar to `step`."""
        self.bar.update(self.task, completed=step, description=f"loss {loss:.3f}")

    def record(self, kind: str, step: int, **values: Any) -> None:
        """Append a record to the JSON file and to TensorBoard, on rank 0."""
        if not self.speaks:
            return
        try:
            write_records(self.file, [{"kind": kind, "step": step, **values}])
        except UsageError as error:
            self.say(f"warning: {error}; the run goes on without")
            self.file = None
        try:
            self.show_on_board(kind, step, values)
        except OSError as error:
            self.say(f"warning: --tensorboard cannot be written: {error.strerror}; the run goes on without")
            self.board = None

    def show_on_board(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write a record's values to TensorBoard. Raises OSError, also for values of earlier calls."""
        if self.board:
            for name in SHOWN:
                if name in values:
                    self.board.add_scalar(name, values[name], step)
            if kind == "text":
                self.board.add_text("text", values["text"], step)
            self.board.flush()

    def numbers(self, step: int, found: dict[str, float]) -> None:
        """Print and record the numbers of a step."""
        self.say(
            f"{step:6d}  {found['loss']:7.4f}   {found['gradient_norm']:13.4f}   {found['learning_rate']:13.2e}"
            f"   {found['tokens_per_second']:8,.0f}   {found['mfu']:4.0%}   {found['memory_mb']:,.0f}"
            + (
                f"   {found['balance_loss']:12.4f}   {found['z_loss']:6.4f}   {found['load']:19.2f}"
                if "load" in found
                else ""
            )
        )
        self.record("step", step, **found)


def records_of(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of runs in a file; skip other lines, and a line that a crash cut short."""
    for line in file.read_text(errors="replace").splitlines() if file.is_file() else ():
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and "kind" in record:
                yield record


def draw(file: Path, picture: Path) -> None:
    """Plot all runs of a file of records, and the unigram entropy as a line."""
    losses: dict[str, dict[int, float]] = {}
    evaluated: dict[str, dict[int, float]] = {}
    name, entropy = "", 0.0
    for record in records_of(file):
        with suppress(KeyError, TypeError):
            if record["kind"] == "run":
                name = f"{record['mesh']}, from step {record['step'] + 1}"
                while name in losses | evaluated:
                    name += ", again"
                entropy = float(record["unigram_entropy"])
            elif record["kind"] == "step":
                losses.setdefault(name, {})[record["step"]] = record["loss"]
            elif record["kind"] == "evaluation":
                evaluated.setdefault(name, {})[record["step"]] = record["validation_loss"]
    with figure(picture) as (axes,):
        run_curves(axes, losses, evaluated, {f"unigram entropy {entropy:.2f}": entropy})
