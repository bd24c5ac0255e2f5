"""Train a real model on all ranks, and time its steps: images or tokens per second, scaling, MFU, memory.

    python -m common.machine throughput --model resnet50 --batch-size 64 --iterations 100
    torchrun --nproc_per_node=8 -m common.machine throughput --model gpt2 --strategy fsdp --amp
    python -m common.machine throughput --largest          # the largest batch that fits, each try in its own process

    DDP     every rank has all weights; gradients are averaged while the backward pass runs
    FSDP    every rank has a part of each weight, and gathers a block of them when it computes

Images are synthetic and lie on the device; with --loader threads make them, as those of a data set are.
Efficiency compares the images per second of a rank with those of one rank alone, in the same run.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median, median_low, quantiles
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from common import comm
from common.errors import UsageError
from common.launch.command_line import Count, Within, parse
from common.launch.program import run_program
from common.launch.runtime import Runtime
from common.lesson.measure import peak_memory
from common.machine.cards import IMAGES_PER_SECOND, card_of
from common.machine.largest import find_largest
from common.machine.tool import ToolOptions, finish, ranks_here, say, start_tool
from common.machine.tracker import Tracker
from common.machine.verdict import Line, of, passed, skipped
from common.models.configs import config
from common.models.resnet import BLOCKS, Bottleneck, flops_per_image, resnet
from common.models.transformer import Layer, Transformer, cross_entropy_sum

Name = Literal["resnet50", "resnet101", "resnet152", "gpt2", "gpt2-10m"]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=1e-4),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


@dataclass
class ThroughputOptions(ToolOptions):
    """Options of the throughput benchmark."""

    model: Name = "resnet50"
    """Model to train."""
    batch_size: Count = 64
    """Images, or sequences, per rank."""
    iterations: Annotated[int, Within(2, 10**9)] = 100
    """Steps to time."""
    warm_up: Annotated[int, Within(0, 10**6)] = 5
    """Warm-up steps, which are not timed."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """Parallel strategy."""
    amp: bool = False
    """Compute in 16 bits by autocast: bfloat16 where the device has it, else float16 with scaled gradients."""
    channels_last: bool = False
    """Store images with their channels together, as Tensor cores read them."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Optimizer."""
    image: Annotated[int, Within(64, 4096)] = 224
    """Height and width of an image."""
    sequence: Annotated[int, Within(8, 2**20)] = 1024
    """Tokens of a sequence."""
    loader: Annotated[int, Within(0, 256)] = 0
    """Threads per rank that make images; 0: the same images again and again, on the device."""
    alone: bool = True
    """Time one rank alone first, for the efficiency; not with fsdp, whose model may not fit on one."""
    largest: bool = False
    """Look for the largest batch that fits instead, by bisection."""
    most: Count = 4096
    """Largest batch that --largest tries."""
    tracker: Literal["none", "tensorboard", "swanlab"] = "none"
    """Where the steps are logged to, in results/tracker."""

    @property
    def is_image(self) -> bool:
        """True for a model of images."""
        return self.model in BLOCKS


def made_images(o: ThroughputOptions, number: int) -> tuple[Tensor, Tensor]:
    """Return a batch of random images, made as a data set's are: bytes, then scaled numbers."""
    generator = torch.Generator().manual_seed(number)
    raw = torch.randint(256, (o.batch_size, 3, o.image, o.image), generator=generator, dtype=torch.uint8)
    return (raw.float() - 116) / 58, torch.randint(1000, (o.batch_size,), generator=generator)


