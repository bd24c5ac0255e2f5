"""Training run: steps from the newest good checkpoint to the last, with logging, evaluation and checkpoints.

    trainer = start(rt, options)        # checked; model, data, optimizer; the newest good checkpoint, if there is one
    finished = trainer.run()

Ranks leave the loop only together: the flags for a stop signal and for a number that is not finite are summed
in one message with the gradient's norm, in every step. A step that is not finite changes no weight.

The only state is the weights, the optimizer state and the step number. The rest is a function of the step
number: the batch, the learning rate, the dropout masks, the generated text. A run therefore resumes from a
checkpoint, on any mesh, as if it had never stopped.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.comm import blocked_in
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson.runner import DTYPES, console
from common.models.huggingface import model_type, read_weights
from common.utils.profiler import profile

from hybrid_bytes import StepBytes
from hybrid_checkpoint import Checkpoints, entries_of
from hybrid_data import Shuffled
from hybrid_evaluate import generate, validation_loss
from hybrid_explain import bytes_table, explain
from hybrid_export import export
from hybrid_log import Log, draw
from hybrid_metrics import Meter
from hybrid_model import Hybrid
from hybrid_optimizer import learning_rate, make_optimizer
from hybrid_options import TrainOptions
from hybrid_signals import TRACE, Signals
from hybrid_whole import read_whole, save_whole
from plan_here import peak_table


class Trainer:
    """One rank's part of a run; every rank constructs one and calls the same methods.

    A run with another task than the next token overrides `batches_of` and `validate`.
    """

    batches_of = Shuffled

    def __init__(self, rt: Runtime, o: TrainOptions, hybrid: Hybrid) -> None:
        self.rt, self.o, self.hybrid = rt, o, hybrid
        self.batches = self.batches_of(o, hybrid.samples, rt.device, rt.world)
        self.optimizer = make_optimizer(hybrid, o)
        self.checkpoints = (
            Checkpoints(o.checkpoints, hybrid.mesh, o.keep, o.asynchronous) if o.checkpoints else None
        )
        self.begin = self.step = self.resume()
        self.stopped = self.trace_next = False

    def resume(self) -> int:
        """Load weights and states of the newest good checkpoint, or of the file; return the number of its steps.

        Raises UsageError for those of a run with other batches, whose order could not go on, or of a later
        step than --steps; and with --resume no if there is any checkpoint.
        """
        found, folder, file = None, self.o.checkpoints, self.o.resume
        self.source, where, another = str(folder), f"the checkpoint in {folder}", "another folder"
        if self.checkpoints and file == "no" and (there := self.checkpoints.names()):
            raise UsageError(
                f"{folder} holds {there[-1]}; a run with --resume no begins anew and needs a folder "
                f"without checkpoints"
            )
        if self.checkpoints:
            found = self.checkpoints.restore(self.entries())
        if found is None and file not in ("auto", "no"):
            found = read_whole(Path(file), self.entries(), self.hybrid.mesh)
            self.source, where, another = file, file, "another file"
        if found is None:
            return 0
        bytes_of_text = {"tokenizer": "bytes"}
        found = bytes_of_text | found
        for name, value in (bytes_of_text | self.batches.about()).items():
            if str(found.get(name)) != str(value):
                raise UsageError(
                    f"{where} is of a run with {name} {found.get(name)!r}, this one has {value!r}, so the order of "
                    f"the samples cannot go on; give the same, or {another}"
                )
        step = int(found["step"])
        if step > self.o.steps:
            raise UsageError(
                f"{where} is of step {step}, beyond --steps {self.o.steps}; give at least {step}, or {another}"
            )
        self.hybrid.zero.changed()
        return step

    def entries(self) -> Any:
        """Return the entries of a checkpoint."""
        return entries_of(self.hybrid.model, self.optimizer, self.hybrid)

    def run(self) -> bool:
        """Run the remaining steps. Return True at the end or after a stop signal, False after a failure."""
        o = self.o
        held = self.checkpoints or nullcontext()
        with held, Log(self.rt, o, self.begin) as self.log, Signals() as self.signals:
            self.meter = Meter(self.rt, o)
            self.log.announce(o, self.hybrid.mesh.shape, self.batches.text, self.meter, self.source)
            good = True
            if self.begin and self.due(o.evaluate_every):
                self.evaluate()  # the earlier run may have ended before this evaluation
            while self.step < o.steps and not self.stopped:
                with self.traced():
                    found = self.train()
                if not found["finite"] and o.nonfinite == "stop":
                    return self.give_up(found)
                last = self.stopped or self.step == o.steps
                if self.due(o.log_every):
                    self.log.numbers(self.step, found | self.meter.read())
                if self.checkpoints and self.due(o.checkpoint_every):
                    good = self.save(last)
                if self.due(o.evaluate_every) and not self.cut_short:
                    self.evaluate()
            if o.save:
                good &= self.attempt(partial(self.save_whole, o.save), "--save")
            if self.cut_short and good:
                kept = (
                    f"a checkpoint is in {o.checkpoints or o.save}"
                    if o.checkpoints or o.save
                    else "without --checkpoints nothing is kept"
                )
                self.log.say(f"told to stop: after step {self.step} of {o.steps}; {kept}")
            elif o.export and not self.cut_short:
                good &= self.attempt(partial(self.export_model, o.export), "the export")
            self.log.record("end", self.step, stopped=self.cut_short)
            if o.plot and o.json and self.rt.rank == 0:
                draw(o.json, o.plot)
        return good

    def export_model(self, folder: Path) -> None:
        """Export the model, and say so. Raises UsageError on rank 0 if that fails."""
        export(self.hybrid, folder, self.o.coder)
        self.log.say(f"exported to {folder}")

    def save_whole(self, file: Path) -> None:
        """Write weights and optimizer states whole, and say so. Raises UsageError on rank 0 if that fails."""
        save_whole(file, self.entries(), self.hybrid.mesh, {"step": self.step, **self.batches.about()})
        self.log.say(f"saved after step {self.step}: {file}")

    @property
    def cut_short(self) -> bool:
        """True if the run was told to stop before the last step."""
        return self.stopped and self.step < self.o.steps

    def due(self, every: int) -> bool:
        """Return True every `every` steps (0: never), at the last step, and after a stop signal."""
        return self.stopped or self.step == self.o.steps or (every > 0 and self.step % every == 0)

    def train(self) -> dict[str, float]:
        """Run one step; return its loss, gradient norm, learning rate and `finite`, the same on all ranks."""
        start, o = time.perf_counter(), self.o
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, o)
        self.optimizer.zero_grad()
        tokens_BS, targets_BS, first = self.batches.mine(self.step)
        loss = self.hybrid.step(tokens_BS, targets_BS, at=(self.step, first)).item()
        told = [self.signals.stop, self.signals.trace, not math.isfinite(loss)]
        self.signals.trace = False
        sums = torch.tensor(told, dtype=torch.float64, device=self.rt.device)
        norm = self.hybrid.clip(o.clip or math.inf, sums).item()
        stop, trace, bad = (count > 0 for count in sums.tolist())
        self.stopped, self.trace_next = stop, trace
        finite = not bad and math.isfinite(norm)
        if finite:
            self.optimizer.step()
            self.hybrid.balance.step()
        elif o.nonfinite == "skip":
            self.log.say(f"step {self.step + 1} left out: loss {loss:g}, gradient norm {norm:g}")
        self.step += 1
        if self.rt.device.type == "cuda":
            torch.cuda.synchronize()
        self.meter.add(time.perf_counter() - start)
        self.log.at(self.step, loss)
        return {
            "loss": loss,
            "gradient_norm": norm,
            "learning_rate": learning_rate(self.step - 1, o),
            "finite": finite,
            **self.hybrid.balance.numbers,
        }

    def give_up(self, found: dict[str, float]) -> bool:
        """Print the reason on rank 0 and return False; the checkpoints stay as they are."""
        self.attempt(self.checkpoints.finish if self.checkpoints else lambda: None)
        if self.rt.rank == 0:
            print(
                f"error: in step {self.step} the loss or the gradient is not finite (rank 0: loss {found['loss']:g}, "
                f"norm {found['gradient_norm']:g}); it changed no weight, and --nonfinite skip would leave it out",
                file=sys.stderr,
            )
        return False

    def attempt(self, write: Callable[[], None], what: str = "a checkpoint") -> bool:
        """Call `write`; if it fails, show the reason and return False, so that training goes on.

        what: shown if the run hangs in it.
        """
        blocked_in.update(op=what, axis="world", since=time.perf_counter())
        good = True
        try:
            write()
        except UsageError as failure:
            good = False
            self.log.say(f"warning: {failure}")
        blocked_in.clear()
        return good

    def save(self, last: bool) -> bool:
        """Write a checkpoint. Return False if it is the last one and is not on the disk."""
        assert self.checkpoints
        start = time.perf_counter()
        self.attempt(self.checkpoints.finish)
        about = {"mesh": self.hybrid.mesh.shape, **self.batches.about()}
        good = self.attempt(partial(self.checkpoints.save, self.step, self.entries(), about))
        good = good and (not last or self.attempt(self.checkpoints.finish))
        self.log.record("checkpoint", self.step, good=good, seconds=time.perf_counter() - start)
        return good or not last

    def evaluate(self) -> None:
        """Log the validation loss, with --evaluate-every, and a generated text, with --generate."""
        o = self.o
        if o.evaluate_every:
            self.validate()
        if o.generate:
            prompt = o.coder.encode(o.prompt)
            (tokens,) = generate(
                self.hybrid, prompt, o.generate, o.sequence, o.seed, self.step, o.temperature
            )
            text = o.coder.decode(prompt + tokens)
            self.log.say("\n".join("        | " + line for line in text.splitlines()))
            self.log.record("text", self.step, text=text)

    def validate(self) -> None:
        """Log the validation loss."""
        loss = validation_loss(self.hybrid, self.batches)
        length = self.batches.text.bytes_per_token
        per_byte = f", {loss / length:.4f} nats per byte" if length else ""
        self.log.say(f"{self.step:6d}  validation loss {loss:.4f}{per_byte}")
        self.log.record("evaluation", self.step, validation_loss=loss)

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Trace this step if --trace asks for it or a rank got SIGUSR1, and print each rank's times."""
        folder = self.o.trace
        if not folder or not (self.trace_next or self.step == self.begin + 2):
            yield
            return
        into = folder / f"step-{self.step + 1}"
        with profile(self.rt, into) as report:
            yield
        self.log.say(f"step {self.step} is traced: {into / 'trace.json'}")
        self.log.out.print(report.table())


