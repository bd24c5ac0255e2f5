"""Check the collectives of the ranks: right results, bandwidth by size, each pair of ranks, and the machine's range.

    python -m common.machine communication                 # a rank per GPU, or a few on the CPU
    torchrun --nproc_per_node=8 -m common.machine communication --sweep
    mpirun -np 2 python -m common.machine communication --backend mpi

Conventions of nccl-tests (doc/PERFORMANCE.md): a size is that of the larger tensor that a rank holds, `alg` its bytes
over the time, `bus` that times the bytes that a rank sends per byte, to be compared with a link's speed. In place means
that send and receive buffer overlap; an all-reduce of torch is always in place. A time is the slowest rank's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median, median_low
from typing import Annotated, Any

import numpy as np
import torch
from rich.table import Table

from common import comm
from common.benchmarks.bandwidth import is_correct
from common.benchmarks.primitives import PRIMITIVES
from common.errors import UsageError
from common.launch.command_line import Within
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.measure import in_turn
from common.lesson.runner import DTYPES
from common.machine.cards import PCIE_LANE, Card, card_of
from common.machine.facts import Host, read_host
from common.machine.source import Source
from common.machine.tool import ToolOptions, finish, say, start_tool
from common.machine.verdict import Line, of, passed, skipped
from common.utils.visualizer import bytes_text

MIB = 2**20


@dataclass
class CommunicationOptions(ToolOptions):
    """Options of the communication check."""

    sizes_mb: tuple[Annotated[float, Within(1e-6, 1e6)], ...] = (1, 4, 16, 64)
    """Sizes to measure, in MiB."""
    sweep: bool = False
    """Measure from 8 to 31 bytes to the largest of --sizes-mb, each size 4 times the one before."""
    repeats: Annotated[int, Within(5, 10**6)] = 5
    """Samples of each size, after one that does not count."""
    calls: Annotated[int, Within(0, 10**9)] = 10_000
    """Small sums that are compared with their known results, one after another."""
    pairs: bool = True
    """Measure each pair of ranks alone."""

    def lengths(self) -> list[int]:
        """Return the sizes in bytes. Raises UsageError if there is none."""
        if not self.sizes_mb:
            raise UsageError("--sizes-mb is empty; give sizes in MiB, such as 1 4 16 64")
        largest = int(max(self.sizes_mb) * MIB)
        if self.sweep:
            return sorted(largest // 4**k for k in range(int(math.log(max(largest / 8, 1), 4)) + 1))
        return [int(size * MIB) for size in self.sizes_mb]


@dataclass(frozen=True)
class Row:
    """Times of a collective at a size; bandwidths in GB/s."""

    name: str
    in_place: bool
    bytes: int
    seconds: list[float]
    bus_factor: float

    @property
    def alg(self) -> float:
        return self.bytes / median(self.seconds) / 1e9

    @property
    def bus(self) -> float:
        return self.bus_factor * self.alg


def cases(rt: Runtime, size: int) -> dict[tuple[str, bool], tuple[Callable[[], object], float]]:
    """Return calls with their bus factor, by name and whether they are in place; size: bytes, in n equal pieces."""
    n, group = rt.world_size, rt.world
    numbers = max(1, size // 4 // n) * n
    whole = torch.zeros(numbers, device=rt.device)
    other, piece = torch.zeros_like(whole), torch.zeros(numbers // n, device=rt.device)
    mine = whole.chunk(n)[rt.rank]
    share, even = (n - 1) / n, [numbers // n] * n
    right, left = (rt.rank + 1) % n, (rt.rank - 1) % n
    return {
        ("all-reduce", True): (lambda: comm.all_reduce(whole, group), 2 * share),
        ("all-gather", True): (lambda: comm.all_gather_into(whole, mine, group), share),
        ("all-gather", False): (lambda: comm.all_gather_into(whole, piece, group), share),
        ("reduce-scatter", True): (lambda: comm.reduce_scatter_into(mine, whole, group), share),
        ("reduce-scatter", False): (lambda: comm.reduce_scatter_into(piece, whole, group), share),
        ("broadcast", True): (lambda: comm.broadcast(whole, group), 1.0),
        ("reduce", True): (lambda: comm.reduce(whole, group), 1.0),
        ("all-to-all", False): (lambda: comm.all_to_all_into(other, whole, group, even, even), share),
        ("send and receive", False): (lambda: comm.exchange(whole, other, group, right, left), 1.0),
    }


def measure(rt: Runtime, o: CommunicationOptions) -> list[Row]:
    """Return the times of all collectives at all sizes."""
    rows = []
    for size in o.lengths():
        calls = cases(rt, size)
        named = {f"{name} {in_place}": call for (name, in_place), (call, _) in calls.items()}
        found = in_turn(named, o.repeats, rt.world, device=rt.device.type)
        n = rt.world_size
        exact = max(1, size // 4 // n) * n * 4
        rows += [
            Row(name, in_place, exact, found[f"{name} {in_place}"].seconds, factor)
            for (name, in_place), (_, factor) in calls.items()
        ]
    return rows


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return latency in seconds and bandwidth in bytes per second: least squares of the relative error of a + b x."""
    x, y = np.asarray(sizes, float), np.asarray(seconds, float)
    (latency, slope), *_ = np.linalg.lstsq(np.stack([1 / y, x / y], 1), np.ones_like(y), rcond=None)
    return max(0.0, float(latency)), 1 / max(float(slope), 1e-15)