def loaded(o: ThroughputOptions, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches that threads make ahead."""
    with ThreadPoolExecutor(o.loader) as pool:
        ahead = deque(pool.submit(made_images, o, number) for number in range(2 * o.loader))
        for number in itertools.count(2 * o.loader):
            x, y = ahead.popleft().result()
            ahead.append(pool.submit(made_images, o, number))
            yield x.to(device), y.to(device)


def batches(o: ThroughputOptions, rt: Runtime, vocabulary: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets without end."""
    if o.is_image and o.loader:
        yield from loaded(o, rt.device)
    if o.is_image:
        x = torch.randn(o.batch_size, 3, o.image, o.image, device=rt.device)
        y = torch.randint(1000, (o.batch_size,), device=rt.device)
    else:
        x = torch.randint(vocabulary, (o.batch_size, o.sequence + 1), device=rt.device)
        x, y = x[:, :-1], x[:, 1:]
    while True:
        yield x, y


def make_model(o: ThroughputOptions, rt: Runtime) -> tuple[nn.Module, float]:
    """Return the model on the rank's device, and the operations of a sample's step."""
    if o.is_image:
        images = resnet(o.model).to(rt.device)
        return images, float(flops_per_image(images, o.image))
    shape = config(o.model)
    if o.sequence > shape.sequence:
        raise UsageError(f"--sequence {o.sequence}: {o.model} has {shape.sequence} positions")
    text = Transformer(shape).to(rt.device)
    return text, float(text.flops_per_token(o.sequence) * o.sequence)


def spread_out(model: nn.Module, o: ThroughputOptions, rt: Runtime, group: comm.Group) -> nn.Module:
    """Return the model under the strategy, on the ranks of the group."""
    if o.channels_last and o.is_image and o.strategy == "ddp":  # FSDP takes no weights in this order
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if group.pg is None:
        return model
    if o.strategy == "ddp":
        ids = [rt.device.index] if rt.device.type == "cuda" else None
        return DistributedDataParallel(model, ids, process_group=group.pg)
    mesh = DeviceMesh.from_group(group.pg, rt.device.type, mesh_dim_names=("dp",))
    for module in model.modules():
        if isinstance(module, (Bottleneck, Layer)):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def steps(
    o: ThroughputOptions, rt: Runtime, group: comm.Group, count: int
) -> tuple[list[float], list[float], float]:
    """Return seconds and loss of each step, on the ranks of the group, and the operations of a sample."""
    plain, flops = make_model(o, rt)
    model = spread_out(plain, o, rt, group)
    optimizer = OPTIMIZERS[o.optimizer](model.parameters())
    vocabulary = plain.config.vocabulary if isinstance(plain, Transformer) else 0
    kind = torch.bfloat16
    if rt.device.type == "cuda" and not torch.cuda.is_bf16_supported():
        kind = torch.float16
    scaler = torch.amp.GradScaler(rt.device.type, enabled=o.amp and kind == torch.float16)
    seconds, losses, start = [], [], time.perf_counter()
    for (x, y), i in zip(batches(o, rt, vocabulary), range(-o.warm_up, count), strict=False):
        if o.channels_last and o.is_image:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(rt.device.type, kind) if o.amp else nullcontext():
            out = model(x)
            loss = F.cross_entropy(out, y) if o.is_image else cross_entropy_sum(out, y)[0] / y.numel()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))  # waits for the device
        end = time.perf_counter()  # a step begins where the one before ends: the loader's time counts
        if i >= 0:
            seconds.append(end - start)
        start = end
    return seconds, losses, flops


@dataclass
class Run:
    """Times of a run: of each step the slowest rank's seconds, and the median of each rank."""

    o: ThroughputOptions
    ranks: int
    seconds: list[float]
    medians: list[float]
    losses: list[float]
    flops: float
    """Operations of a sample's step."""
    alone: float
    """Seconds of a step of one rank alone; 0 if it was not timed."""
    peak: int
    """Bytes of the fullest rank."""
    gpu: str
    """Name of the GPU; empty on a CPU."""

    @property
    def units(self) -> int:
        """Images or tokens of a rank's step."""
        return self.o.batch_size * (1 if self.o.is_image else self.o.sequence)

    @property
    def unit(self) -> str:
        """Name of what is counted, per second."""
        return "images/s" if self.o.is_image else "tokens/s"

    @property
    def speed(self) -> float:
        """Images or tokens per second of all ranks together."""
        return self.ranks * self.units / median(self.seconds)

    @property
    def efficiency(self) -> float:
        """Speed of a rank over that of a rank alone."""
        return self.alone / median(self.seconds)

    @property
    def flop_rate(self) -> float:
        """FLOP/s of a rank."""
        return self.flops * self.o.batch_size / median(self.seconds)


