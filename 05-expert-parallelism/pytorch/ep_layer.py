"""One layer of experts: the speed-up over one rank with an even load, and the cost of sorting the tokens.

    one device     route  sort         experts, k T rows                        put back, weigh, sum
    n ranks        route  sort  send   experts, k T / n rows each   send back   put back, weigh, sum

A router that is not trained for balance sends most tokens to a few experts, and the busiest rank sets the
pace: see ep_imbalance.py. Here the choices are replaced by ones that are even over all experts; the weights
are the scores of these choices. The speed-up compares n ranks with one rank that has all experts and the
whole batch. Without messages it would be n, or E over the largest number of experts of a rank where n does
not divide E.

The cost of sorting is the time of the layer without its experts (rows are returned unchanged) minus that of
the router: the permutation, its inverse and the weighted sum, forward and backward. Sorting moves 2 k T D
numbers in each pass, while SwiGLU experts compute 6 k T D F operations forward: the wider the experts, the
smaller the share of sorting.

    OMP_NUM_THREADS=1 mpirun -np 2 --bind-to core python ep_layer.py --dtype float32        python ep_layer.py --nproc 2

T tokens of all ranks  D width  F width of an expert  E experts  k experts a token  n ranks
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from rich.table import Table
from torch import Tensor, nn

from common import comm
from common.comm import Group, sizes_of
from common.comm.checked.asked import if_asked
from common.comm.ledger import Ledger
from common.comm.mesh import Mesh
from common.comm.placement import sum_gradients
from common.errors import UsageError
from common.launch.command_line import Count, Size, Width
from common.launch.runtime import Runtime
from common.lesson.equality import TOLERANCE
from common.lesson.measure import BenchmarkRecord, Measured, in_turn, peak_memory
from common.lesson.runner import DTYPES, console, run, write_records
from common.models.moe import MoE, Router, Routing

from ep_moe import ExpertExchange, keep_own_experts
from ep_training import ExpertOptions, check_split, largest_difference


@dataclass
class LayerOptions(
    ExpertOptions,
    without=(
        "batch",
        "sequence",
        "micro_batches",
        "versions",
        "benchmark",
        "scaling",
        "data",
        "plot",
    ),
):
    """Options: the shape of the timed layer."""

    model: str = "mixtral-31m"
    """Name of the model that gives the experts' number, kind, and width relative to D."""
    steps: Count = 5
    """Timed rounds."""
    tokens: Size = 4096
    """Tokens of all ranks together."""
    width: Width = 512
    """Width D of a token."""


class Even(Router):
    """Router whose token t chooses experts k t, k t + 1, ... modulo E, with weights from their scores."""

    def forward(self, x_BSD: Tensor) -> Routing:
        """Route every token."""
        routing: Routing = super().forward(x_BSD)
        shape, E = routing.experts_BSK.shape, routing.scores_BSE.shape[-1]
        experts_BSK = torch.arange(shape.numel(), device=x_BSD.device).view(shape) % E
        weights_BSK = routing.scores_BSE.gather(-1, experts_BSK)
        if self.kind != "softmax":
            weights_BSK = weights_BSK / weights_BSK.sum(-1, keepdim=True)
        return replace(routing, experts_BSK=experts_BSK, weights_BSK=weights_BSK)


def make_layer(o: LayerOptions, device: torch.device) -> MoE:
    """Return the whole layer, the same on all ranks."""
    c = o.model_config()
    c = replace(c, width=o.width, mlp_width=o.width * c.mlp_width // c.width, heads=1, kv_heads=1)
    layer = MoE(c)
    layer.router = Even(c)
    layer = layer.to(device, DTYPES[o.dtype])
    generator = torch.Generator().manual_seed(o.seed)
    for p in layer.parameters():
        p.data = (0.02 * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p)
    return layer


def forward_and_backward(layer: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the result y for x, the gradient of half the sum of squares of y with respect to x)."""
    x.grad = None
    y = layer(x)
    y.backward(y.detach())
    assert x.grad is not None
    return y.detach(), x.grad


def named(layer: nn.Module, y: Tensor, dx: Tensor) -> dict[str, Tensor]:
    """Return a layer's results and gradients by name."""
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"y": y, "dx": dx, **gradients}


def layer_bytes(o: LayerOptions, group: Group) -> int:
    """Return the bytes this rank sends in both passes: own rows out, others' rows back, the counts."""
    c, n = o.model_config(), group.size
    e = sizes_of(c.experts, n)[group.rank]
    rows_of_expert = o.tokens // n * c.experts_per_token // c.experts  # from each rank
    rows = rows_of_expert * (c.experts - e + (n - 1) * e)
    return 2 * rows * o.width * DTYPES[o.dtype].itemsize + 8 * (c.experts - e)


