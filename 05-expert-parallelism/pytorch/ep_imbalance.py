"""Cost of uneven load: a layer is done when its busiest rank is done.

    time = rows of the busiest rank * time per row            even: k T / n rows; all on one rank: k T, n times as long

    share of rank 0   1/n                         1/2                          1
    rank 0            ####|                       ########|                    ################|
    rank 1            ####|                       ##......|                    ................|
    rank 2            ####|                       ###.....|                    ................|     # computes
    rank 3            ####|                       ###.....|                    ................|     . waits

By formula the slowdown is n times the share of the busiest rank. The measured slowdown is smaller: messages
take as long in all cases, and larger products take a little less time per row. Activation memory grows with
the rows as well: with all rows on one rank, that rank keeps n times its even share. A capacity or a balanced
router limits this.

    python ep_imbalance.py --nproc 2        torchrun --nproc_per_node=2 ep_imbalance.py
    OMP_NUM_THREADS=1 mpirun -np 2 --bind-to core python ep_imbalance.py --dtype float32 --steps 7

The times are valid only if each rank has a core of its own.

R rows of a rank  D width  E experts  n ranks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from rich.table import Table
from torch import Tensor

from common import comm
from common.comm import Group, sizes_of
from common.comm.ledger import Ledger, show_bytes
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.command_line import Count, Size, Width
from common.launch.runtime import Runtime
from common.lesson.equality import TOLERANCE
from common.lesson.measure import in_turn
from common.lesson.runner import DTYPES, console, run
from common.models.moe import Experts

from ep_moe import ExpertExchange, check_split, share_experts
from ep_training import ExpertOptions, largest_difference


@dataclass
class ImbalanceOptions(
    ExpertOptions,
    without=(
        "batch",
        "sequence",
        "micro_batches",
        "versions",
        "benchmark",
        "scaling",
        "data",
        "json",
        "plot",
    ),
):
    """Options: the shape of the timed layer."""

    steps: Count = 5
    """Timed rounds."""
    rows: Size = 2048
    """Rows per rank: its tokens times the experts per token."""
    width: Width = 512
    """Width D of a token; an expert's width relative to D is that of --model."""


def counts_for(share: float, rows: int, E: int, n: int) -> Tensor:
    """Return the rows per expert, int64 [E]: a share for rank 0's, the rest even over the others."""
    first = round(share * rows)
    mine, others = sizes_of(E, n)[0], E - sizes_of(E, n)[0]
    return torch.tensor(sizes_of(first, mine) + (sizes_of(rows - first, others) if others else []))


def make_experts(o: ImbalanceOptions, device: torch.device) -> Experts:
    """Return the experts of a layer, the same on all ranks."""
    c = o.model_config()
    wide = replace(c, width=o.width, mlp_width=o.width * c.mlp_width // c.width, heads=1, kv_heads=1)
    experts = Experts(wide).to(device, DTYPES[o.dtype])
    generator = torch.Generator().manual_seed(o.seed)
    for p in experts.parameters():
        p.data = (0.02 * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p)
    return experts


def layer(exchange: ExpertExchange, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
    """Run a forward and backward pass; return the result."""
    y_RD = exchange(rows_RD, counts_E)
    y_RD.backward(rows_RD.detach())
    return y_RD.detach()


def difference(
    rt: Runtime, o: ImbalanceOptions, experts: Experts, rows_RD: Tensor, counts_E: Tensor, y_RD: Tensor
) -> float:
    """Return the largest relative difference of result and gradients from those of one device.

    The reference applies all experts to this rank's rows and sums the gradients of the experts over ranks.
    """
    whole, x_RD = make_experts(o, rows_RD.device), rows_RD.detach().clone().requires_grad_()
    expected = {"y": whole(x_RD, counts_E)}
    expected["y"].backward(x_RD.detach())
    found = {"y": y_RD, "dx": cast(Tensor, rows_RD.grad)}
    expected |= {"y": expected["y"].detach(), "dx": cast(Tensor, x_RD.grad)}
    for (name, p), mine in zip(whole.named_parameters(), experts.parameters(), strict=True):
        expected[name], found[name] = (cast(Tensor, x.grad) for x in (p, mine))
        comm.all_reduce(expected[name], rt.world)
    return largest_difference(expected, found, rt)


def main(rt: Runtime, o: ImbalanceOptions) -> bool:
    """Time a layer by the share of the busiest rank; prove results and bytes for each share."""
    c, n = o.model_config(), rt.world_size
    check_split(c.experts, n)
    if o.rows < 8 * n * c.experts or o.width % 2:
        raise UsageError(
            f"--rows {o.rows} --width {o.width}: the width must be even, and "
            f"the rows, for their shares to mean something, at least {8 * n * c.experts}"
        )
    group: Group = Mesh(rt.world, ep=n).group("ep")
    experts = make_experts(o, rt.device)
    share_experts(experts, group)
    generator = torch.Generator().manual_seed(o.seed + 1 + rt.rank)
    rows_RD = torch.randn(o.rows, o.width, generator=generator, dtype=torch.float64)
    rows_RD = rows_RD.to(rt.device, DTYPES[o.dtype]).requires_grad_()
    least = sizes_of(c.experts, n)[0] / c.experts
    cases: dict[str, Callable[[], object]] = {}
    busiest, right, sent = {}, True, {}
    for step in range(5):
        share = least + (1 - least) * step / 4
        name, counts_E = f"{share:.0%}", counts_for(share, o.rows, c.experts, n).to(rt.device)
        if name in cases:
            continue  # on one rank all shares are the same
        exchange = ExpertExchange(experts, group, c.experts)
        cases[name] = partial(layer, exchange, rows_RD, counts_E)
        experts.zero_grad()
        rows_RD.grad = None
        with Ledger() as ledger:
            y_RD = layer(exchange, rows_RD, counts_E)
        travelled = 2 * (exchange.rows_sent[0] + exchange.rows_received[0]) * o.width * y_RD.element_size()
        travelled += 8 * (c.experts - exchange.sizes[group.rank])
        right &= all(comm.everyones(ledger.bytes() == travelled, rt.world))
        right &= difference(rt, o, experts, rows_RD, counts_E, y_RD) <= TOLERANCE[DTYPES[o.dtype]]
        busiest[name] = max(int(x.sum()) for x in counts_E.split(exchange.sizes)) / o.rows
        sent[name] = ledger.bytes()
    measured = in_turn(cases, o.steps, rt.world, device=rt.device.type)
    title = (
        f"a layer of {c.experts} experts on {n} ranks: {n} x {o.rows} rows of {o.width} numbers, {o.dtype}"
    )
    table = Table("share of the busiest rank", title=title, title_justify="left")
    for column in ("bytes sent by rank 0", "ms (median)", "slowdown measured", "by formula"):
        table.add_column(column, justify="right")
    even = next(iter(measured))
    for name, m in measured.items():
        slower, formula = m.median / measured[even].median, busiest[name] / busiest[even]
        table.add_row(
            name, show_bytes(sent[name]), f"{m.median * 1e3:.1f}", f"{slower:.2f}", f"{formula:.2f}"
        )
    out = console(rt)
    out.print(table)
    out.print("proved: equal to one device, bytes counted = formula" if right else "results or bytes DIFFER")
    return right


if __name__ == "__main__":
    run(main, ImbalanceOptions)