def measured(rt: Runtime, o: ThroughputOptions) -> Run:
    """Time one rank alone, then all. All ranks call it."""
    alone = 0.0
    say(rt, f"{o.iterations} steps of {o.model}")
    if o.alone and o.strategy == "ddp" and rt.world_size > 1:
        if rt.rank == 0:
            alone = median(steps(o, rt, comm.Group.alone(), max(2, min(o.iterations, 10)))[0])
        alone = comm.everyones(alone, rt.world)[0]
        if rt.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
    seconds, losses, flops = steps(o, rt, rt.world, o.iterations)
    of_all = comm.everyones(seconds, rt.world)
    # those of a rank with a loss that is no number, if there is one
    losses = max(comm.everyones(losses, rt.world), key=lambda x: not all(map(math.isfinite, x)))
    slowest = [max(times) for times in zip(*of_all, strict=True)]
    gpu = torch.cuda.get_device_name(rt.device) if rt.device.type == "cuda" else ""
    medians, peak = [median(times) for times in of_all], peak_memory(rt.world)
    return Run(o, rt.world_size, slowest, medians, losses, flops, alone, peak, gpu)


def lines_of(run: Run) -> list[Line]:
    """Return the lines of a run."""
    good = all(math.isfinite(x) and abs(x) < 1e4 for x in run.losses)
    cure = "a GPU computes wrong numbers: run stress"
    each = run.speed / run.ranks
    return [
        passed("speed", f"{run.speed:,.1f} {run.unit} on {run.ranks} rank(s), {each:,.1f} per rank"),
        step_times(run.seconds),
        slow_ranks(run.medians),
        passed(
            "efficiency", f"{run.efficiency:.0%} of {run.units / run.alone:,.1f} {run.unit} of one rank alone"
        )
        if run.alone
        else skipped("efficiency", "one rank alone was not timed"),
        utilisation(run),
        against_table(run),
        passed("peak memory", f"{run.peak / 2**30:.2f} GiB on the fullest rank"),
        of(good, "loss", f"{run.losses[0]:.3f} to {run.losses[-1]:.3f}", cure),
    ]


def peak_flops(run: Run) -> float:
    """Return the FLOP/s that the card can do in the run's type; 0 if it is not known."""
    card = card_of(run.gpu)
    if not card:
        return 0.0
    flags = torch.backends.cudnn if run.o.is_image else torch.backends.cuda.matmul
    in_tf32 = card.tf32 if flags.allow_tf32 else 0.0
    return 1e12 * (card.half if run.o.amp else in_tf32 or card.float32)


def utilisation(run: Run) -> Line:
    """Return the line of model FLOP utilisation."""
    if peak := peak_flops(run):
        return passed("MFU", f"{run.flop_rate / peak:.1%} of {peak / 1e12:.0f} TFLOP/s")
    return skipped(
        "MFU", f"no peak is known for {run.gpu or 'this CPU'}; {run.flop_rate / 1e9:,.0f} GFLOP/s per rank"
    )


def step_times(seconds: list[float]) -> Line:
    """Return the percentiles of a step; a long tail is a warning."""
    cuts = quantiles(seconds, n=100, method="inclusive")
    p50, p90, p99 = (1e3 * cuts[k - 1] for k in (50, 90, 99))
    found = f"median {p50:.1f} ms, 90 % {p90:.1f}, 99 % {p99:.1f}, longest {1e3 * max(seconds):.1f}"
    return of(
        p90 < 2 * p50, "step", found, "another program, or the loader, takes the machine now and then", "warn"
    )