def main(rt: Runtime, o: LayerOptions) -> bool:
    """Time an even layer on one rank, on all, and in parts; prove that results and gradients are equal."""
    n, E, dtype, out = rt.world_size, o.model_config().experts, DTYPES[o.dtype], console(rt)
    check_split(E, n)
    if o.width % 2 or o.tokens % (n * E):
        near = max(1, round(o.tokens / (n * E))) * n * E
        raise UsageError(
            f"--tokens {o.tokens} --width {o.width}: the width must be even, "
            f"and the tokens a multiple of {n} rank(s) times {E} experts, so that the load is even: {near} would do"
        )
    mesh = Mesh(rt.world, ep=n)
    group = mesh.group("ep")
    generator = torch.Generator().manual_seed(o.seed + 1)
    whole_1TD = torch.randn(1, o.tokens, o.width, generator=generator, dtype=torch.float64)
    whole_1TD = whole_1TD.to(rt.device, dtype)
    mine_1tD = whole_1TD.chunk(n, 1)[rt.rank].clone().requires_grad_()
    whole_1TD.requires_grad_()
    alone, split, unchanged = (make_layer(o, rt.device) for _ in range(3))
    unchanged.compute = lambda rows_RD, counts_E: rows_RD
    keep_own_experts(split.experts, group)
    split.compute = ExpertExchange(split.experts, group, E)

    with if_asked(mesh):
        with Ledger() as ledger:
            found = forward_and_backward(split, mine_1tD)
        sum_gradients(split.parameters(), mesh)
    expected = [x_1TD.chunk(n, 1)[rt.rank] for x_1TD in forward_and_backward(alone, whole_1TD)]
    apart = largest_difference(named(alone, *expected), named(split, *found), rt)
    counted = all(comm.everyones(ledger.bytes() == layer_bytes(o, group), rt.world))
    right = counted and apart <= TOLERANCE[dtype]

    calls: dict[str, Callable[[], object]] = {
        "one rank": partial(forward_and_backward, alone, whole_1TD),
        "all ranks": partial(forward_and_backward, split, mine_1tD),
        "one rank without experts": partial(forward_and_backward, unchanged, whole_1TD),
        "one rank, router alone": partial(
            forward_and_backward, lambda x: alone.router(x).weights_BSK, whole_1TD
        ),
    }
    cases = {
        name: call if rt.rank == 0 or name == "all ranks" else lambda: None for name, call in calls.items()
    }
    measured = in_turn(cases, o.steps, rt.world, device=rt.device.type)
    out.print(times_table(o, measured))
    rounds = list(zip(*(m.seconds for m in measured.values()), strict=True))
    gained = statistics.median(one / everyone for one, everyone, _, _ in rounds)
    sorting = statistics.median((without - router) / one for one, _, without, router in rounds)
    out.print(
        f"{n} rank(s): {gained:.2f} times as fast as one; sorting takes {sorting:.1%} of one rank's time"
    )
    made = records(rt, o, measured, alone, right, apart)
    if rt.rank == 0:
        write_records(o.json, [r.as_json() for r in made])
    proved = f"proved: equal to one device within {TOLERANCE[dtype]:.0e}, bytes counted = formula"
    out.print(proved if right else f"results or bytes DIFFER: {apart:.1e}")
    return right


def times_table(o: LayerOptions, measured: Mapping[str, Measured]) -> Table:
    """Return a table of the times."""
    E = o.model_config().experts
    title = f"a layer of {E} experts, {o.tokens} tokens of {o.width} numbers, {o.dtype}, even load"
    table = Table("forward and backward", title=title, title_justify="left")
    for column in ("ms (median)", "spread", "ms blocked"):
        table.add_column(column, justify="right")
    for name, m in measured.items():
        blocked = f"{1e3 * statistics.median(m.blocked):.1f}"
        table.add_row(name, f"{m.median * 1e3:.1f}", f"{m.spread:.0%}", blocked)
    return table


def records(
    rt: Runtime, o: LayerOptions, measured: Mapping[str, Measured], layer: MoE, equal: bool, apart: float
) -> list[BenchmarkRecord]:
    """Return the records of one rank and of all. apart: the largest difference of all ranks to one."""
    parameters, memory = sum(p.numel() for p in layer.parameters()), peak_memory(rt.world)
    of = {1: measured["one rank"], rt.world_size: measured["all ranks"]}
    return [
        BenchmarkRecord(
            strategy="ep",
            implementation="ep_layer",
            language="pytorch",
            ranks=n,
            backend=rt.backend,
            dtype=o.dtype,
            model=f"a layer of {o.model} with {o.width} numbers a token",
            parameters=parameters,
            tokens_per_step=o.tokens,
            flop_per_step=6 * o.tokens * layer.active_weights(),
            step_seconds=m.seconds,
            communication_seconds=statistics.median(m.blocked),
            bytes_counted=statistics.median(m.sent),
            bytes_formula=float(layer_bytes(o, rt.world) if n > 1 else 0),
            peak_memory_bytes=memory,
            scaling=o.scaling,
            equal=equal,
            largest_difference=apart,
        )
        for n, m in of.items()
    ]


if __name__ == "__main__":
    run(main, LayerOptions)
