"""Train a small network on all ranks and compare: does this machine train right?

    python -m common.machine training                        # a rank per GPU, or a few on the CPU
    torchrun --nproc_per_node=8 -m common.machine training

    collectives     many sums with known results
    DDP             parameters equal to those of one process that sees the whole batch, after SGD and AdamW
    gradients       the same bits on every rank, through several epochs; the loss falls
    FSDP            parameters equal to those of one process
    16 bits         the last losses under autocast are within 5 % of float32's
    checkpoint      a run that is saved, read and continued ends with the weights of one that was not stopped
    memory          the peak against the formula: 4 bytes x (weight, gradient, two moments) per parameter
    speed of ranks  each computes the same product: a rank that takes twice the median is named

The comparisons are made in float64, whose rounding is far below a mistake's size.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median_low
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from common import comm
from common.launch.command_line import Count, Within
from common.launch.runtime import Runtime
from common.lesson.measure import in_turn
from common.machine.communication import many_sums
from common.machine.tool import ToolOptions, finish, say, start_tool
from common.machine.verdict import Line, of, skipped

WIDTH, CLASSES, EACH = 48, 10, 16  # inputs of a sample, classes, samples per rank
LIMIT = 1e-11  # relative, float64: sums in another order; a lost sample changes 1e-2


@dataclass
class TrainingOptions(ToolOptions):
    """Options of the training check."""

    epochs: Count = 3
    """Times that the gradients check passes through its data."""
    width: Annotated[int, Within(8, 2**14)] = 128
    """Width of the network's hidden layers."""
    slow: Annotated[float, Within(1.1, 1e3)] = 2.0
    """Times the median that a rank may take for the same work."""
    calls: Annotated[int, Within(0, 10**9)] = 1000
    """Sums with known results."""


def network(width: int, dtype: torch.dtype, device: torch.device) -> nn.Sequential:
    """Return the network with the same first weights on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [
            nn.Linear(WIDTH, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, CLASSES),
        ]
        return nn.Sequential(*layers).to(device, dtype)


def batch(step: int, samples: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and classes of a global batch: each class has its own mean, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    means = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(2**31 - 1))
    classes = torch.randint(CLASSES, (samples,), generator=generator)
    inputs = means[classes] + torch.randn(samples, WIDTH, generator=generator)
    return inputs.to(device, dtype), classes.to(device)


def mine(x: Tensor, rt: Runtime) -> Tensor:
    """Return this rank's samples."""
    return x.chunk(rt.world_size)[rt.rank]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rt: Runtime,
    steps: range,
    whole: bool = False,
    cast: torch.dtype | None = None,
) -> Iterator[Tensor]:
    """Train on each rank's samples, or on the whole batch; yield the losses, before the optimizer's step.

    cast: type of the products, under autocast.
    """
    like = next(model.parameters())
    for step in steps:
        x, y = batch(step, EACH * rt.world_size, like.dtype, rt.device)
        with torch.autocast(rt.device.type, cast) if cast else nullcontext():
            loss = F.cross_entropy(model(x if whole else mine(x, rt)), y if whole else mine(y, rt))
        optimizer.zero_grad()
        loss.backward()
        yield loss.detach()
        optimizer.step()


def weights(model: nn.Module) -> Tensor:
    """Return all parameters, whole, one after another."""
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in found])


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the largest number."""
    return float((a - b).abs().max() / b.abs().max())


def as_ddp(model: nn.Module, rt: Runtime) -> nn.Module:
    """Return the model whose gradients DDP averages."""
    ids = [rt.device.index] if rt.device.type == "cuda" else None
    return DistributedDataParallel(model, ids, process_group=rt.world.pg)


def as_fsdp(model: nn.Module, rt: Runtime) -> nn.Module:
    """Return the model whose parameters FSDP divides."""
    assert rt.world.pg is not None
    mesh = DeviceMesh.from_group(rt.world.pg, rt.device.type, mesh_dim_names=("dp",))
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def equal_to_one_process(
    rt: Runtime, o: TrainingOptions, name: str, wrap: Callable[[nn.Module, Runtime], nn.Module]
) -> Line:
    """Compare parameters after some steps with those of one process."""
    found = {}
    for optimizer, make in OPTIMIZERS.items():
        alone, split = (network(o.width, torch.float64, rt.device) for _ in range(2))
        split_model = wrap(split, rt)
        list(train(alone, make(alone.parameters()), rt, range(4), whole=True))
        list(train(split_model, make(split_model.parameters()), rt, range(4)))
        found[optimizer] = difference(weights(split_model), weights(alone))
    worst = {k: max(comm.everyones(v, rt.world)) for k, v in found.items()}
    shown = ", ".join(f"{v:.0e} after {k}" for k, v in worst.items())
    cure = "run communication: a collective that loses or doubles a rank's part changes the mean"
    return of(all(v <= LIMIT for v in worst.values()), name, f"difference from one process {shown}", cure)


def gradients_alike(rt: Runtime, o: TrainingOptions) -> Line:
    """Compare the gradients' bits across ranks at each step, and name the ranks that differ from the majority."""
    model = network(o.width, torch.float32, rt.device)
    wrapped = as_ddp(model, rt)
    differs, losses = [0] * rt.world_size, []
    for loss in train(wrapped, OPTIMIZERS["SGD"](wrapped.parameters()), rt, range(8 * o.epochs)):
        bits = gradients_of(model).cpu().numpy().tobytes()
        digests = comm.everyones(hashlib.sha256(bits).hexdigest(), rt.world)
        usual = Counter(digests).most_common(1)[0][0]
        differs = [n + (digest != usual) for n, digest in zip(differs, digests, strict=True)]
        total = loss.clone()
        comm.all_reduce(total, rt.world)
        losses.append(float(total) / rt.world_size)
    differ = [
        f"rank {r} differs from the others in {n} of {8 * o.epochs} steps" for r, n in enumerate(differs) if n
    ]
    fell = sum(losses[-4:]) < sum(losses[:4])
    found_text = (
        "; ".join(differ)
        or f"the same bits in {8 * o.epochs} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}"
    )
    cure = "a GPU or its link changes bits: run stress" if differ else "the loss does not fall: run stress"
    return of(not differ and fell, "gradients", found_text, cure)


