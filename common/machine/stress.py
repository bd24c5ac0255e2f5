"""Full load for some minutes: products whose every bit is known, memory, collectives, heat, clocks and errors.

    python -m common.machine stress                         # 15 minutes, a rank per GPU
    python -m common.machine stress --minutes 2 --state stress.jsonl

    products      the same product for seconds: its bits must not change, and be the same on all equal GPUs
    memory        addresses, and their complements, are written to most of the free memory, and read
    collectives   a large sum during the products, then many small ones, all with known results
    watch         temperature, clocks, power, throttle reasons, ECC and XID errors between beginning and end

A round has all of them. The run ends at the first wrong bit, and says where. --state keeps a line per round: a run that
was stopped goes on with the minutes that are left, and after one that was over a new one begins.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median, median_high
from typing import Annotated

import psutil
import torch

from common import comm
from common.errors import UsageError
from common.launch.command_line import Within
from common.launch.runtime import Runtime
from common.machine.communication import many_sums
from common.machine.facts import Host, driver_index, read_gpu, read_host
from common.machine.gpu_rules import HARMLESS_XIDS, THROTTLES, XIDS
from common.machine.source import Source
from common.machine.tool import ToolOptions, finish, say, start_tool
from common.machine.verdict import NO_GPU, Line, Status, of, passed, skipped


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

    seconds: float
    digest: str
    product_seconds: float
    walked: int
    temperature: int | None = None
    clock: int | None = None
    power: float | None = None
    throttle: int | None = None
    problem: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, float) or not isinstance(self.product_seconds, float):
            raise ValueError(f"seconds {self.seconds!r}")


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

        self.seconds = 0.2 if cpu else 10.0  # of the products of a round
        self.right = self.a @ self.b
        self.digest = hashlib.sha256(self.right.cpu().numpy().tobytes()).hexdigest()[:16]

    def products(self) -> tuple[float, str]:
        """Multiply for some seconds; return the seconds of a product, and what was wrong."""
        c, took, start = torch.empty_like(self.right), list[float](), time.perf_counter()
        while time.perf_counter() < start + self.seconds or len(took) < 3:
            before = time.perf_counter()
            torch.mm(self.a, self.b, out=c)
            same = torch.equal(c, self.right)  # waits for the device
            took.append(time.perf_counter() - before)
            if not same:
                wrong = int((c != self.right).sum())
                return median(took), f"a product's bits changed: {wrong:,} of {c.numel():,} numbers"
        return median(took), ""

    def walk(self) -> tuple[int, str]:
        """Write each word's address, and its complement, to memory and read them; return the bytes, and what was wrong.

        0 bytes if another program has taken the memory.
        """
        if self.rt.device.type == "cuda":
            free = torch.cuda.mem_get_info()[0]
        else:
            free = psutil.virtual_memory().available // self.rt.world_size
        chunk = torch.arange(2**22, device=self.rt.device)
        try:
            block = torch.empty(
                int(self.share * free) // 8 // len(chunk), len(chunk), dtype=torch.int64, device=chunk.device
            )
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            return 0, ""
        for flip in (0, -1):
            for k, row in enumerate(block):
                torch.bitwise_xor(chunk + k * len(chunk), flip, out=row)
            for k, row in enumerate(block):
                if not torch.equal(row, (chunk + k * len(chunk)) ^ flip):
                    return (
                        block.nbytes,
                        f"memory does not hold what was written, {k * chunk.nbytes:,} bytes from its start",
                    )
        return block.nbytes, ""


def rounds_before(path: Path | None, rt: Runtime, n: int, minutes: float) -> list[list[Round]]:
    """Return the rounds of a run that was stopped, each of all ranks; none, and a new file, if that run was over.

    Raises UsageError if the file is of another kind of run, or damaged.
    """
    if path is None:
        return []
    try:
        path.touch()  # fails now if it cannot be written
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        rounds = [[Round(**each) for each in line["rounds"]] for line in lines]
        runs = {(len(line["rounds"]), line["rows"], line["device"]) for line in lines}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"--state {path}: {error!r}; remove it to begin anew") from None
    if runs - {(rt.world_size, n, rt.device.type)}:
        raise UsageError(f"--state {path} is of a run with other ranks or --size; remove it to begin anew")
    over = sum(r[0].seconds for r in rounds) >= 60 * minutes or any(x.problem for r in rounds for x in r)
    if over:
        path.unlink()
    return [] if over else rounds


def stress(rt: Runtime, o: StressOptions) -> list[Line]:
    """Run rounds until the time is over or something is wrong; return the lines. All ranks call it."""
    source, work = Source(), Work(rt, o)
    before = read_host(source)
    index = driver_index(rt.device, before) if rt.device.type == "cuda" else None
    mine = rounds_before(o.state, rt, work.n, o.minutes) if rt.rank == 0 else []
    rounds: list[list[Round]] = comm.everyones(mine, rt.world)[0]
    earlier, start = len(rounds), time.monotonic()
    left = 60 * o.minutes - sum(r[0].seconds for r in rounds)
    sums = skipped("collectives", "one rank sends nothing")
    while True:
        say(rt, f"round {len(rounds) + 1}, {(time.monotonic() - start) / 60:.1f} of {left / 60:.1f} minutes")
        now = one_round(rt, work, source, index, rounds[0][rt.rank].digest if rounds else "")
        if rt.world_size > 1:
            sums = many_sums(rt, o.calls, "collectives")
        if sums.status == "fail":
            now.problem = now.problem or f"collectives: {sums.found}"
        now.seconds = (time.monotonic() - start) - sum(r[0].seconds for r in rounds[earlier:])
        rounds.append(comm.everyones(now, rt.world))
        if rt.rank == 0 and o.state:
            keep(o.state, rounds[-1], work)
        wrong = any(each.problem for each in rounds[-1])
        if wrong or comm.everyones(time.monotonic() - start >= left, rt.world)[0]:
            break
    told = [f"rank {r}: {each.problem}" for r, each in enumerate(rounds[-1]) if each.problem]
    found = "; ".join(told) or f"right in {len(rounds)} round(s)"
    lines = [of(not told, "bits and memory", found, "exclude or replace the GPU"), sums]
    least = min(each.walked for of_round in rounds for each in of_round)
    cure = "end the programs that hold the memory"
    lines.append(
        of(least > 0, "memory tested", f"{least / 2**30:.2f} GiB on the rank with least", cure, "warn")
    )
    lines += between_ranks(rounds, work.n)
    lines += heat(rounds, before)
    lines += of_every_host(rt, before)
    minutes = sum(r[0].seconds for r in rounds) / 60
    return [*lines, passed("time", f"{minutes:.1f} of {o.minutes:g} minutes, {earlier} round(s) from before")]


def of_every_host(rt: Runtime, before: Host) -> list[Line]:
    """Return the lines of what each host says before and after, with its name if there are several."""
    mine = watched(before, read_host(Source())) if rt.local_rank == 0 else []
    if rt.local_world_size < rt.world_size:
        mine = [replace(line, host=before.name) for line in mine]
    return [line for of_host in comm.everyones(mine, rt.world) for line in of_host]


def one_round(rt: Runtime, work: Work, source: Source, index: int | None, first: str) -> Round:
    """Compute, send and walk through memory.

    index: the driver's number of the GPU; None on a CPU. first: the digest of the first round; empty in that one.
    """
    flow = torch.full((work.n**2,), rt.rank + 1.0, device=rt.device)
    pending = comm.all_reduce(flow, rt.world, async_op=True)
    seconds, problem = work.products()
    now = _of_gpu(source, index)  # while it is hot
    pending.wait()
    walked, lost = work.walk()
    if not bool((flow == rt.world_size * (rt.world_size + 1) // 2).all()):
        problem = problem or "a sum during the products is wrong"
    if first not in ("", work.digest):
        problem = f"a product's bits changed: {work.digest}, in the first round {first}"
    return Round(0.0, work.digest, seconds, walked, *now, problem or lost)


def keep(path: Path, rounds: list[Round], work: Work) -> None:
    """Append a round of all ranks to the state. Raises UsageError if it cannot be written."""
    record = {"rounds": [asdict(each) for each in rounds], "rows": work.n, "device": work.rt.device.type}
    try:
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise UsageError(f"--state {path} cannot be written: {error.strerror}") from None


def _of_gpu(source: Source, index: int | None) -> tuple[int | None, int | None, float | None, int | None]:
    """Return temperature, clock, watts and throttle reasons of the rank's GPU, now."""
    if index is None:
        return None, None, None, None
    source.again()
    gpu = read_gpu(source, index)
    return gpu.temperature, gpu.clock, gpu.power, gpu.throttle


