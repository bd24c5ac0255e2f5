"""Time of an MLP's first layer whose input arrives in q pieces, t(q), by formula and measured.

t(q) = max(t_c, t_m) + min(t_c, t_m) / q + q o: t_c and t_m are measured alone, in one piece; o is what each of 15 more
pieces adds to their sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common import comm
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.equality import TOLERANCE, difference
from common.lesson.measure import in_turn
from common.lesson.runner import DTYPES, console
from common.lesson.training import TrainingOptions

from tp_training import tp_group

COUNTS = (1, 2, 4, 8, 16)


def predicted(compute: float, message: float, piece: float, count: int) -> float:
    """Return t(q), in the unit of the given times. piece: the overhead per piece, o. count: q."""
    return max(compute, message) + min(compute, message) / count + count * piece


def sweep(
    rt: Runtime,
    o: TrainingOptions,
    title: str,
    multiply: Callable[[Tensor, Tensor, Any], tuple[Tensor, object]],
    arriving: Callable[[Tensor, Any], Iterable[object]],
    pieces: Callable[[int], Any],
) -> bool:
    """Show t(q), forward, by formula and measured; True if 1 and 16 pieces agree.

    multiply, arriving: `gather_multiply` and `arriving` of tp_overlap.py. pieces(q): returns q pieces.
    """
    group, tokens, width = tp_group(rt), 2048 // rt.world_size, 1024
    draw = partial(torch.randn, dtype=DTYPES[o.dtype], generator=torch.Generator().manual_seed(group.rank))
    x_BsD, matrix_DF = (
        draw(1, tokens, width).to(rt.device),
        draw(width, 4 * width // group.size).to(rt.device),
    )
    whole_BSD = comm.all_gather(x_BsD, group, 1)

    def multiplied(count: int) -> Tensor:
        return multiply(x_BsD, matrix_DF, pieces(count))[0]

    def product(count: int) -> None:
        for rows in whole_BSD.chunk(count, 1):
            rows @ matrix_DF

    def all_arrive(count: int) -> None:
        for _ in arriving(x_BsD, pieces(count)):
            pass

    cases: dict[str, Callable[[], object]] = {f"t {q}": partial(multiplied, q) for q in COUNTS}
    for q in (1, 16):
        cases |= {f"c {q}": partial(product, q), f"m {q}": partial(all_arrive, q)}
    times = in_turn(cases, o.steps, group, device=rt.device.type)
    ms = {name: 1e3 * measured.median for name, measured in times.items()}
    compute, message = ms["c 1"], ms["m 1"]
    piece = max(0.0, (ms["c 16"] - compute + ms["m 16"] - message) / 15)
    title += f"\nproduct {compute:.1f} ms, messages {message:.1f} ms, a piece more {piece:.2f} ms"
    table = make_table(title, (">pieces", ">predicted ms", ">measured ms", ">of one piece"))
    for q in COUNTS:
        formula, found = predicted(compute, message, piece, q), ms[f"t {q}"]
        table.add_row(str(q), f"{formula:.1f}", f"{found:.1f}", f"{found / ms['t 1']:.2f}")
    best = math.sqrt(min(compute, message) / piece) if piece else math.inf
    fastest = min(COUNTS, key=lambda q: ms[f"t {q}"])
    console(rt).print(table)
    console(rt).print(f"pieces that are best by formula: {best:.1f}; of those measured: {fastest}")
    return difference(multiplied(1), multiplied(16)) <= TOLERANCE[x_BsD.dtype]