def gradients_of(model: nn.Module) -> Tensor:
    """Return all gradients, one after another."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def sixteen_bits(rt: Runtime, o: TrainingOptions) -> Line:
    """Compare the last loss under autocast with float32's."""
    kind = (
        torch.float16 if rt.device.type == "cuda" and not torch.cuda.is_bf16_supported() else torch.bfloat16
    )
    last = []
    for cast in (None, kind):
        model = as_ddp(network(o.width, torch.float32, rt.device), rt)
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        losses = [float(x) for x in train(model, optimizer, rt, range(12), cast=cast)]
        last.append(sum(losses[-3:]) / 3)
    good = all(comm.everyones(abs(last[1] - last[0]) <= 0.05 * abs(last[0]), rt.world))
    found = f"loss {last[1]:.3f} in {str(kind).removeprefix('torch.')}, {last[0]:.3f} in float32"
    return of(good, "16 bits", found, "check driver and torch for this GPU")


def checkpoint(rt: Runtime, o: TrainingOptions) -> Line:
    """Compare a run that is saved and continued with one that is not stopped."""
    make = OPTIMIZERS["AdamW"]
    through = network(o.width, torch.float64, rt.device)
    wrapped = as_ddp(through, rt)
    list(train(wrapped, make(wrapped.parameters()), rt, range(6)))

    stopped = as_ddp(network(o.width, torch.float64, rt.device), rt)
    optimizer = make(stopped.parameters())
    list(train(stopped, optimizer, rt, range(3)))
    file = io.BytesIO()
    torch.save({"model": stopped.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, map_location=rt.device, weights_only=True)
    again = as_ddp(network(o.width, torch.float64, rt.device), rt)
    optimizer = make(again.parameters())
    again.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    list(train(again, optimizer, rt, range(3, 6)))
    worst = max(comm.everyones(difference(weights(again), weights(wrapped)), rt.world))
    return of(
        worst <= LIMIT,
        "checkpoint",
        f"difference {worst:.0e} after 3 + 3 of 6 steps",
        "check disk and memory",
    )


def memory(rt: Runtime) -> Line:
    """Compare the peak memory of a training step with the formula, on the rank that is farthest off."""
    name = "memory"
    if rt.device.type != "cuda":
        return skipped(name, "the CPU's allocator does not count")
    wide = 4096
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = network(wide, torch.float32, rt.device)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    list(train(model, optimizer, rt, range(2)))
    formula = 16 * sum(p.numel() for p in model.parameters())
    peaks = comm.everyones(torch.cuda.max_memory_allocated() - before, rt.world)
    peak = max(peaks, key=lambda x: abs(x - formula))
    found = f"{peak / 2**20:.0f} MiB, formula {formula / 2**20:.0f} and activations"
    cure = "compare torch's version with another machine's"
    return of(formula <= peak <= 1.5 * formula, name, found, cure, "warn")


def product(device: torch.device) -> Callable[[], object]:
    """Return the work by which ranks are compared."""
    n = 256 if device.type == "cpu" else 4096
    a = torch.ones(n, n, device=device)
    return lambda: a @ a


def speed_of_ranks(rt: Runtime, o: TrainingOptions) -> Line:
    """Let each rank do the same work while the others wait; name one that takes longer."""
    work = product(rt.device)
    least = []
    for rank in range(rt.world_size):
        found = in_turn({"": work if rank == rt.rank else lambda: None}, 7, rt.world, 2, rt.device.type)
        least.append(min(found[""].seconds))
    usual = median_low(least)
    slow = [
        f"rank {r} takes {t / usual:.1f} times the median" for r, t in enumerate(least) if t > o.slow * usual
    ]
    cure = "compare clocks, temperature and power in monitor; on CPUs look for other programs"
    return of(
        not slow,
        "speed of ranks",
        "; ".join(slow) or f"{1e3 * min(least):.2f} to {1e3 * max(least):.2f} ms",
        cure,
    )


def check_training(rt: Runtime, o: TrainingOptions) -> list[Line]:
    """Return the lines of all stages. All ranks call it."""
    torch.manual_seed(0)
    lines = [many_sums(rt, o.calls, "collectives")] if rt.world_size > 1 else []
    stages: list[Callable[[], Line]] = [
        lambda: equal_to_one_process(rt, o, "DDP", as_ddp),
        lambda: gradients_alike(rt, o),
        lambda: equal_to_one_process(rt, o, "FSDP", as_fsdp),
        lambda: sixteen_bits(rt, o),
        lambda: checkpoint(rt, o),
        lambda: memory(rt),
        lambda: speed_of_ranks(rt, o),
    ]
    if rt.world_size == 1:
        return [skipped("training", "one rank has no gradients to sum; give --nproc 2"), memory(rt)]
    for number, stage in enumerate(stages, 1):
        say(rt, f"stage {number} of {len(stages)}")
        lines.append(stage())
    return lines


def main(rt: Runtime, o: TrainingOptions) -> bool:
    """Run the stages, and print them."""
    return finish(
        rt, o, "training", check_training(rt, o), f"{rt.world_size} ranks, {rt.backend}, {rt.device.type}"
    )


def start() -> None:
    """Run the command line."""
    start_tool(main, TrainingOptions)