def slow_ranks(medians: list[float]) -> Line:
    """Name a rank whose steps take longer than the others': on GPUs they wait for one another in the backward pass."""
    usual = median_low(medians)
    slow = [f"rank {r}: {1e3 * t:.1f} ms" for r, t in enumerate(medians) if t > 1.2 * usual]
    found = f"{'; '.join(slow)}, median {1e3 * usual:.1f}" if slow else f"all near {1e3 * usual:.1f} ms"
    return of(
        not slow, "ranks", found, "run stress, which compares ranks that do not wait for one another", "warn"
    )


def against_table(run: Run) -> Line:
    """Compare images per second with the reference table, which is of 8 GPUs together and a batch of 64 each."""
    name, card = "images/s against the expected", card_of(run.gpu)
    usual = (run.o.model, run.o.strategy, run.o.batch_size, run.o.image) == ("resnet50", "ddp", 64, 224)
    if card is None or card.name not in IMAGES_PER_SECOND or not usual:
        return skipped(name, "values are known of ResNet-50, ddp, 64 images of 224 per rank, on some GPUs")
    least, most = (x * run.ranks / 8 for x in IMAGES_PER_SECOND[card.name][run.o.amp])
    found = f"{run.speed:,.0f}, expected at least {least:,.0f} to {most:,.0f} of {run.ranks} {card.name}"
    return of(
        run.speed >= least, name, found, "compare clocks and power in monitor; try --channels-last", "warn"
    )


def log_steps(tracker: Tracker, run: Run) -> None:
    """Log the steps to the tracker."""
    for i, (t, loss) in enumerate(zip(run.seconds, run.losses[run.o.warm_up :], strict=True)):
        tracker.log(i, {run.unit: run.ranks * run.units / t, "loss": loss, "seconds": t})
    tracker.end()


def main(rt: Runtime, o: ThroughputOptions) -> bool:
    """Run the benchmark, and print it."""
    # before the run: fails now if the package is not installed
    tracker = Tracker(o.tracker if rt.rank == 0 else "none", f"{o.model} {o.strategy}")
    run = measured(rt, o)
    log_steps(tracker, run)
    what = f"{o.model}, {o.strategy}, batch {o.batch_size} per rank, {'16 bits' if o.amp else 'float32'}"
    facts = {name: getattr(o, name) for name in ("model", "strategy", "amp", "batch_size")} | {
        name: getattr(run, name) for name in ("unit", "speed", "efficiency", "flop_rate", "seconds", "peak")
    }
    return finish(
        rt, o, "throughput", lines_of(run), f"{what}, {rt.world_size} rank(s), {rt.device.type}", **facts
    )


def command_of(o: ThroughputOptions, batch: int) -> list[str]:
    """Return the command of a short run with that batch, which starts its own ranks."""
    given: dict[str, object] = {"batch-size": batch, "iterations": 2, "warm-up": 1}
    given["nproc"] = o.nproc or ranks_here(o.device)
    for name in ("model", "strategy", "optimizer", "image", "sequence", "loader", "device", "backend"):
        given[name] = getattr(o, name)
    flags = [f"--{name.replace('_', '-')}" for name in ("amp", "channels_last") if getattr(o, name)]
    command = [sys.executable, "-m", "common.machine", "throughput", "--no-alone", *flags]
    return command + [word for name, value in given.items() for word in (f"--{name}", str(value))]


def search() -> int:
    """Run --largest."""
    o = parse(ThroughputOptions, __doc__)
    return find_largest(o, o.model, partial(command_of, o), o.most)


def start() -> None:
    """Run the command line."""
    if "--largest" in sys.argv:
        run_program(search)
    start_tool(main, ThroughputOptions)
