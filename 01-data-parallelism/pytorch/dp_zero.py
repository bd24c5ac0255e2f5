"""ZeRO by hand: n ranks need not hold n copies of the same thing (Rajbhandari et al., arXiv:1910.02054).

Data parallelism holds weights, gradients and the optimizer's state n times over. Each rank steps on 1/n of the
weights instead, and holds the rest only while it needs it. The optimizer works number by number, so any cut will do:

    unit = the parameters of one layer, in one flat buffer      [ q_proj  k_proj  ...  down_proj | padding ]
    rank r owns the r-th of n equal runs of it                  [  rank 0   |  rank 1   |  rank 2          ]
    backward    gradients of a unit  -> reduce-scatter ->  the sum, of my run alone
    optimizer   steps on the pieces: what of each parameter lies in my run
    forward     my run of the weights -> all-gather -> the whole unit, the next unit's while this one computes

    S bytes of weights, M micro-batches, float32 and AdamW; a rank holds, in bytes a number, and sends in a step:

    stage   weights  gradients  state   what is new                 sends, times (n-1)/n
    0       4        4          8                                   2 S
    1       4        4          8/n     a part of the state         2 S
    2       4        4/n        8/n     ... and of the gradients    (M + 1) S
    3       4/n      4/n        8/n     ... and of the weights      about 3 M S

The stages are one code: a unit's gradients are kept or dropped after their reduce-scatter, its weights are kept or
dropped after their use.

    python dp_zero.py --nproc 4      torchrun --nproc_per_node=4 dp_zero.py      mpirun -np 4 python dp_zero.py
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from dp_basic import broadcast_model
from dp_basic import make_version as make_basic
from dp_basic import run_bytes as basic_run_bytes
from dp_basic import step_bytes as basic_step_bytes
from dp_memory import MemoryTable
from dp_training import TrainingOptions, Version, benchmark, check, prove, report
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from common import comm
from common.comm import Group, Pending
from common.lesson import console, run
from common.mesh import Mesh
from common.placement import Run, place, placement
from common.runtime import Runtime

VERSIONS = ("bucketed", "zero1", "zero2", "zero3")
Parameters = dict[str, nn.Parameter]


class Unit:
    """Parameters that travel together: `whole`, one flat buffer, of which this rank owns the run `mine`."""

    def __init__(self, parameters: Parameters, group: Group, stage: int) -> None:
        self.parameters, self.group, self.stage = parameters, group, stage
        first = next(iter(parameters.values()))
        for name, p in parameters.items():
            if p.dtype != first.dtype:
                raise ValueError(f"{name} is {p.dtype} in a unit of {first.dtype}: give one type a unit")
        self.lengths = [p.numel() for p in parameters.values()]
        self.share = -(-sum(self.lengths) // group.size)  # the last run is padded
        self.whole = first.detach().new_zeros(group.size * self.share)
        for p, view in zip(parameters.values(), self.views(self.whole).values(), strict=True):
            view.copy_(p.detach())
            p.data = view
        self.mine = self.run(self.whole) if stage < 3 else self.run(self.whole).clone()
        self.pieces = {name: nn.Parameter(piece) for name, piece in self.cut(self.mine).items()}
        for (name, p), sizes in zip(parameters.items(), self._sizes(), strict=True):
            for axis, split in placement(p).items():
                place(self.pieces[name], axis, split)
            place(self.pieces[name], group.axis, Run(p.shape, sizes))
        self.here, self.arriving = True, None  # type: tuple[bool, Pending | None]
        self.gradients: Tensor | None = None  # like `whole`: this rank's part
        self.sum: Tensor | None = (
            None  # like `mine`: over ranks, and over the micro-batches that were reduced
        )
        self.leaving: tuple[Pending, Tensor] | None = None
        self.unready, self.filled = set(parameters), set()  # type: tuple[set[str], set[str]]
        self.release()

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """The parameters' places in a buffer like `whole`."""
        pieces = torch.split(whole, [*self.lengths, len(whole) - sum(self.lengths)])
        return {name: x.view(p.shape) for (name, p), x in zip(self.parameters.items(), pieces, strict=False)}

    def run(self, whole: Tensor) -> Tensor:
        """This rank's run of a buffer like `whole`."""
        return whole[self.group.rank * self.share :][: self.share]

    def _sizes(self) -> list[tuple[int, ...]]:
        """How many numbers of each parameter every rank owns."""
        sizes, start = [], 0
        for length in self.lengths:
            bounds = [min(max(r * self.share, start), start + length) for r in range(self.group.size + 1)]
            sizes.append(tuple(b - a for a, b in itertools.pairwise(bounds)))
            start += length
        return sizes

    def cut(self, mine: Tensor) -> dict[str, Tensor]:
        """What of each parameter lies in a buffer like `mine`: of many, nothing."""
        sizes = [every_rank[self.group.rank] for every_rank in self._sizes()]
        pieces = torch.split(mine, [*sizes, len(mine) - sum(sizes)])
        return dict(zip(self.parameters, pieces, strict=False))

    def gather(self) -> None:
        """Start to make the weights whole, unless they are or soon will be."""
        if not self.here and self.arriving is None:
            self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())
            self.arriving = comm.all_gather_into(self.whole, self.mine, self.group, async_op=True)

    def wait(self) -> None:
        """Return when the weights are whole."""
        if self.arriving is not None:
            self.arriving.wait()
            self.here, self.arriving = True, None

    def release(self) -> None:
        """Stage 3: the parameters stay, views of memory that goes. What autograd saved are such views too."""
        if self.stage == 3 and self.here:
            self.whole.untyped_storage().resize_(0)
            self.here = False

    @torch.no_grad()
    def fill(self, name: str) -> None:
        """Move p.grad to its place in `gradients`. Stage 1 leaves it there, and autograd adds the next to it."""
        if self.stage > 1:
            self.settle()  # of the micro-batch before
        if self.gradients is None:
            self.gradients = self.mine.new_zeros(self.group.size * self.share)
        if not self.filled:
            self.places = self.views(self.gradients)
        p, place = self.parameters[name], self.places[name]
        assert p.grad is not None
        if name not in self.filled:
            place.copy_(p.grad)
        elif p.grad.data_ptr() != place.data_ptr():
            place.add_(p.grad)
        p.grad = place if self.stage == 1 else None
        self.filled.add(name)

    def reduce(self) -> None:
        """Start to sum the gradients over the ranks; what this rank did not use counts as zeros."""
        if self.gradients is None:
            self.gradients = self.mine.new_zeros(self.group.size * self.share)
        for name in self.parameters.keys() - self.filled:
            self.views(self.gradients)[name].zero_()
        out = self.run(self.gradients) if self.stage == 1 else torch.empty_like(self.mine)
        self.leaving = comm.reduce_scatter_into(out, self.gradients, self.group, async_op=True), out

    def settle(self) -> None:
        """Return when the sum is here; from stage 2 on, everything but this rank's run of it goes."""
        if self.leaving is not None:
            pending, out = self.leaving
            pending.wait()
            self.sum = out if self.sum is None else self.sum.add_(out)
            self.leaving = None
            if self.stage > 1:
                self.gradients = None
                self.filled.clear()