def between_ranks(rounds: list[list[Round]], n: int) -> list[Line]:
    """Compare the bits and the speed of the ranks' products, of n rows."""
    digests = [each.digest for each in rounds[0]]
    usual = Counter(digests).most_common(1)[0][0]
    odd = [f"rank {r}" for r, digest in enumerate(digests) if digest != usual]
    found = f"{', '.join(odd)} differ from the others" if odd else "the same on all ranks"
    cure = "equal GPUs compute equal bits: exchange the cards to see what the fault follows"
    lines = [of(not odd, "bits across ranks", found, cure)]
    rates = [[2e-12 * n**3 / r[k].product_seconds for r in rounds] for k in range(len(digests))]  # TFLOP/s
    middles = [median(of_rank) for of_rank in rates]
    slowest = min(range(len(middles)), key=middles.__getitem__)
    usual_rate = median_high(middles)
    found = f"rank {slowest} with {middles[slowest]:.3g} TFLOP/s, median {usual_rate:.3g}"
    cure = "compare clocks and power in monitor"
    lines.append(of(middles[slowest] >= 0.85 * usual_rate, "slowest rank", found, cure, "warn"))
    if len(rounds) < 8:
        return [*lines, skipped("speed over time", f"{len(rounds)} rounds are too few to see it fall")]
    falls = [
        f"rank {r} from {first:.3g} to {last:.3g} TFLOP/s"
        for r, of_rank in enumerate(rates)
        for first, last in [(median(of_rank[: len(rounds) // 4]), median(of_rank[-(len(rounds) // 4) :]))]
        if last < 0.85 * first
    ]
    found = "; ".join(falls) or "did not fall"
    return [*lines, of(not falls, "speed over time", found, "check fans and power limits", "warn")]


def heat(rounds: list[list[Round]], before: Host) -> list[Line]:
    """Judge temperature and throttle reasons of all ranks under load."""
    hottest = {
        r: max(x.temperature for x in of_rank if x.temperature)
        for r, of_rank in enumerate(zip(*rounds, strict=True))
        if of_rank[0].temperature
    }
    if not hottest:
        return [skipped(name, NO_GPU) for name in ("temperature", "throttling")]
    limit = min((g.slowdown_at for g in before.gpus if g.slowdown_at), default=None)
    worst = max(hottest, key=hottest.__getitem__)
    found = f"rank {worst} with {hottest[worst]} °C at most" + (f", slows down at {limit}" if limit else "")
    held = {
        f"rank {r}: {reason}"
        for of_round in rounds
        for r, each in enumerate(of_round)
        for bit, (reason, status) in THROTTLES.items()
        if status == "fail" and (each.throttle or 0) & bit
    }
    good = "by nothing but load and power cap"
    return [
        of(not limit or hottest[worst] < limit, "temperature", found, "check fans, air flow and the room"),
        of(
            not held, "throttling", "; ".join(sorted(held)) or good, "check fans, air flow and power supplies"
        ),
    ]


def watched(before: Host, after: Host) -> list[Line]:
    """Compare what the driver and the kernel say before and after."""
    if not before.gpus:
        return [skipped(name, NO_GPU) for name in ("GPUs", "ECC errors", "XID errors")]
    lost = [f"GPU {g.index}" for g in after.gpus if g.lost]
    lost += ["some are not listed"] if len(after.gpus) < len(before.gpus) else []
    cure = "power the host off and on"
    lines = [of(not lost, "GPUs", f"{', '.join(lost)} lost" if lost else "all answer", cure)]
    kinds: tuple[tuple[str, str, Status], ...] = (
        ("ECC errors", "uncorrected", "fail"),
        ("corrected ECC errors", "corrected", "warn"),
    )
    for name, kind, otherwise in kinds:
        more = {
            a.index: (getattr(b, kind) or 0) - (getattr(a, kind) or 0)
            for a, b in zip(before.gpus, after.gpus, strict=False)
        }
        new = "; ".join(f"GPU {i}: {count} {kind}" for i, count in more.items() if count > 0)
        cure = "exclude or replace the GPU"
        lines.append(of(not new, name, new or "no new ones", cure, otherwise))
    if not after.kernel_log:
        return [*lines, skipped("XID errors", "dmesg cannot be read: run as root")]
    errors = [x for x in Counter(after.xids) - Counter(before.xids) if x[1] not in HARMLESS_XIDS]
    shown = "; ".join(
        f"XID {number} ({XIDS.get(number, 'see the catalogue')}) at {at}" for at, number in errors
    )
    return [
        *lines,
        of(not shown, "XID errors", shown or "no new ones", "look the number up in NVIDIA's XID catalogue"),
    ]


def main(rt: Runtime, o: StressOptions) -> bool:
    """Run the stress test, and print it."""
    return finish(rt, o, "stress", stress(rt, o), f"{rt.world_size} ranks, {rt.backend}, {rt.device.type}")


def start() -> None:
    """Run the command line."""
    start_tool(main, StressOptions)
