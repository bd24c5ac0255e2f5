"""A run: steps from the newest good checkpoint to the last, with all that happens between them.

    trainer = start(rt, options)        # checked; model, data, optimizer; the newest good checkpoint, if there is one
    finished = trainer.run()

Ranks leave the loop only together: whether any was told to stop, or found a number that is not finite, travels with the
gradient's norm, a message that is there in every step. A step that is not finite moves no weight.

All that a run is lies in its weights, the optimizer's states and the number of the step. The rest follows from that
number: the batch, the learning rate, the masks of dropout, the text that is drawn. So a run goes on from a checkpoint,
on any mesh, as if it had never stopped.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hybrid_bytes import StepBytes
from hybrid_check import check
from hybrid_checkpoint import Checkpoints, SaveFailed, entries_of
from hybrid_data import Shuffled
from hybrid_evaluate import validation_loss
from hybrid_explain import bytes_table, explain
from hybrid_export import export
from hybrid_generate import decode, generate
from hybrid_log import Log, draw
from hybrid_metrics import Meter
from hybrid_model import Hybrid
from hybrid_optimizer import learning_rate, make_optimizer
from hybrid_options import TrainOptions
from hybrid_signals import Signals
from hybrid_training import samples_of

from common.comm import blocked_in
from common.errors import UsageError
from common.lesson import DTYPES, console
from common.models.huggingface import model_type, read_weights
from common.runtime import Runtime
from common.training import training_step
from common.utils.profiler import profile


class Trainer:
    """One rank's part of a run; every rank makes one and calls the same methods."""

    def __init__(self, rt: Runtime, o: TrainOptions, hybrid: Hybrid) -> None:
        self.rt, self.o, self.hybrid = rt, o, hybrid
        self.batches = Shuffled(o, hybrid.samples, rt.device)
        self.optimizer = make_optimizer(hybrid, o)
        self.backward = training_step(hybrid.version(), self.batches, hybrid.tokens)
        self.checkpoints = (
            Checkpoints(o.checkpoints, hybrid.mesh, o.keep, o.asynchronous) if o.checkpoints else None
        )
        self.begin = self.step = self.resume()
        self.stopped = self.trace_next = False

    def resume(self) -> int:
        """Weights and states of the newest good checkpoint; the number of steps it has behind it.

        Raises UsageError for a checkpoint whose run had other batches: their order could not go on; or more steps.
        """
        if self.checkpoints is None:
            return 0
        if self.o.resume == "no":
            if there := self.checkpoints.names():
                raise UsageError(
                    f"{self.o.checkpoints} holds {there[-1]}; a run with --resume no begins anew and needs a folder "
                    f"without checkpoints"
                )
            return 0
        found = self.checkpoints.restore(self.entries())
        if found is None:
            return 0
        for name, value in self.batches.about().items():
            if found.get(name) != value:
                raise UsageError(
                    f"the checkpoint in {self.o.checkpoints} is of a run with {name} {found.get(name)!r}, this one has "
                    f"{value!r}, so the order of the samples cannot go on; give the same, or another folder"
                )
        if found["step"] > self.o.steps:
            raise UsageError(
                f"the checkpoint in {self.o.checkpoints} is of step {found['step']}, beyond --steps {self.o.steps}; "
                f"give at least {found['step']}, or another folder"
            )
        if self.hybrid.zero:
            self.hybrid.zero.changed()
        return int(found["step"])

    def entries(self) -> Any:
        """What a checkpoint holds."""
        return entries_of(self.hybrid.model, self.optimizer, self.hybrid.zero)

    def run(self) -> bool:
        """All steps that are left. True at the end, or when told to stop; False where it could not go on."""
        o = self.o
        held = self.checkpoints or nullcontext()
        with held, Log(self.rt, o, self.begin) as self.log, Signals() as self.signals:
            self.meter = Meter(self.rt, o)
            self.log.announce(o, self.hybrid.mesh.shape, self.batches.text, self.meter)
            good = True
            if self.begin and self.due(o.evaluate_every):
                self.evaluate()  # again, or at last: whoever ended the run may have come before it
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
            if self.cut_short and good:
                kept = (
                    f"a checkpoint is in {o.checkpoints}"
                    if o.checkpoints
                    else "without --checkpoints nothing is kept"
                )
                self.log.say(f"told to stop: after step {self.step} of {o.steps}; {kept}")
            elif o.export and not self.cut_short:
                good &= self.exported(o.export)
            self.log.record("end", self.step, stopped=self.cut_short)
            if o.plot and o.json and self.rt.rank == 0:
                draw(o.json, o.plot)
        return good

    def exported(self, folder: Path) -> bool:
        """Whether the model is there; rank 0 alone can find that it is not."""
        try:
            export(self.hybrid, folder)
        except UsageError as error:
            self.log.say(f"warning: {error}")
            return False
        self.log.say(f"exported to {folder}")
        return True

    @property
    def cut_short(self) -> bool:
        """Told to stop before the last step."""
        return self.stopped and self.step < self.o.steps

    def due(self, every: int) -> bool:
        """Whether something that happens every so many steps, or 0, and after the last happens now."""
        return self.stopped or self.step == self.o.steps or (every > 0 and self.step % every == 0)

    def train(self) -> dict[str, float]:
        """One step: what it found. All ranks know the same after it."""
        start, o = time.perf_counter(), self.o
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, o)
        self.optimizer.zero_grad()
        loss = self.backward(self.step).item()
        told = [self.signals.stop, self.signals.trace, not math.isfinite(loss)]
        self.signals.trace = False
        sums = torch.tensor(told, dtype=torch.float64, device=self.rt.device)
        norm = self.hybrid.clip(o.clip or math.inf, sums).item()
        stop, trace, bad = (count > 0 for count in sums.tolist())
        self.stopped, self.trace_next = stop, trace
        finite = not bad and math.isfinite(norm)
        if finite:
            self.optimizer.step()
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
        }

    def give_up(self, found: dict[str, float]) -> bool:
        """Say why, once; the checkpoints stay as they are."""
        self.attempt(self.checkpoints.finish if self.checkpoints else lambda: None)
        if self.rt.rank == 0:
            print(
                f"error: in step {self.step} the loss or the gradient is not finite (rank 0: loss {found['loss']:g}, "
                f"norm {found['gradient_norm']:g}); it changed no weight, and --nonfinite skip would leave it out",
                file=sys.stderr,
            )
        return False

    def attempt(self, write: Callable[[], None]) -> bool:
        """Whether it could be written; if not, training goes on, and the reason is shown."""
        blocked_in.update(
            op="a checkpoint", axis="world", since=time.perf_counter()
        )  # for the report on a hang
        failed = ""
        try:
            write()
        except SaveFailed as failure:
            failed = str(failure)
            self.log.say(f"warning: {failed}")
        blocked_in.clear()
        return not failed

    def save(self, last: bool) -> bool:
        """A checkpoint. False when it is the last one and is not on the disk."""
        assert self.checkpoints
        start = time.perf_counter()
        self.attempt(self.checkpoints.finish)
        about = {"mesh": self.hybrid.mesh.shape, **self.batches.about()}
        good = self.attempt(partial(self.checkpoints.save, self.step, self.entries(), about))
        good = good and (not last or self.attempt(self.checkpoints.finish))
        self.log.record("checkpoint", self.step, good=good, seconds=time.perf_counter() - start)
        return good or not last

    def evaluate(self) -> None:
        """The validation loss, if there are evaluations, and text."""
        o = self.o
        if o.evaluate_every:
            loss = validation_loss(self.hybrid, self.batches)
            self.log.say(f"{self.step:6d}  validation loss {loss:.4f}")
            self.log.record("evaluation", self.step, validation_loss=loss)
        if o.generate:
            prompt = list(o.prompt.encode(errors="surrogateescape"))
            (tokens,) = generate(
                self.hybrid, prompt, o.generate, o.sequence, o.seed, self.step, o.temperature
            )
            text = decode(prompt + tokens)
            self.log.say("\n".join("        | " + line for line in text.splitlines()))
            self.log.record("text", self.step, text=text)

    def traced(self) -> Any:
        """Around a step: its trace, when --trace asks for it or a rank got SIGUSR1."""
        folder = self.o.trace
        if folder and (self.trace_next or self.step == self.begin + 2):
            self.log.say(f"step {self.step + 1} is traced: {folder / f'step-{self.step + 1}' / 'trace.json'}")
            return profile(self.rt, folder / f"step-{self.step + 1}")
        return nullcontext()


def make(rt: Runtime, o: TrainOptions) -> Hybrid:
    """This rank's part of the model, explained if that was asked for. Raises UsageError for bad input."""
    o.check()
    mesh = o.mesh(rt)
    config = o.model_config()
    check(config, mesh, o.layout(), o.batch, o.sequence)
    if o.export:
        model_type(config)  # known now, not at the end
    whole = read_weights(o.init, config) if o.init else None
    hybrid = Hybrid(config, mesh, o.layout(), rt.device, DTYPES[o.dtype], o.seed, whole)
    if o.explain:
        formula = StepBytes(
            hybrid, samples_of(o, hybrid), o.sequence, clip=4
        )  # three flags travel with the norm
        console(rt).print(explain(hybrid, clip=True), bytes_table(mesh, formula.all()))
    return hybrid


def start(rt: Runtime, o: TrainOptions) -> Trainer:
    """A run from its options: this rank's part of the model, and where to go on. Raises UsageError for bad input."""
    trainer = Trainer(rt, o, make(rt, o))
    if rt.rank == 0:
        o.make_folders()
    return trainer
