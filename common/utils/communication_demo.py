"""Demonstration of the primitives of `common.benchmarks.primitives` on small integers, before and after, by rank.

python communication_demo.py --nproc 4      torchrun --nproc_per_node=4 communication_demo.py
mpirun -np 4 python communication_demo.py

--benchmark   time and bandwidth by size (`common.benchmarks.bandwidth`)
--deadlock    two ranks that both send first, how the runtime names them, and two cures; as plain python
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor

from common import comm
from common.benchmarks.bandwidth import BandwidthOptions, benchmark
from common.benchmarks.primitives import PRIMITIVES, Primitive, rounds, start_of
from common.comm.ledger import Ledger, show_bytes
from common.errors import RankError, UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.runner import console, run


@dataclass
class Options(BandwidthOptions):
    """Options: the primitives on small integers, their speed, or a deadlock."""

    benchmark: bool = False
    """Measure time and bandwidth instead."""
    deadlock: bool = False
    """Show two ranks that both send first, and how the runtime names them."""


PATIENCE = 3.0  # seconds until the deadlock is called one


def numbers(x: Tensor | None) -> str:
    """Return a row of the picture."""
    return "(undefined)" if x is None else " ".join(f"{v:2d}" for v in x.tolist())


def show(primitive: Primitive, rt: Runtime, out: Console) -> bool:
    """Print one primitive rank by rank; return True if results and bytes are right on all ranks."""
    n = rt.world_size
    start = start_of(n, torch.int64, rt.device)
    with Ledger() as ledger:
        result = primitive.run(start(rt.rank), rt.world)
    expected = [primitive.expected(start, rank, n) for rank in range(n)]
    sent = torch.tensor([float(ledger.bytes())], dtype=torch.float64, device=rt.device)
    comm.all_reduce(sent, rt.world)
    formula = primitive.sent(8 * n * (n if primitive.gathers else 1), n)
    results = comm.all_gather(result[None], rt.world)
    right = [e is None or torch.equal(e, x) for e, x in zip(expected, results, strict=True)]
    out.print(f"{primitive.name}: {primitive.idea}", style="bold")
    for rank, (x, want) in enumerate(zip(results, expected, strict=True)):
        after = numbers(None if want is None else x)
        note = "" if right[rank] else f"   WRONG, expected {numbers(want)}"
        out.print(f"  rank {rank}   {numbers(start(rank))}  ->  {after}{note}", soft_wrap=True)
    factor = "2(n-1)" if primitive.passes == 2 else "(n-1)"
    counted = round(sent.item())
    out.print(
        f"  bytes sent by all: counted {show_bytes(counted)}, formula {factor} |x| = {show_bytes(formula)}\n"
    )
    return all(right) and counted == formula


def demonstrate(rt: Runtime, out: Console) -> bool:
    """Show every primitive on small integers; return True if all are right."""
    right = [show(primitive, rt, out) for primitive in PRIMITIVES]
    in_rounds = rounds(rt.world_size)
    out.print(f"messages of one to many, in turn: {rt.world_size - 1}; rounds of the tree: {len(in_rounds)}")
    for number, pairs in enumerate(in_rounds, 1):
        out.print(f"  round {number}   " + "   ".join(f"{a} -> {b}" for a, b in pairs))
    out.print(f"{sum(right)} of {len(right)} primitives gave what they must, with the bytes of their formula")
    return all(right)


def both_send_first(rt: Runtime) -> None:
    """Deadlock: each rank waits until the other receives, and neither does."""
    x = torch.tensor([rt.rank])
    if rt.rank == 0:
        comm.send(x, rt.world, dst=1)
        comm.recv(x, rt.world, src=1)
    else:
        comm.send(x, rt.world, dst=0)
        comm.recv(x, rt.world, src=0)


def one_receives_first(rt: Runtime) -> int:
    """Cure 1: an order in which one rank always receives."""
    x, y = torch.tensor([rt.rank]), torch.tensor([-1])
    if rt.rank == 0:
        comm.send(x, rt.world, dst=1)
        comm.recv(y, rt.world, src=1)
    else:
        comm.recv(y, rt.world, src=0)
        comm.send(x, rt.world, dst=0)
    return int(y)


def send_and_receive_at_once(rt: Runtime) -> int:
    """Cure 2: start sending, receive meanwhile, then wait; `comm.shift` does this."""
    return int(comm.shift(torch.tensor([rt.rank]), rt.world))


def deadlock(out: Console) -> bool:
    """Run two ranks into the deadlock; return True if the report names both and the cures work."""
    out.print(f"two ranks that both send first; a wait may last {PATIENCE:g} s", style="bold")
    try:
        spawn(both_send_first, 2, timeout=PATIENCE, limit=None)
    except RankError as error:
        report = str(error)
    else:
        report = "it went through: this backend keeps small messages until somebody receives them"
    out.print(report, soft_wrap=True, markup=False)
    named = all(f"rank {rank} " in report and f"in send to {1 - rank} " in report for rank in (0, 1))
    cured = True
    for cure in (one_receives_first, send_and_receive_at_once):
        good = spawn(cure, 2) == [1, 0]
        cured &= good
        out.print(f"{cure.__name__}: {'each has the other rank' if good else 'WRONG'}")
    return named and cured


def main(rt: Runtime, options: Options) -> bool:
    """Show every primitive, or measure them, or show the deadlock."""
    out = console(rt)
    if options.deadlock:
        if rt.world_size > 1:
            raise UsageError("--deadlock starts its own two ranks: python communication_demo.py --deadlock")
        return deadlock(out)
    if rt.world_size == 1:
        raise UsageError("communication takes at least 2 ranks, not 1; add --nproc 4")
    if options.benchmark:
        return benchmark(rt, options, out)
    return demonstrate(rt, out)


if __name__ == "__main__":
    run(main, Options)