class Zero:
    """ZeRO around a model, stage 1, 2 or 3, over one group.

        zero = Zero(model, model.layers, group, stage)
        optimizer = AdamW(p for _, p in zero.named_parameters())     # the pieces that this rank owns
        loss(model(x)).backward()                                    # gradients leave while this runs
        zero.finish()                                                # now the pieces have their gradients
        optimizer.step()                                             # the next forward pass gathers the weights

    Every module of `layers` is a unit; what lies outside of them is one more, whole from the start of the forward
    pass to the end of the backward pass. All ranks run the same layers in the same order. Losses are scaled as for
    DataParallel. The norm of the gradient is common.placement.gradient_norm(pieces): each rank sees a part.

    Raises ValueError for other stages, for a model without parameters to train, for a unit of two types;
    RuntimeError in stage 1 when a second backward pass runs before finish(): accumulate inside no_sync().
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], group: Group, stage: int) -> None:
        if stage not in (1, 2, 3):
            raise ValueError(f"ZeRO has the stages 1, 2 and 3, not {stage}")
        broadcast_model(model, group)
        self.group, self.stage = group, stage
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("no parameter of the model requires a gradient; there is nothing to shard")
        self.names = list(trained)
        of_layers = [{id(p) for p in layer.parameters()} for layer in layers]
        homes = {name: [i for i, ids in enumerate(of_layers) if id(p) in ids] for name, p in trained.items()}
        self.units, self.modules = [], []  # type: tuple[list[Unit], list[nn.Module]]
        for i, module in enumerate([model, *layers], -1):
            # what several layers share, or none has, is whole from the first to the last
            inside = {
                name: trained[name] for name, at in homes.items() if (at if len(at) == 1 else [-1]) == [i]
            }
            if inside:
                self.units.append(Unit(inside, group, stage))
                self.modules.append(module)
        self.model, self.watch = weakref.ref(model), lambda: None
        self.synchronising, self.in_backward, self.reduced = True, False, False
        self.gathered = -1
        self.used: set[str] = set()
        self.queue, self.leaving = self.units[::-1], []  # type: tuple[list[Unit], list[Unit]]
        self._hook(model)

    def _hook(self, model: nn.Module) -> None:
        me = weakref.ref(self)  # the model must not keep this alive

        def call(method: str, *known: Any) -> Any:
            def hook(*given: Any) -> None:
                if zero := me():
                    getattr(zero, method)(*known, *given)

            return hook

        model.register_forward_pre_hook(call("_begin"))
        for i, (unit, module) in enumerate(zip(self.units, self.modules, strict=True)):
            module.register_forward_pre_hook(call("_before", i))
            module.register_forward_hook(call("_after", i))
            for name, p in unit.parameters.items():
                p.register_post_accumulate_grad_hook(call("_ready", unit, name))
        weakref.finalize(self, register_optimizer_step_post_hook(call("_stepped")).remove)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's piece of every parameter, flat, under the parameter's name; many are empty."""
        pieces = {name: piece for unit in self.units for name, piece in unit.pieces.items()}
        return ((name, pieces[name]) for name in self.names)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Stage 1: backward passes in here only add up. The later stages have no place to add up whole gradients."""
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
        """Forward of unit i: its weights must be here; those of the next travel meanwhile."""
        while not recomputing() and self.gathered < min(i + 1, len(self.units) - 1):
            self.gathered += 1
            self.units[self.gathered].gather()
        self.units[i].wait()
        self.watch()

    def _after(self, i: int, module: nn.Module, _: Any, output: Any) -> None:
        """Stage 3: weights go after their use, and come again when the gradient of the unit's output is there."""
        training = torch.is_grad_enabled()
        if self.stage < 3 or recomputing() or (training and module is self.model()):
            return
        self.units[i].release()
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(lambda _: self._needed_again(i))

    def _needed_again(self, i: int) -> None:
        self.units[i].gather()
        self.units[i].wait()
        self.units[max(i - 1, 0)].gather()
        self.watch()

    def _ready(self, unit: Unit, name: str, _: Tensor) -> None:
        """The hook that autograd calls when p.grad holds this backward's gradient."""
        if self.reduced and self.stage == 1:
            raise RuntimeError(
                "backward ran twice before finish(): put all micro-batches but the last in no_sync()"
            )
        unit.fill(name)
        self.used.add(name)
        if not self.synchronising:
            return
        if not self.in_backward:
            self.in_backward = True
            Variable._execution_engine.queue_callback(self._end_of_backward)
        unit.unready.discard(name)
        # units leave in one order on all ranks, or messages of the same length would meet the wrong ones
        while self.queue and not self.queue[0].unready:
            self._reduce()

    def _reduce(self) -> None:
        unit = self.queue.pop(0)
        unit.reduce()
        unit.release()
        self.leaving.append(unit)
        self.watch()
        if self.stage > 1 and len(self.leaving) > 1:
            self.leaving.pop(0).settle()  # so that whole gradients of two units exist, not of all

    def _end_of_backward(self) -> None:
        while self.queue:  # parameters that this backward pass did not use
            self._reduce()
        self.queue = self.units[::-1]
        for unit in self.units:
            unit.unready = set(unit.parameters)
        self.in_backward, self.reduced = False, True

    def finish(self) -> None:
        """Wait for all sums; then every piece has its gradient, or None where no rank used the parameter."""
        if not self.reduced:
            self._end_of_backward()
        for unit in self.leaving:
            unit.settle()
        used = self.units[0].mine.new_tensor([float(name in self.used) for name in self.names])
        comm.all_reduce(used, self.group)
        ranks = dict(zip(self.names, used.tolist(), strict=True))
        for unit in self.units:
            assert unit.sum is not None
            for name, gradient in unit.cut(unit.sum).items():
                unit.pieces[name].grad = gradient if ranks[name] else None
                unit.parameters[name].grad = None
            unit.sum = None
            unit.filled.clear()
        self.leaving, self.reduced = [], False
        self.used.clear()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """The pieces of all ranks have changed: what is whole is old."""
        mine = {id(piece) for _, piece in self.named_parameters()}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            for unit in self.units:
                unit.here = False


