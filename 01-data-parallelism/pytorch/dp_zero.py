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
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from common import comm
from common.comm import Group
from common.comm.placement import placement
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
from dp_unit import Unit

Options = TypeVar("Options", bound=DataParallelOptions)


class Zero:
    """ZeRO of stage 1, 2 or 3 around a model, over one group.

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
    gradients when Zero is made. entries: the modules that are called instead of the model, such as a pipeline's
    stages.

    Raises ValueError for other stages, for a model without parameters to train, for a unit of two dtypes;
    RuntimeError in stage 1 when a second backward pass runs before finish(): accumulate inside no_sync().
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
        group: Group,
        stage: int,
        entries: Sequence[nn.Module] = (),
    ) -> None:
        if stage not in (1, 2, 3):
            raise ValueError(f"ZeRO has the stages 1, 2 and 3, not {stage}")
        broadcast_model(model, group)
        self.group, self.stage = group, stage
        layers = list(layers)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("no parameter of the model requires a gradient; there is nothing to shard")
        self.names = list(trained)
        of_layers = [{id(p) for p in layer.parameters()} for layer in layers]
        homes = {name: [i for i, ids in enumerate(of_layers) if id(p) in ids] for name, p in trained.items()}
        outside = {id(p) for p in parameters_outside(model, {id(layer) for layer in layers})}
        entries = tuple(entries) or (model,)
        # units[i] is whole while one of modules[i] runs
        self.units, self.modules = [], []  # type: tuple[list[Unit], list[tuple[nn.Module, ...]]]
        # parameters that several layers share, or that are also outside of them, join the outer unit, -1
        home = {
            name: at[0] if len(at) == 1 and id(trained[name]) not in outside else -1
            for name, at in homes.items()
        }
        for i, module in enumerate([model, *layers], -1):
            inside = {name: p for name, p in trained.items() if home[name] == i}
            # a parameter that ranks outside of this group hold too (tied, replicated) must be split and summed
            # there as here, so it shares no unit with parameters of another placement
            alike: dict[tuple[object, ...], dict[str, nn.Parameter]] = {}
            for name, p in inside.items():
                alike.setdefault((hasattr(p, "tied"), *placement(p)), {})[name] = p
            for parameters in alike.values():
                self.units.append(Unit(parameters, group, stage))
                self.modules.append(entries if i < 0 else (module,))
        self.entries = weakref.WeakSet(entries)
        self.synchronising, self.in_backward, self.reduced = True, False, False
        self.gathered, self.task = -1, -1
        self.used: set[str] = set()
        # units still to reduce in this backward pass; units whose reduce-scatter is on its way
        self.queue, self.leaving = self.units[::-1], []  # type: tuple[list[Unit], list[Unit]]
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
        """Return (name, this rank's piece, flat) of every parameter; many pieces are empty."""
        pieces = {name: piece for unit in self.units for name, piece in unit.pieces.items()}
        return ((name, pieces[name]) for name in self.names)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate only, in stage 1: backward passes inside send nothing.

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
        if self.reduced and self.stage == 1:
            raise RuntimeError(
                "backward ran twice before finish(): put all micro-batches but the last in no_sync()"
            )
        self._fill(unit, name)
        if not self.synchronising:
            return
        if not self.in_backward:
            self.in_backward = True
            Variable._execution_engine.queue_callback(self._end_of_backward)
        unit.unready.discard(name)
        # units are reduced in one order on all ranks, or messages of the same length would be mismatched
        while self.queue and not self.queue[0].unready:
            self._reduce()

    def _fill(self, unit: Unit, name: str) -> None:
        if unit.parameters[name].grad is not None:  # None yet where a pipeline defers weight gradients
            unit.fill(name)
            self.used.add(name)

    def _reduce(self) -> None:
        unit = self.queue.pop(0)
        unit.reduce()
        unit.release()
        self.leaving.append(unit)
        if len(self.leaving) > 1:
            self.leaving.pop(0).settle()  # so that whole gradients of two units exist, not of all

    def _end_of_backward(self) -> None:
        while self.queue:  # parameters that this backward pass did not use
            self._reduce()
        self.queue = self.units[::-1]
        for unit in self.units:
            unit.unready = set(unit.parameters)
        self.in_backward, self.reduced = False, True

    def finish(self) -> None:
        """Wait for all sums; then every piece has its gradient, or None where no rank used the parameter.

        Raises RuntimeError after a backward pass that ended with an error.
        """
        if self.in_backward:
            raise RuntimeError("a backward pass ended with an error: its gradients are lost; make a new Zero")
        if (
            not self.reduced
        ):  # every pass was in no_sync(), or a pipeline made weight gradients outside of one
            for unit in self.units:
                for name in unit.parameters.keys() - unit.filled:
                    self._fill(unit, name)
            self._end_of_backward()
        for unit in self.leaving:
            unit.settle()
        used = self.units[0].mine.new_tensor([float(name in self.used) for name in self.names])
        comm.all_reduce(used, self.group)
        users = dict(zip(self.names, used.tolist(), strict=True))
        for unit in self.units:
            assert unit.sum is not None
            for name, gradient in unit.cut(unit.sum).items():
                unit.pieces[name].grad = gradient.detach() if users[name] else None
                unit.parameters[name].grad = None
            unit.sum = None
            unit.filled.clear()
        self.leaving, self.reduced = [], False
        self.used.clear()

    def changed(self) -> None:
        """Mark the gathered weights as stale, after the pieces of all ranks have changed."""
        for unit in self.units:
            unit.wait()  # gathered ahead and not used: stale, too
            unit.here = False

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        mine = {id(piece) for _, piece in self.named_parameters()}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            self.changed()


def parameters_outside(module: nn.Module, layers: set[int]) -> Iterator[nn.Parameter]:
    """Yield the parameters that `module` has outside of `layers`, a set of module ids."""
    if id(module) not in layers:
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from parameters_outside(child, layers)


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
