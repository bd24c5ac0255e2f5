"""Parameters that are communicated together: one flat buffer in n equal runs, one owned by each rank.

    whole        [ q_proj    k_proj    v_proj      ...      down_proj   0 0 ]     padded to a multiple of n
    mine         [  rank 0      |    rank 1    |    rank 2     |   rank 3   ]
    gather       mine of all ranks   ->  whole                    all-gather       (n-1)/n of whole's bytes
    reduce       gradients, partial  ->  sum, like mine           reduce-scatter   (n-1)/n

A run may begin and end inside a parameter. The part of a parameter in a run is a piece. Optimizers that work
element by element, such as SGD and AdamW, give the same result on pieces. The parameters of the model become
views of `whole`. In stage 0 there is one run, which every rank owns: gradients are all-reduced, pieces are whole
parameters, and nothing is gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group, Pending
from common.comm.placement import FlatShard, like, place, placement

GroupOf = Callable[[Tensor], Group]


def together(
    trained: dict[str, nn.Parameter], model: nn.Module, layers: Sequence[nn.Module], group_of: GroupOf
) -> Iterator[tuple[int, dict[str, nn.Parameter]]]:
    """Yield the layer and the parameters of each unit; layer -1 for those outside of the layers.

    Parameters that several layers share, or that are also outside of them, count as outside. A parameter that
    ranks outside of its group hold, too (tied, replicated), must be split and summed there as here, so it shares no
    unit with parameters of another placement. Those that one rank holds are in no unit.
    """
    of_layers = [{id(p) for p in layer.parameters()} for layer in layers]
    outside = {id(p) for p in parameters_outside(model, {id(layer) for layer in layers})}
    units: dict[tuple[int, str, bool, tuple[str, ...]], dict[str, nn.Parameter]] = {}
    for name, p in trained.items():
        at = [i for i, ids in enumerate(of_layers) if id(p) in ids]
        home = at[0] if len(at) == 1 and id(p) not in outside else -1
        if group_of(p).size > 1:
            alike = home, group_of(p).axis, hasattr(p, "tied"), tuple(placement(p))
            units.setdefault(alike, {})[name] = p
    for (home, *_), parameters in sorted(units.items(), key=lambda unit: unit[0][0]):
        yield home, parameters


def parameters_outside(module: nn.Module, layers: set[int]) -> Iterator[nn.Parameter]:
    """Yield the parameters that `module` has outside of `layers`, a set of module ids."""
    if id(module) not in layers:
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from parameters_outside(child, layers)


class Unit:
    """Parameters communicated together: `whole`, one flat buffer, of which this rank owns the run `mine`.

    Raises ValueError for parameters of different dtypes.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], group: Group, stage: int) -> None:
        self.parameters, self.group, self.stage = parameters, group, stage
        first = next(iter(parameters.values()))
        for name, p in parameters.items():
            if p.dtype != first.dtype:
                raise ValueError(f"{name} is {p.dtype} in a unit of {first.dtype}: give one type a unit")
        self.lengths = [p.numel() for p in parameters.values()]
        self.runs, self.place = (group.size, group.rank) if stage else (1, 0)
        self.share = -(-sum(self.lengths) // self.runs)  # the last run is padded
        self.whole = first.detach().new_zeros(self.runs * self.share)
        for p, view in zip(parameters.values(), self.views(self.whole).values(), strict=True):
            view.copy_(p.detach())
            p.data = view
        self.mine = self.run(self.whole) if stage < 3 else self.run(self.whole).clone()
        self.pieces = {name: like(piece, parameters[name]) for name, piece in self.cut(self.mine).items()}
        for (name, p), sizes in zip(parameters.items(), self._sizes() if stage else (), strict=False):
            place(self.pieces[name], group.axis, FlatShard(p.shape, sizes))
        self.here, self.arriving = True, None  # type: tuple[bool, Pending | None]
        self.gradients: Tensor | None = None  # like `whole`: this rank's part
        self.sum: Tensor | None = None  # like `mine`: over the ranks and the micro-batches reduced so far
        self.leaving: tuple[Pending, Tensor] | None = None
        self.unready, self.filled = set(parameters), set()  # type: tuple[set[str], set[str]]
        self.release()

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """Return the parameters' views of a buffer like `whole`, by name."""
        pieces = torch.split(whole, [*self.lengths, len(whole) - sum(self.lengths)])
        return {name: x.view(p.shape) for (name, p), x in zip(self.parameters.items(), pieces, strict=False)}

    def run(self, whole: Tensor) -> Tensor:
        """Return this rank's run of a buffer like `whole`."""
        return whole[self.place * self.share :][: self.share]

    def _sizes(self) -> list[tuple[int, ...]]:
        """Return, for each parameter, the number of its elements that each rank owns."""
        sizes, start = [], 0
        for length in self.lengths:
            bounds = [min(max(r * self.share, start), start + length) for r in range(self.runs + 1)]
            sizes.append(tuple(b - a for a, b in itertools.pairwise(bounds)))
            start += length
        return sizes

    def cut(self, mine: Tensor) -> dict[str, Tensor]:
        """Return the piece of each parameter in a buffer like `mine`, by name; many are empty."""
        if self.stage == 0:
            return self.views(mine)
        sizes = [every_rank[self.place] for every_rank in self._sizes()]
        pieces = torch.split(mine, [*sizes, len(mine) - sum(sizes)])
        return dict(zip(self.parameters, pieces, strict=False))

    def gather(self) -> None:
        """Start the all-gather of the weights, unless they are whole or the all-gather is in flight."""
        if not self.here and self.arriving is None:
            self._allocate(self.whole.numel() * self.whole.element_size())
            self.arriving = comm.all_gather_into(self.whole, self.mine, self.group, async_op=True)

    def wait(self) -> None:
        """Block until the weights are whole."""
        if self.arriving is not None:
            self.arriving.wait()
            self.here, self.arriving = True, None

    def release(self) -> None:
        """Free the memory of `whole` in stage 3. Parameters and autograd's saved tensors stay views of it."""
        if self.stage == 3 and self.here:
            self._allocate(0)
            self.here = False

    def _allocate(self, size: int) -> None:
        """Give `whole` memory of `size` bytes, in stage 3.

        Memory that a NumPy array of a weight shares stays as it is. Raises RuntimeError if it had been freed.
        """
        storage = self.whole.untyped_storage()
        if self.stage == 3 and storage.resizable():
            storage.resize_(size)
        elif storage.nbytes() < size:
            raise RuntimeError(
                f"{next(iter(self.parameters))}: read while the weights of its unit were freed"
            )

    def places(self) -> dict[str, Tensor]:
        """Return the views for the gradients of this rank's part of the batch, in a buffer like `whole`."""
        if self.gradients is None:
            self.gradients = self.mine.new_zeros(self.runs * self.share)
            self.gradient_views = self.views(self.gradients)
        return self.gradient_views

    @torch.no_grad()
    def fill(self, name: str) -> None:
        """Move p.grad to its view in `gradients`.

        In stages 0 and 1 p.grad then is that view, and autograd adds the next gradient to it.
        """
        if self.stage > 1:
            self.settle()  # the reduction of the previous micro-batch
        p, view = self.parameters[name], self.places()[name]
        assert p.grad is not None
        if name not in self.filled:
            view.copy_(p.grad)
        elif p.grad.data_ptr() != view.data_ptr():
            view.add_(p.grad)
        p.grad = view if self.stage < 2 else None
        self.filled.add(name)

    def reduce(self) -> None:
        """Start to sum the gradients over the ranks; parameters that this rank did not use count as zeros."""
        for name, view in self.places().items():
            if name not in self.filled:
                view.zero_()
        assert self.gradients is not None
        out = self.run(self.gradients) if self.stage < 2 else torch.empty_like(self.mine)
        if self.stage == 0:
            pending = comm.all_reduce(out, self.group, async_op=True)
        else:
            pending = comm.reduce_scatter_into(out, self.gradients, self.group, async_op=True)
        self.leaving = pending, out

    def settle(self) -> None:
        """Wait for the sum; from stage 2 on, free all gradients but this rank's run of the sum."""
        if self.leaving is not None:
            pending, out = self.leaving
            pending.wait()
            self.sum = out if self.sum is None else self.sum.add_(out)
            self.leaving = None
            if self.stage > 1:
                self.gradients, self.gradient_views = None, {}
                self.filled.clear()