def recomputing() -> bool:
    """Inside a backward pass: activation checkpointing runs a forward pass there."""
    return torch._C._current_graph_task_id() != -1


def make_version(name: str, model: nn.Module, rt: Runtime, o: TrainingOptions) -> Version:
    """A stage of ZeRO around `model`, or a version of dp_basic.py."""
    if not name.startswith("zero"):
        return make_basic(name, model, rt, o)
    zero = Zero(model, model.layers, Mesh(rt.world, dp=rt.world_size).group("dp"), int(name[-1]))  # type: ignore[arg-type]
    return Version(model, zero.no_sync if zero.stage == 1 else nullcontext, zero.finish, owner=zero)


def bytes_of_weights(stage: int, model: nn.Module, group: Group, micro_batches: int) -> tuple[int, int]:
    """Bytes of the tensors that are reduce-scattered and all-gathered in a step, padding included."""
    of = lambda module: [p for p in module.parameters() if p.requires_grad]  # noqa: E731
    size = of(model)[0].element_size()
    layers = [sum(p.numel() for p in of(layer)) for layer in model.layers]  # type: ignore[union-attr]
    rest = sum(p.numel() for p in of(model)) - sum(layers)
    padded = [-(-numbers // group.size) * group.size * size for numbers in (rest, *layers)]
    if stage == 3:
        return micro_batches * sum(padded), micro_batches * (2 * sum(padded) - padded[0])
    return (micro_batches if stage == 2 else 1) * sum(padded), sum(padded)


def step_bytes(name: str, model: nn.Module, group: Group, o: TrainingOptions) -> Fraction:
    """Bytes a rank sends in a step: reduce-scatter, all-gather; flags, loss and targets as everywhere."""
    if not name.startswith("zero"):
        return basic_step_bytes(name, model, group, o)
    parameters = list(model.parameters())
    rest = 2 * ((len(parameters) + 1) * parameters[0].element_size() + 8)
    moved = sum(bytes_of_weights(int(name[-1]), model, group, o.micro_batches))
    return Fraction((group.size - 1) * (moved + rest), group.size)


def run_bytes(name: str, model: nn.Module, group: Group, o: TrainingOptions) -> Fraction:
    """Bytes a rank sends in `o.steps` steps: the model at the start, then each step and its gradient norm."""
    if not name.startswith("zero"):
        return basic_run_bytes(name, model, group, o)
    n, stage = group.size, int(name[-1])
    start = sum(p.numel() * p.element_size() for p in model.parameters())
    gathered = bytes_of_weights(stage, model, group, o.micro_batches)[1]
    whole_at_first = 0 if stage == 3 else gathered
    steps = o.steps * (step_bytes(name, model, group, o) + Fraction(2 * (n - 1) * 8, n))
    return steps + Fraction((n - 1) * (start - whole_at_first), n)


def main(rt: Runtime, o: TrainingOptions) -> bool:
    """Prove, or with --benchmark time."""
    check(rt, VERSIONS, o)
    # every rank reduces as many micro-batches
    o = replace(o, micro_batches=max(1, min(o.micro_batches, o.batch // rt.world_size)))
    if o.benchmark:
        report(rt, o, benchmark(rt, o, make_version, step_bytes))
        return True
    memory = MemoryTable(rt)
    holds = prove(rt, o, make_version, run_bytes, step_bytes, examine=memory.examine)
    console(rt).print(memory.table("thousands of bytes that a rank holds after a step, measured / formula"))
    return holds and memory.largest <= 0.01


@dataclass
class ZeroOptions(TrainingOptions):
    """The training of chapter 01, in the stages of ZeRO."""

    versions: tuple[str, ...] = VERSIONS
    """Which versions to run."""


if __name__ == "__main__":
    run(main, ZeroOptions)
