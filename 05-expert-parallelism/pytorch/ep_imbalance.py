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
from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Table
from torch import Tensor

from common import comm
from common.comm import sizes_of
from common.comm.checked.asked import if_asked
from common.comm.ledger import Ledger, show_bytes
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.command_line import Size
from common.launch.runtime import Runtime
from common.lesson.equality import TOLERANCE
from common.lesson.measure import in_turn
from common.lesson.runner import DTYPES, console, run

from ep_layer import LayerOptions, forward_and_backward, make_layer, named
from ep_moe import ExpertExchange, keep_own_experts
from ep_training import check_split, largest_difference


@dataclass
class ImbalanceOptions(LayerOptions, without=("tokens", "json")):
    """Options: the shape of the timed layer."""

    model: str = "mixtral-tiny"
    """Name of a model with experts in common/models/configs.py."""
    rows: Size = 2048
    """Rows per rank: its tokens times the experts per token."""


def counts_for(share: float, rows: int, E: int, n: int) -> Tensor:
    """Return the rows per expert, int64 [E]: a share for rank 0's, the rest even over the others."""
    first = round(share * rows)
    mine, others = sizes_of(E, n)[0], E - sizes_of(E, n)[0]
    return torch.tensor(sizes_of(first, mine) + (sizes_of(rows - first, others) if others else []))


def main(rt: Runtime, o: ImbalanceOptions) -> bool:
    """Time a layer by the share of the busiest rank; prove results and bytes for each share."""
    E, n, dtype = o.model_config().experts, rt.world_size, DTYPES[o.dtype]
    check_split(E, n)
    if o.rows < 8 * n * E or o.width % 2:
        raise UsageError(
            f"--rows {o.rows} --width {o.width}: the width must be even, and "
            f"the rows, for their shares to mean something, at least {8 * n * E}"
        )
    mesh = Mesh(rt.world, ep=n)
    group = mesh.group("ep")
    whole, experts = (make_layer(o, rt.device).experts for _ in range(2))
    keep_own_experts(experts, group)
    generator = torch.Generator().manual_seed(o.seed + 1 + rt.rank)
    rows_RD = torch.randn(o.rows, o.width, generator=generator, dtype=torch.float64)
    rows_RD = rows_RD.to(rt.device, dtype).requires_grad_()
    least = sizes_of(E, n)[0] / E
    cases: dict[str, Callable[[], object]] = {}
    busiest, right, sent = {}, True, {}
    for step in range(5):
        share = least + (1 - least) * step / 4
        name, counts_E = f"{share:.0%}", counts_for(share, o.rows, E, n).to(rt.device)
        if name in cases:
            continue  # on one rank all shares are the same
        exchange = ExpertExchange(experts, group, E)
        split = partial(exchange, counts_E=counts_E)
        cases[name] = partial(forward_and_backward, split, rows_RD)
        for module in (whole, experts):
            module.zero_grad()
        with if_asked(mesh), Ledger() as ledger:
            found = named(experts, *forward_and_backward(split, rows_RD))
        # the reference: all experts on this rank's rows, their gradients summed over the ranks
        expected = named(whole, *forward_and_backward(partial(whole, counts_E=counts_E), rows_RD))
        for parameter, _ in whole.named_parameters():
            comm.all_reduce(expected[parameter], rt.world)
        travelled = 2 * (exchange.rows_sent[0] + exchange.rows_received[0]) * o.width * dtype.itemsize
        travelled += 8 * (E - exchange.sizes[group.rank])
        right &= all(comm.everyones(ledger.bytes() == travelled, rt.world))
        right &= largest_difference(expected, found, rt) <= TOLERANCE[dtype]
        busiest[name] = max(int(x.sum()) for x in counts_E.split(exchange.sizes)) / o.rows
        sent[name] = ledger.bytes()
    measured = in_turn(cases, o.steps, rt.world, device=rt.device.type)
    title = f"a layer of {E} experts on {n} ranks: {n} x {o.rows} rows of {o.width} numbers, {o.dtype}"
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
