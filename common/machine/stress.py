"""Full load for some minutes: products whose every bit is known, memory, collectives, heat, clocks and errors.

    python -m common.machine stress                         # 15 minutes, a rank per GPU
    python -m common.machine stress --minutes 2 --state stress.jsonl

    products      the same product again and again: its bits must not change, and be the same on all equal GPUs
    memory        patterns are written to most of the free memory, and read
    collectives   a large sum during the products, then many small ones, all with known results
    watch         temperature, clocks, power, throttle reasons, ECC and XID errors between beginning and end

A round has all of them. The run ends at the first wrong bit, and says where. --state keeps a line per round; a run that
was stopped goes on with the minutes that are left.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, median_low
from typing import Annotated

import psutil
import torch

from common import comm
from common.errors import UsageError
from common.launch.command_line import Within
from common.launch.runtime import Runtime
from common.lesson.runner import console
from common.machine.communication import many_sums
from common.machine.facts import Host, read_host
from common.machine.rules import HARMLESS_XIDS, THROTTLES, XIDS
from common.machine.source import Source
from common.machine.tool import ToolOptions, finish, start_tool
from common.machine.verdict import Line, of, passed, skipped


@dataclass
class StressOptions(ToolOptions):
    """Options of the stress test."""

    minutes: Annotated[float, Within(0.001, 1e5)] = 15.0
    """Time under load."""
    size: Annotated[int, Within(0, 2**15)] = 0
    """Rows of the matrices; 0: 8192 on a GPU, 512 on a CPU."""
    memory: Annotated[float, Within(0, 0.95)] = 0.0
    """Share of the free memory to walk through; 0: 0.8 of a GPU's, 0.05 of a CPU's."""
    calls: Annotated[int, Within(0, 10**6)] = 200
    """Sums with known results in each round."""
    state: Path | None = None
    """File with a line per round, by which a stopped run goes on."""


@dataclass
class Round:
    """Results of a round on one rank. problem: empty if all was right."""

    number: int
    seconds: float
    digest: str
    product_seconds: float
    walked: int
    temperature: int | None = None
    clock: int | None = None
    power: float | None = None
    problem: str = ""


@dataclass
class Work:
    """The matrices of a rank, and the bits of their product."""

    rt: Runtime
    o: StressOptions
    n: int = field(init=False)

    def __post_init__(self) -> None:
        cpu = self.rt.device.type == "cpu"
        self.n = self.o.size or (512 if cpu else 8192)
        generator = torch.Generator().manual_seed(7)
        self.a, self.b = (
            torch.randn(self.n, self.n, generator=generator).to(self.rt.device) for _ in range(2)
        )
        self.share = self.o.memory or (0.05 if cpu else 0.8)

    def product(self) -> tuple[str, float]:
        """Return a digest of the product's bits, and the seconds of a product, the least of some."""
        least, digest = float("inf"), ""
        for _ in range(5):
            start = time.perf_counter()
            c = self.a @ self.b
            if self.rt.device.type == "cuda":
                torch.cuda.synchronize()
            least = min(least, time.perf_counter() - start)
            found = hashlib.sha256(c.cpu().numpy().tobytes()).hexdigest()[:16]
            if digest not in ("", found):
                return f"{digest} and then {found}", least
            digest = found
        return digest, least

    def walk(self) -> tuple[int, str]:
        """Write patterns to memory and read them; return the bytes, and what was wrong."""
        if self.rt.device.type == "cuda":
            free = torch.cuda.mem_get_info()[0]
        else:
            free = psutil.virtual_memory().available // self.rt.world_size
        count = int(self.share * free) // 8
        try:
            block = torch.empty(count, dtype=torch.int64, device=self.rt.device)
        except RuntimeError:
            return 0, "out of memory: another program took it"
        for pattern in (0x5555555555555555, -0x5555555555555556, 0):
            block.fill_(pattern)
            wrong = int((block != pattern).sum())
            if wrong:
                return 8 * count, f"{wrong} words of {count:,} do not hold {pattern & (2**64 - 1):016x}"
        return 8 * count, ""


