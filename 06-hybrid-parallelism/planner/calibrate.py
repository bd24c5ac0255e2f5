"""Measure the machine that this runs on, and write a machine file for plan.py.

    python calibrate.py --nproc 4 --out my-machine.toml
    torchrun --nproc_per_node=8 calibrate.py --peak 989e12 --host-bandwidth 400e9 --out my-h100.toml

Start as many ranks as a host has GPUs; on processors, as many as you want to plan for. With gloo the ranks that wait
use no core.

    rank 0 alone       products of several shapes, attention, models of one layer, AdamW, a sum of large tensors
    all ranks at once  a model of one layer: how many ranks the cores can serve
    2, 4, ... ranks    all-reduce, all-gather and reduce-scatter of several sizes

The planner predicts each time of rank 0 as FLOP and bytes divided by rates, and a start for each product. It writes the
rates that fit all measured times best, and prints what they predict. Without --peak the peak is the fastest product's.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import torch
from scipy.optimize import lsq_linear

from common import comm
from common.benchmarks.primitives import PRIMITIVES
from common.comm import Group
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.command_line import Within, check_folder
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.measure import in_turn
from common.lesson.runner import LessonOptions, console, run
from common.models.configs import gpt2

from plan_calibration import Call, Rates, cases, features, fit, model_case
from plan_layout import CODES, Code
from plan_machine import SIZES
from plan_search import divisors

MIB = 2**20


@dataclass
class CalibrateOptions(LessonOptions, without=("steps", "seed", "data", "check", "plot", "json", "dtype")):
    """Options: what to measure, and the values that cannot be measured on one host."""

    timeout: Annotated[float, Within(1e-3, 1e6)] = 600.0
    """Longest time that any wait may last, in seconds; the others wait while rank 0 measures."""
    out: Path | None = None
    """File to write; default: the text goes to the terminal."""
    width: Annotated[int, Within(64, 2**15)] | None = None
    """Width of the models that it times, a multiple of 64; default: 384 on a processor, 4096 on a GPU."""
    tokens: Annotated[int, Within(256, 2**20)] = 2048
    """Tokens of the largest micro-batch, a multiple of 256."""
    repeats: Annotated[int, Within(5, 10**6)] = 7
    """Samples of each time, of which it takes the median."""
    sizes_mb: tuple[Annotated[float, Within(1e-3, 1e5)], ...] = (0.0625, 0.5, 4, 16)
    """Sizes of collectives, in MiB; on GPUs give larger ones, too, such as 0.0625 1 16 256 1024."""
    peak: Annotated[float, Within(1, 1e20)] | None = None
    """FLOP/s by the data sheet; default: of the fastest product here."""
    host_bandwidth: Annotated[float, Within(1, 1e15)] | None = None
    """B/s of all network cards of a host; default: as if each rank had its bandwidth within the host."""
    host_latency: Annotated[float, Within(1e-9, 1)] | None = None
    """Seconds of a message between hosts; default: of one between two ranks of the host."""

    def validate(self) -> None:
        """Check sizes. Raises UsageError."""
        for name, value, of in (("width", self.width or 64, 64), ("tokens", self.tokens, 256)):
            if value % of:
                raise UsageError(
                    f"--{name} {value}: give a multiple of {of}, such as {max(1, value // of) * of}"
                )
        if not self.sizes_mb:
            raise UsageError("--sizes-mb is empty; give sizes in MiB, such as 0.5 4 16")
        if self.out and self.out.suffix != ".toml":
            raise UsageError(f"--out {self.out}: give a file that ends in .toml")
        if self.out:
            check_folder("out", self.out, self.out.absolute().parent)


def width(o: CalibrateOptions, rt: Runtime) -> int:
    """Return the width of the models to time."""
    return o.width or (384 if rt.device.type == "cpu" else 4096)


def often(call: Call, times: int) -> Call:
    """Return a function that makes so many calls."""
    return lambda: [call() for _ in range(times)]


def alone(o: CalibrateOptions, code: Code, rt: Runtime) -> tuple[Rates, list[tuple[str, ...]]]:
    """Time the cases on this rank. Return the rates, and the lines of the table."""
    made, device = cases(width(o, rt), o.tokens, code, rt.device), rt.device.type
    size, times = (
        (64 * MIB, 1) if device == "cpu" else (1024 * MIB, 10)
    )  # a GPU is asked often enough to be busy
    x = torch.zeros(size // SIZES[code.dtype], dtype=getattr(torch, code.dtype), device=rt.device)
    total = torch.zeros_like(x)
    calls = {case.name: case.call for case in made} | {"sum": partial(torch.add, x, x, out=total)}
    timed = {name: often(call, times) for name, call in calls.items()}
    measured = in_turn(timed, o.repeats, Group.alone(), warm_up=2, device=device)
    table, took = (
        [features(case, code) for case in made],
        [measured[case.name].median / times for case in made],
    )
    bandwidth = 2 * size / (measured["sum"].median / times)
    peak = o.peak or max(row[0] / t for row, t in zip(table, took, strict=True))
    rates, predicted = fit(table, took, peak, bandwidth)
    lines: list[tuple[str, ...]] = [
        (
            case.name,
            f"{1e3 * t:.2f}",
            f"{measured[case.name].spread:.0%}",
            f"{1e3 * p:.2f}",
            f"{p / t - 1:+.0%}",
        )
        for case, t, p in zip(made, took, predicted, strict=True)
    ]
    return rates, lines


def at_once(o: CalibrateOptions, code: Code, rt: Runtime) -> float:
    """Return how many ranks the host serves at full rate, from a step on rank 0 alone and on all at once.

    All ranks of the world call it.
    """
    like = {"device": rt.device, "dtype": getattr(torch, code.dtype)}
    D = width(o, rt)
    step = model_case("gpt2", gpt2(1, D, D // 64, sequence=256), o.tokens // 256, 256, like, code)
    step.call()
    ratios = []
    for _ in range(o.repeats):
        times = []
        for busy in (rt.rank == 0, True):
            comm.barrier(rt.world)
            began = time.perf_counter()
            if busy:
                step.call()
            times.append(time.perf_counter() - began)
            comm.barrier(rt.world)
        everyone = comm.everyones(times, rt.world)
        ratios.append(everyone[0][0] / statistics.mean(t[1] for t in everyone))
    return rt.world_size * statistics.median(ratios)


def curve(o: CalibrateOptions, rt: Runtime, n: int, busy: float) -> tuple[float, float]:
    """Return latency in s and bus bandwidth in B/s of an all-reduce of the first n ranks, while the others wait.

    As nccl-tests' PERFORMANCE.md defines them; all-gather and reduce-scatter take half of both, as in a ring. The cores
    serve `busy` ranks at full rate: what more ranks wait for them is taken out, because the planner puts it in. All
    ranks of the world call it.
    """
    group = Mesh(rt.world, dp=rt.world_size // n, tp=n, timeout=rt.timeout).group("tp")
    ring = [p for p in PRIMITIVES if p.name in ("all-reduce", "all-gather", "reduce-scatter")]
    rows, took = [], []
    for size in o.sizes_mb if rt.rank < n else ():
        elements = max(1, int(size * MIB) // 4 // n) * n
        buffer = torch.zeros(elements, device=rt.device)
        calls: dict[str, Call] = {
            p.name: partial(p.run, buffer[: elements // n if p.gathers else elements], group) for p in ring
        }
        measured = in_turn(calls, o.repeats, group, device=rt.device.type)
        for p in ring:
            rows.append((p.passes / 2, float(p.bus_factor(n)) * elements * 4))
            took.append(measured[p.name].median / max(1.0, n / busy))
    comm.barrier(rt.world)
    if not rows:
        return 0.0, 0.0
    relative = np.array(rows) / np.array(took)[:, None]
    found = lsq_linear(relative * [1e-5, 1e-10], np.ones(len(took)), (1e-6, np.inf)).x
    return float(found[0] * 1e-5), float(1e10 / found[1])


def launches(device: torch.device, group: Group) -> tuple[float, float]:
    """Return the host's seconds for an operation and for a collective: 0 on a processor, which computes them itself."""
    if device.type == "cpu":
        return 0.0, 0.0
    x, times = torch.zeros(1, device=device), []
    for call in (partial(x.add_, 1), partial(comm.all_reduce, x, group)):
        often(call, 3)()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(200):
            call()
        times.append((time.perf_counter() - began) / 200)
        torch.cuda.synchronize()
    return times[0], times[1]