def make(rt: Runtime, o: TrainOptions) -> Hybrid:
    """Make this rank's part of the model, and explain it with --explain. Raises UsageError for bad input."""
    o.validate()
    mesh, config = o.mesh(rt), o.model_config()
    if o.export:
        model_type(config)  # fails now, not at the end
    whole = read_weights(o.init, config) if o.init else None
    hybrid = Hybrid(config, mesh, o, rt.device, DTYPES[o.dtype], o.seed, whole, o)
    if o.explain:
        # clip: the norm, and three flags
        formula = StepBytes(hybrid.model, hybrid.zero, mesh, o, clip=4, balances=o.balances)
        peak = peak_table(o, config, mesh.shape, o.dtype, o.batch, o.sequence)
        console(rt).print(explain(hybrid, clip=True), peak, bytes_table(mesh, formula.all()))
    return hybrid


def start(rt: Runtime, o: TrainOptions, kind: type[Trainer] = Trainer) -> Trainer:
    """Make a run from its options: this rank's part of the model, and the step to resume from.

    Raises UsageError for bad input.
    """
    trainer = kind(rt, o, make(rt, o))
    if rt.rank == 0:
        o.make_folders()
    return trainer


def train(rt: Runtime, o: TrainOptions, kind: type[Trainer] = Trainer) -> bool:
    """Train from the newest good checkpoint, or from step 0, to the last step; --steps 0: only explain."""
    signal.signal(TRACE, signal.SIG_IGN)  # until there is a step to trace
    if o.steps:
        return start(rt, o, kind).run()
    make(rt, o)
    return True
