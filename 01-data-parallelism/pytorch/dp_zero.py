"""ZeRO by hand: weights, gradients, optimizer state in n shards (Rajbhandari et al., arXiv:1910.02054).

Data parallelism holds n copies of weights, gradients and optimizer state. In ZeRO each rank steps on 1/n of
the weights, and holds the rest only while it needs them. The optimizer works element by element, so any split
will do:

    unit = the parameters of one layer, in one flat buffer      [ q_proj  k_proj  ...  down_proj | padding ]
    rank r owns the r-th of n equal runs of it                  [  rank 0   |  rank 1   |  rank 2          ]
    backward    gradients of a unit  -> reduce-scatter ->  the sum, of this rank's run only
    optimizer   steps on the pieces: the part of each parameter that is in this rank's run
    forward     runs of the weights  -> all-gather ->  the whole unit, while the unit before it computes
                stage 3 frees it after its use, and gathers it once more for its backward pass

    G bytes of gradients and as many of weights, M micro-batches, float32 and AdamW; a rank holds (bytes per
    parameter) and sends in a step:

    stage   weights  gradients  state   sharded                     sends, times (n-1)/n
    0       4        4          8       nothing (dp_basic.py)       2 G
    1       4        4          8/n     state                       2 G
    2       4        4/n        8/n     state, gradients            (M + 1) G: M reduce-scatters, a gather
    3       4/n      4/n        8/n     state, gradients, weights   3 M G: M times two gathers, a reduce-scatter

Stage 3 sends a little less: what lies outside of the layers is one unit more, gathered once per micro-batch. For a
moment a rank also holds the gradients of two whole units (stages 2 and 3) and the weights of two and of the outer
one (stage 3). All stages broadcast the model once, and sum a flag per parameter tensor in each step.

One code serves all stages: dp_unit.py keeps or frees a unit's gradients after their reduce-scatter, and its weights
after their use. An optimizer that needs whole matrices (Muon) needs another cut there: whole parameters to ranks.

    python dp_zero.py --nproc 4      torchrun --nproc_per_node=4 dp_zero.py      mpirun -np 4 python dp_zero.py
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from common import comm
from common.comm import Group
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson
from common.lesson.job import Job, total
from common.lesson.runner import run
from common.models.transformer import cross_entropy_sum

import dp_basic
from dp_basic import broadcast_model
from dp_costs import zero_start, zero_step
from dp_memory import prove_with_memory
from dp_training import DataParallelOptions, check
from dp_unit import GroupOf, Unit, together

Options = TypeVar("Options", bound=DataParallelOptions)


class Zero:
    """ZeRO of stage 1, 2 or 3 around a model; in stage 0 gradients are summed and nothing is sharded.

        zero = Zero(model, model.layers, group, stage)
        optimizer = AdamW(p for _, p in zero.named_parameters())     # the pieces that this rank owns
        loss(model(x)).backward()                                    # gradients are reduced while this runs
        zero.finish()                                                # now the pieces have their gradients
        optimizer.step()                                             # the next forward pass gathers the weights

    Every module of `layers` is a unit; the parameters outside of them form at least one more, which is whole from
    the start of the forward pass to the end of the backward pass. All ranks run the same layers in the same order.
    Divide each loss by the targets of all ranks: gradients are summed. Gradients are those of one step: a second
    finish() replaces them. The norm of the gradient is common.comm.placement.gradient_norm(pieces, mesh), since
    each rank has a part of it. The weights to save are the pieces, not the model's state_dict; after writing into
    pieces by other means than an optimizer, call changed(). All ranks step together, run equally many backward
    passes from stage 2 on, and equally many forward passes in stage 3. Units hold the parameters that require
    gradients when Zero is made.

    group: the ranks that hold the model, which begin with the values of its first; or a function that returns
    the ranks that hold a parameter, all with the same values. The gradient of a parameter that only this rank
    holds is left alone. entries: the modules that are called instead of the model, such as a pipeline's stages.
    Stage 0 does not ask whether any rank used a parameter: unused ones get gradients of zeros.

    Raises ValueError for other stages, for a model without parameters to train, for a unit of two dtypes;
    RuntimeError in stages 0 and 1 when a parameter gets another gradient before finish(): accumulate inside
    no_sync().
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
        group: Group | GroupOf,
        stage: int,
        entries: Sequence[nn.Module] = (),
    ) -> None:
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"ZeRO has the stages 1, 2 and 3, and 0 for none, not {stage}")
        if isinstance(group, Group):
            broadcast_model(model, group)
            group = partial(lambda one, _: one, group)
        self.stage, layers, entries = stage, list(layers), tuple(entries) or (model,)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("no parameter of the model requires a gradient; there is nothing to shard")
        self.pieces = dict(trained)
        # units[i] is whole while one of modules[i] runs
        self.units, self.modules = [], []  # type: tuple[list[Unit], list[tuple[nn.Module, ...]]]
        for i, parameters in together(trained, model, layers, group):
            self.units.append(Unit(parameters, group(next(iter(parameters.values()))), stage))
            self.modules.append(entries if i < 0 else (layers[i],))
            self.pieces |= self.units[-1].pieces
        self.entries = weakref.WeakSet(entries)
        self.synchronising, self.in_backward, self.reduced = True, False, False
        self.gathered, self.task = -1, -1
        self.used: set[str] = set()
        # units still to reduce in this backward pass; units whose reduce-scatter is on its way
        self.queue, self.leaving = self.units[::-1], []  # type: tuple[list[Unit], list[Unit]]
        self.outer = self.modules.count(entries)
        self._hook(entries)

    def _hook(self, entries: Sequence[nn.Module]) -> None:
        me = weakref.ref(self)  # the model must not keep this alive

        def call(method: str, *known: Any) -> Any:
            def hook(*given: Any) -> None:
                if zero := me():
                    getattr(zero, method)(*known, *given)

            return hook

        for entry in entries:
            entry.register_forward_pre_hook(call("_begin"))
        for i, (unit, modules) in enumerate(zip(self.units, self.modules, strict=True)):
            for module in modules:
                module.register_forward_pre_hook(call("_before", i))
                module.register_forward_hook(call("_after", i))
            for name, p in unit.parameters.items():
                p.register_post_accumulate_grad_hook(call("_ready", i, name))
        weakref.finalize(self, register_optimizer_step_post_hook(call("_stepped")).remove)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return (name, this rank's piece) of every parameter; from stage 1 on pieces are flat, many are empty."""
        return iter(self.pieces.items())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate only, in stages 0 and 1: backward passes inside send nothing.

        Raises RuntimeError in later stages, which have no memory to accumulate whole gradients.
        """
        if self.stage > 1:
            raise RuntimeError(
                f"stage {self.stage} holds no whole gradients; it reduces those of each micro-batch"
            )
        before, self.synchronising = self.synchronising, False
        try:
            yield
        finally:
            self.synchronising = before

    def _begin(self, *_: Any) -> None:
        if not recomputing():
            self.gathered = -1

    def _before(self, i: int, *_: Any) -> None:
        """Before the forward of unit i, wait for its weights, and start to gather those of the next unit."""
        while not recomputing() and self.gathered < min(i + 1, len(self.units) - 1):
            self.gathered += 1
            self.units[self.gathered].gather()
        self.units[i].gather()  # for a layer that runs again, by itself or recomputed with others
        self.units[i].wait()

    def _after(self, i: int, module: nn.Module, _: Any, output: Any) -> None:
        """In stage 3, free the weights of unit i; gather them again once its output has a gradient."""
        training = torch.is_grad_enabled()
        if self.stage < 3 or recomputing() or (training and module in self.entries):
            return
        self.units[i].release()
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(lambda _: self._needed_again(i))

    def _needed_again(self, i: int) -> None:
        self.units[i].gather()
        self.units[i].wait()
        self.units[max(i - 1, 0)].gather()

    def _ready(self, i: int, name: str, _: Tensor) -> None:
        """Hook that autograd calls once p.grad holds this backward's gradient."""
        unit, task = self.units[i], torch._C._current_graph_task_id()
        if self.in_backward and task != self.task:
            raise RuntimeError("a backward pass ended with an error: its gradients are lost; make a new Zero")
        self.task = task
        if self.stage < 2 and unit not in self.queue:
            raise RuntimeError(
                "backward ran twice before finish(): put all micro-batches but the last in no_sync()"
            )
        self._fill(unit, name)
        if not self.synchronising:
            return
        if not self.in_backward and task != -1:  # -1: a pipeline computes a weight gradient that it put off
            self.in_backward = True
            Variable._execution_engine.queue_callback(self._end_of_backward)
        unit.unready.discard(name)
        # units are reduced in one order on all ranks, or messages of the same length would be mismatched; the
        # outer ones come last, with the embedding, to which another stage on this rank may add as a tied head
        while len(self.queue) > self.outer and not self.queue[0].unready:
            self._reduce()

    def _fill(self, unit: Unit, name: str) -> None:
        if unit.parameters[name].grad is not None:
            unit.fill(name)
            self.used.add(name)

    def _reduce(self) -> None:
        unit = self.queue.pop(0)
        unit.reduce()
        unit.release()
        self.leaving.append(unit)
        if len(self.leaving) > 1 and self.stage > 1:
            self.leaving.pop(0).settle()  # so that whole gradients of two units exist, not of all

    def _end_of_backward(self) -> None:
        self.in_backward = False
        if self.stage > 1:
            self._reduce_all()

    def _reduce_all(self) -> None:
        while self.queue:  # also with parameters that no backward pass used
            self._reduce()
        self.queue, self.reduced = self.units[::-1], True
        for unit in self.units:
            unit.unready = set(unit.parameters)

    def finish(self) -> None:
        """Wait for all sums; then every piece has its gradient, or None where no rank used the parameter.

        Raises RuntimeError after a backward pass that ended with an error.
        """
        if self.in_backward:
            raise RuntimeError("a backward pass ended with an error: its gradients are lost; make a new Zero")
        if not self.reduced:
            self._reduce_all()
        for unit in self.leaving:
            unit.settle()
        users = self._used_by_any()
        for unit in self.units:
            assert unit.sum is not None
            for name, gradient in unit.cut(unit.sum).items():
                unit.pieces[name].grad = gradient.detach() if name in users else None
                unit.parameters[name].grad = None
            unit.sum = None
            unit.filled.clear()
        self.leaving, self.reduced = [], False
        self.used.clear()

    def _used_by_any(self) -> set[str]:
        """Return the parameters that any rank of their group used: an all-reduce of a flag each."""
        groups = {unit.group.axis: unit.group for unit in self.units if self.stage}
        for axis, group in groups.items():
            names = [name for unit in self.units if unit.group.axis == axis for name in unit.parameters]
            flags = self.units[0].mine.new_tensor([float(name in self.used) for name in names])
            comm.all_reduce(flags, group)
            self.used |= {name for name, ranks in zip(names, flags.tolist(), strict=True) if ranks}
        return self.used if self.stage else {*self.pieces}

    def changed(self) -> None:
        """Mark the gathered weights as stale, after the pieces of all ranks have changed."""
        for unit in self.units if self.stage else ():
            unit.wait()  # gathered ahead and not used: stale, too
            unit.here = False

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        mine = {id(piece) for _, piece in self.named_parameters()}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            self.changed()


def recomputing() -> bool:
    """Return True inside a backward pass, where activation checkpointing runs a forward pass."""
    return torch._C._current_graph_task_id() != -1


def train(job: Job[DataParallelOptions]) -> Iterator[Tensor]:
    """Train with the stage of ZeRO that the version names; yield the loss of each global batch."""
    model, group = job.model, job.group
    zero = Zero(model, model.layers, group, stage=int(job.version[-1]))
    optimizer = job.optimizer(zero)  # steps on this rank's pieces
    for batch in job.batches():
        count, losses = batch.count_targets(group), []
        optimizer.zero_grad()
        for i, (tokens_BS, targets_BS) in enumerate(batch, 1):
            with zero.no_sync() if zero.stage == 1 and i < len(batch) else nullcontext():
                loss_sum, _ = cross_entropy_sum(model(tokens_BS), targets_BS)
                loss = loss_sum / count
                loss.backward()
            losses.append(loss.detach())
        zero.finish()
        optimizer.step()
        yield total(losses, group)


VERSIONS = {"bucketed": dp_basic.train, **dict.fromkeys(("zero1", "zero2", "zero3"), train)}


def even(rt: Runtime, o: Options) -> Options:
    """Return the options with equally many micro-batches on all ranks: from stage 2 on each is communicated."""
    return replace(o, micro_batches=max(1, min(o.micro_batches, o.batch // rt.world_size)))


LESSON = Lesson("dp", VERSIONS, zero_step, start_bytes=zero_start)


def main(rt: Runtime, o: DataParallelOptions) -> bool:
    """Prove equality of the versions with one device, or with --benchmark time them."""
    check(rt, tuple(VERSIONS), o)
    return prove_with_memory(rt, even(rt, o), LESSON)


if __name__ == "__main__":
    run(main, DataParallelOptions, versions=VERSIONS)