def memory(device: torch.device, ranks: int) -> tuple[float, float]:
    """Return the bytes of a rank, and those that no tensor can have."""
    if device.type == "cpu":
        return psutil.virtual_memory().total / ranks, float(psutil.Process().memory_info().rss)
    free, whole = torch.cuda.mem_get_info()
    return float(whole), float(whole - free)


def processor(device: torch.device) -> str:
    """Return the name of a GPU, or the number of cores and the vector instructions of a processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{len(os.sched_getaffinity(0))} cores with {torch.backends.cpu.get_cpu_capability()}"


@dataclass(frozen=True)
class Found:
    """Results of all measurements, in seconds, bytes and B/s."""

    rates: Rates
    memory: tuple[float, float]
    launches: tuple[float, float]
    at_once: float
    curves: Mapping[int, tuple[float, float]]


def text(o: CalibrateOptions, rt: Runtime, code: Code, found: Found) -> str:
    """Return the machine file."""
    rates, curves = found.rates, found.curves
    near, far = curves[min(curves)], curves[max(curves)]
    numbers = {
        "memory": found.memory[0],
        "reserved": found.memory[1],
        "bandwidth": rates.bandwidth,
        "sustained_products": rates.products,
        "sustained_attention": rates.attention,
        "sustained_memory": rates.memory,
        "start": rates.start,
        "launch": found.launches[0],
        "launch_collective": found.launches[1],
        "step": 0.0,
    }
    if math.isfinite(found.at_once):
        numbers["at_once"] = max(1.0, found.at_once)
    links = {
        "host_bandwidth": o.host_bandwidth or far[1] * rt.local_world_size,
        "efficiency": 1.0,
        "latency": o.host_latency or near[0] / 2,
    }
    inside = ", ".join(f"{n} = [{a:.4g}, {b:.4g}]" for n, (a, b) in sorted(curves.items()))
    name = o.out.stem if o.out else "this-machine"
    return "\n".join(
        [
            f"# Measured by calibrate.py on {rt.local_world_size} ranks of a host. Units: bytes, seconds, B/s, FLOP/s.",
            f'name = "{name}"',
            f'source = "calibrate.py on {processor(rt.device)}, torch {torch.__version__}, {rt.backend}"',
            *(f"{key} = {value:.5g}" for key, value in numbers.items()),
            "",
            "[peak]",
            f"{code.dtype} = {rates.peak:.5g}",
            "",
            "[links]  # between hosts: what the options of calibrate.py said, or as within this host",
            f"ranks_per_host = {rt.local_world_size}",
            *(f"{key} = {value:.5g}" for key, value in links.items()),
            f"inside = {{ {inside} }}",
            "",
        ]
    )


def main(rt: Runtime, o: CalibrateOptions) -> bool:
    """Measure, print what the rates give for each measured time, and write the file."""
    o.validate()
    if rt.world_size < 2 or rt.world_size != rt.local_world_size:
        raise UsageError(
            "calibrate.py needs at least 2 ranks, all of them on one host; --nproc 4 starts four"
        )
    if rt.device.type == "cuda" and rt.local_world_size > torch.cuda.device_count():
        raise UsageError(
            f"{rt.local_world_size} ranks share {torch.cuda.device_count()} GPUs: start one for each"
        )
    code = CODES["ours"] if rt.device.type != "cpu" else replace(CODES["ours"], dtype="float32")
    out, held, rates = console(rt), memory(rt.device, rt.local_world_size), None
    if rt.rank == 0:
        rates, lines = alone(o, code, rt)
        heads = ["rank 0 alone", ">ms", ">spread", ">by the rates", ">difference"]
        out.print(make_table("measured, and by the rates that fit best", heads, lines))
    comm.barrier(rt.world)
    busy = at_once(o, code, rt) if rt.device.type == "cpu" else math.inf
    sizes = [n for n in divisors(rt.world_size) if n > 1]
    curves = {n: curve(o, rt, n, busy) for n in sizes}
    host = launches(rt.device, rt.world)
    if rates:
        if busy < 1:
            out.print(
                f"all ranks together computed less than one alone ({busy:.2f}): do other programs run here?"
            )
        made = text(o, rt, code, Found(rates, held, host, busy, curves))
        out.print(made, soft_wrap=True, markup=False)
        if o.out:
            o.out.write_text(made)
            out.print(f"wrote {o.out}: python plan.py --machine {o.out}")
    return True


if __name__ == "__main__":
    run(main, CalibrateOptions)