def rounds_before(path: Path | None) -> list[Round]:
    """Return the rounds of a state file. Raises UsageError if it is no such file."""
    if path is None or not path.exists():
        return []
    try:
        return [Round(**json.loads(line)) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"--state {path}: {error}; remove it to begin anew") from None


def stress(rt: Runtime, o: StressOptions) -> list[Line]:
    """Run rounds until the time is over or something is wrong; return the lines. All ranks call it."""
    source, work = Source(), Work(rt, o)
    before = read_host(source)
    done = rounds_before(o.state if rt.rank == 0 else None)
    left = comm.everyones(60 * o.minutes - sum(r.seconds for r in done), rt.world)[0]
    lines, rounds, ended = [], list[Round](), time.monotonic() + left
    number = comm.everyones(len(done), rt.world)[0]
    sums = passed("collectives", "one rank sends nothing")
    while True:
        start = time.monotonic()
        flow = torch.full((work.n**2,), rt.rank + 1.0, device=rt.device)
        pending = comm.all_reduce(flow, rt.world, async_op=True)
        digest, seconds = work.product()
        pending.wait()
        walked, problem = work.walk()
        if not bool((flow == rt.world_size * (rt.world_size + 1) // 2).all()):
            problem = "a sum during the products is wrong"
        if rt.world_size > 1:
            sums = many_sums(rt, o.calls, "collectives")
        if " and then " in digest:
            problem = f"a product's bits changed: {digest}"
        now = Round(number, 0.0, digest, seconds, walked, *_of_gpu(source, rt), problem)
        now.seconds = time.monotonic() - start
        rounds.append(now)
        everyone = comm.everyones(now, rt.world)
        if rt.rank == 0 and o.state:
            with o.state.open("a") as file:
                file.write(json.dumps(asdict(now)) + "\n")
        number += 1
        first = done[0].digest if done else rounds[0].digest
        bad = [f"rank {r}: {x.problem}" for r, x in enumerate(everyone) if x.problem]
        if now.digest != first and not now.problem:
            bad.append(f"rank {rt.rank}: {now.digest} in round {number}, {first} in the first one")
        told = [text for of_rank in comm.everyones(bad, rt.world) for text in of_rank]
        over = time.monotonic() > ended
        if comm.everyones(over, rt.world)[0] or told or sums.status == "fail":
            break
    lines.append(
        of(
            not told,
            "bits and memory",
            "; ".join(dict.fromkeys(told)) or f"right in {number} round(s)",
            "take the GPU out",
        )
    )
    lines.append(sums if rt.world_size > 1 else skipped("collectives", "one rank sends nothing"))
    lines += between_ranks(rt, rounds, work.n)
    lines += watched(before, read_host(Source()), rounds)
    minutes = sum(r.seconds for r in (*done, *rounds)) / 60
    lines.append(passed("time", f"{minutes:.1f} of {o.minutes:g} minutes, {len(done)} round(s) from before"))
    return lines


def _of_gpu(source: Source, rt: Runtime) -> tuple[int | None, int | None, float | None]:
    """Return temperature, clock and watts of the rank's GPU, now."""
    if rt.device.type != "cuda":
        return None, None, None
    source.again()
    i = rt.device.index or 0
    watts = source.nvml("DeviceGetPowerUsage", i)
    return (
        source.nvml("DeviceGetTemperature", i, 0),
        source.nvml("DeviceGetClockInfo", i, 1),
        watts and watts / 1000,
    )


def between_ranks(rt: Runtime, rounds: list[Round], n: int) -> list[Line]:
    """Compare the bits and the speed of the ranks' products."""
    everyone: list[list[Round]] = comm.everyones(rounds, rt.world)
    digests = [of_rank[0].digest for of_rank in everyone]
    usual = Counter(digests).most_common(1)[0][0]
    odd = [f"rank {r}" for r, digest in enumerate(digests) if digest != usual]
    found = f"{', '.join(odd)} differ from the others" if odd else "the same on all ranks"
    cure = "equal GPUs compute equal bits: exchange the cards to see what the fault follows"
    lines = [of(not odd, "bits across ranks", found, cure)]
    times = [median(r.product_seconds for r in of_rank) for of_rank in everyone]
    middle = median_low(times)
    slowest = max(range(len(times)), key=times.__getitem__)
    rate = 2 * n**3 / middle / 1e12
    found = (
        f"rank {slowest} is {times[slowest] / middle - 1:.0%} slower than the median of {rate:.2f} TFLOP/s"
    )
    lines.append(
        of(
            times[slowest] <= 1.15 * middle,
            "slowest rank",
            found,
            "compare clocks and power in monitor",
            "warn",
        )
    )
    falls = [
        f"rank {r} from {first:.3g} to {last:.3g} TFLOP/s"
        for r, of_rank in enumerate(everyone)
        for first, last in [
            (2 * n**3 / of_rank[0].product_seconds / 1e12, 2 * n**3 / of_rank[-1].product_seconds / 1e12)
        ]
        if len(of_rank) > 4 and last < 0.85 * first
    ]
    lines.append(
        of(
            not falls,
            "speed over time",
            "; ".join(falls) or "did not fall",
            "check fans and power limits",
            "warn",
        )
    )
    return lines


def watched(before: Host, after: Host, rounds: list[Round]) -> list[Line]:
    """Compare what the driver and the kernel say before and after."""
    names = ("temperature", "throttling", "ECC errors", "XID errors")
    if not before.gpus:
        return [skipped(name, "this machine has no NVIDIA GPU") for name in names]
    heat = [r.temperature for r in rounds if r.temperature is not None]
    lost = [f"GPU {g.index}" for g in after.gpus if g.lost]
    lines = [
        of(not lost, "GPUs", f"{', '.join(lost)} lost" if lost else "all answer", "power the host off and on")
    ]
    limit = next((g.slowdown_at for g in after.gpus if g.slowdown_at), None)
    hot = bool(heat and limit and max(heat) >= limit)
    found = f"{max(heat)} °C at most, slows down at {limit}" if heat else "not told"
    lines.append(of(not hot, names[0], found, "check fans, air flow and the room"))
    held = [
        f"GPU {g.index}: {reason}"
        for g in after.gpus
        for bit, (reason, status) in THROTTLES.items()
        if status == "fail" and (g.throttle or 0) & bit
    ]
    lines.append(
        of(not held, names[1], "; ".join(held) or "by nothing but load and power cap", "check fans and power")
    )
    more: Callable[[int | None, int | None], int] = lambda a, b: (b or 0) - (a or 0)  # noqa: E731
    ecc = [
        f"GPU {a.index}: {more(a.uncorrected, b.uncorrected)} uncorrected, {more(a.corrected, b.corrected)} corrected"
        for a, b in zip(before.gpus, after.gpus, strict=False)
        if more(a.uncorrected, b.uncorrected) or more(a.corrected, b.corrected)
    ]
    lines.append(of(not ecc, names[2], "; ".join(ecc) or "no new ones", "take the GPU out"))
    if not after.kernel_log:
        return [*lines, skipped(names[3], "dmesg cannot be read: run as root")]
    new = [x for x in after.xids if after.xids.count(x) > before.xids.count(x) and x[1] not in HARMLESS_XIDS]
    shown = "; ".join(
        f"XID {number} ({XIDS.get(number, 'see the catalogue')}) at {at}" for at, number in dict.fromkeys(new)
    )
    return [
        *lines,
        of(not new, names[3], shown or "no new ones", "look the number up in NVIDIA's XID catalogue"),
    ]


def main(rt: Runtime, o: StressOptions) -> bool:
    """Run the stress test, and print it."""
    console(rt).print(f"{o.minutes:g} minutes of full load on {rt.world_size} rank(s), {rt.device.type}")
    return finish(rt, o, "stress", stress(rt, o), f"{rt.world_size} ranks, {rt.backend}, {rt.device.type}")


def start() -> None:
    """Run the command line."""
    start_tool(main, StressOptions)