def right(rt: Runtime, o: CommunicationOptions) -> list[Line]:
    """Compare every collective with its known result, and many small sums."""
    lines = []
    numbers = 2 * 3 * 5 * 7 * rt.world_size
    for primitive in PRIMITIVES:
        length = numbers // rt.world_size if primitive.gathers else numbers
        holds = is_correct(primitive, length, DTYPES["float32"], rt)
        cure = "NCCL_DEBUG=INFO shows the transport; try NCCL_P2P_DISABLE=1, then check the links"
        lines.append(of(holds, primitive.name, "right" if holds else "WRONG", cure))
    if o.calls:
        lines.append(many_sums(rt, o.calls))
    return lines


def many_sums(rt: Runtime, calls: int, name: str = "small sums") -> Line:
    """Sum small tensors of whole numbers many times; the results are known, and exact in float32."""
    n, wrong = rt.world_size, 0
    ramp = torch.arange(256, dtype=torch.float32, device=rt.device)
    for k in range(calls):
        x = ramp * (rt.rank + 1) + k % 1009
        comm.all_reduce(x, rt.world)
        wrong += not torch.equal(x, ramp * (n * (n + 1) // 2) + n * (k % 1009))
    counts = comm.everyones(wrong, rt.world)
    bad = [f"rank {r}: {count} of {calls:,} wrong" for r, count in enumerate(counts) if count]
    cure = "exclude the rank's GPU: a link or its memory changes bits"
    return of(not bad, name, "; ".join(bad) or f"{calls:,} right on every rank", cure)


def fitted(rt: Runtime, o: CommunicationOptions) -> Line:
    """Return the line of the all-reduce's time as latency and bandwidth, of sizes from 8 bytes to the largest."""
    sizes, seconds = [8, 2**10, 2**14, 2**17, *o.lengths()], []
    for size in sizes:
        call, _ = cases(rt, size)["all-reduce", True]
        seconds.append(median(in_turn({"": call}, o.repeats, rt.world, device=rt.device.type)[""].seconds))
    latency, bandwidth = fit(sizes, seconds)
    off = max(abs(latency + size / bandwidth - t) / t for size, t in zip(sizes, seconds, strict=True))
    return passed(
        "time of an all-reduce",
        f"{1e6 * latency:,.0f} us + bytes / {bandwidth / 1e9:.2f} GB/s, off by at most {off:.0%}",
    )


def pair_matrix(
    rt: Runtime, size: int = MIB, repeats: int = 5
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Return latency in seconds and bandwidth in bytes per second of each pair of ranks, which talks alone.

    Latency is half of the fastest round trip of one number; bandwidth is size / (one-way time - latency).
    """
    latency, speed = {}, {}
    for a in range(rt.world_size):
        for b in range(a + 1, rt.world_size):
            times = []
            for numbers in (1, size // 4):
                x = torch.zeros(numbers, device=rt.device)

                def there_and_back(x: torch.Tensor = x, a: int = a, b: int = b) -> None:
                    if rt.rank == a:
                        comm.send(x, rt.world, b)
                        comm.recv(x, rt.world, b)
                    elif rt.rank == b:
                        comm.recv(x, rt.world, a)
                        comm.send(x, rt.world, a)

                measured = in_turn({"": there_and_back}, repeats, rt.world, device=rt.device.type)
                times.append(min(measured[""].seconds) / 2)
            latency[a, b] = times[0]
            speed[a, b] = size / max(times[1] - times[0], 1e-9)
    return latency, speed


def kind_of(pair: tuple[int, int], host: Host, local: int) -> str:
    """Return how two ranks are joined. local: ranks per host; a rank's GPU is its number on its host."""
    a, b = pair
    if a // local != b // local:
        return "between hosts"
    return host.peers.get((a % local, b % local), "between ranks")


def pair_lines(
    latency: dict[tuple[int, int], float], speed: dict[tuple[int, int], float], host: Host, local: int
) -> list[Line]:
    """Name the slowest link, and a rank that is slow with every other. Pairs are compared with others of their kind."""
    lines = []
    kinds: dict[str, list[tuple[int, int]]] = {}
    for pair in speed:
        kinds.setdefault(kind_of(pair, host, local), []).append(pair)
    for kind, pairs in kinds.items():
        usual = median(speed[pair] for pair in pairs)
        worst = min(pairs, key=lambda pair: speed[pair])
        found = f"slowest {worst[0]}-{worst[1]} with {speed[worst] / 1e9:.2f} GB/s, median {usual / 1e9:.2f} ({kind})"
        cure = "compare with nvidia-smi topo -m and nvlink --status; exchange the cards to see what the fault follows"
        lines.append(of(speed[worst] > 0.5 * usual, "links", found, cure, "warn"))
    ranks = sorted({r for pair in latency for r in pair})
    if len(ranks) > 2:
        best = {r: min(t for pair, t in latency.items() if r in pair) for r in ranks}
        usual = median_low(best.values())
        slow = [
            f"rank {r} has a latency of {1e6 * t:,.0f} us"
            for r, t in best.items()
            if t > max(5 * usual, usual + 1e-3)
        ]
        found = (
            "; ".join(slow) + f", the median after {1e6 * usual:,.0f}" if slow else f"{1e6 * usual:,.0f} us"
        )
        lines.append(
            of(
                not slow,
                "latency of ranks",
                found,
                "look at the rank's host: load, clocks, its cores",
                "fail",
            )
        )
    return lines


def expected(rows: list[Row], host: Host, rt: Runtime) -> Line:
    """Compare the all-reduce with the range to expect of these GPUs and links."""
    name = "all-reduce against the expected"
    card: Card | None = card_of(host.gpus[0].name) if host.gpus else None
    if rt.backend != "nccl" or card is None or not rt.world_size == rt.local_world_size == 8:
        what = host.gpus[0].name if host.gpus else "a CPU"
        found = f"{rt.world_size} rank(s) on {rt.backend}, {what}"
        return skipped(name, f"known for 8 GPUs of one host on NCCL; this is {found}")
    least, most = card.all_reduce
    if host.peers and not any(level.startswith("NV") for level in host.peers.values()):
        lane = PCIE_LANE[card.pcie] * 16
        least, most = min(least, 0.4 * lane), min(most, lane)
    row = min((r for r in rows if r.name == "all-reduce"), key=lambda r: abs(r.bytes - card.at * MIB))
    if not 0.99 * card.at <= row.bytes / MIB <= 2 * card.at:
        return skipped(name, f"the range is of {card.at} MiB; give --sizes-mb {card.at}")
    found = f"{row.bus:.0f} GB/s at {row.bytes / MIB:.0f} MiB, expected {least:.0f} to {most:.0f} for 8 {card.name}"
    cure = "nvidia-smi topo -m; NCCL_ALGO=Ring, NCCL_MIN_NCHANNELS=8; docs/machine-kit.md#slow-links"
    return of(row.bus >= least, name, found, cure, "warn" if row.bus > 0.7 * least else "fail")


def speed_table(rows: list[Row], title: str) -> Table:
    """Return a row per collective and size."""
    heads = ("", "in place", ">size", ">median ms", ">min ms", ">alg GB/s", ">bus GB/s")
    made = make_table(title, heads)
    for r in sorted(rows, key=lambda r: (r.name, not r.in_place, r.bytes)):
        times = f"{1e3 * median(r.seconds):.3f}", f"{1e3 * min(r.seconds):.3f}"
        where = "yes" if r.in_place else "no"
        made.add_row(r.name, where, bytes_text(r.bytes), *times, f"{r.alg:.3f}", f"{r.bus:.3f}")
    return made


def pair_table(pairs: list[list[float]], ranks: int) -> Table:
    """Return GB/s of each pair of ranks above the diagonal, and microseconds below."""
    cells = [["" for _ in range(ranks)] for _ in range(ranks)]
    for a, b, microseconds, speed in pairs:
        cells[int(a)][int(b)], cells[int(b)][int(a)] = f"{speed:.2f}", f"{microseconds:,.0f} us"
    rows = ([str(r), *row] for r, row in enumerate(cells))
    return make_table(
        "each pair alone: GB/s above, latency below", ["", *(f">{r}" for r in range(ranks))], rows
    )


def communicate(rt: Runtime, o: CommunicationOptions) -> tuple[list[Line], list[Row], dict[str, Any]]:
    """Return the lines, the rows of the bandwidth table, and facts for --json. All ranks call it."""
    if rt.world_size == 1:
        return [skipped("communication", "one rank sends nothing; give --nproc 2")], [], {}
    host = read_host(Source())
    say(rt, "results of the collectives")
    lines = right(rt, o)
    say(rt, "bandwidth")
    rows = measure(rt, o)
    lines += [fitted(rt, o), expected(rows, host, rt)]
    facts: dict[str, Any] = {"rows": [{**asdict(r), "alg": r.alg, "bus": r.bus} for r in rows]}
    if o.pairs:
        say(rt, "each pair of ranks")
        delays, speeds = pair_matrix(rt, MIB if rt.device.type == "cpu" else 16 * MIB)
        lines += pair_lines(delays, speeds, host, rt.local_world_size)
        facts["pairs"] = [[a, b, 1e6 * delays[a, b], speed / 1e9] for (a, b), speed in speeds.items()]
    return lines, rows, facts


def main(rt: Runtime, o: CommunicationOptions) -> bool:
    """Run the check, and print it."""
    lines, rows, facts = communicate(rt, o)
    title = f"{rt.world_size} ranks, {rt.backend}, {rt.device.type}"
    tables = [speed_table(rows, f"{title}, float32")] if rows else []
    if facts.get("pairs") and rt.world_size <= 16:
        tables.append(pair_table(facts["pairs"], rt.world_size))
    return finish(rt, o, "communication", lines, title, tables, **facts)


def start() -> None:
    """Run the command line."""
    start_tool(main, CommunicationOptions)
