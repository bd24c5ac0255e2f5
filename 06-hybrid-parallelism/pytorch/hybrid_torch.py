"""The same three dimensions from torch's own parts: DTensor's plan, FSDP2 and torch.distributed.pipelining.

    init_device_mesh((pp, dp, tp))        one mesh; its axes are passed on to the three
    parallelize_module(layer, mesh["tp"]) weights become DTensors over tp
    fully_shard(layer, mesh["dp"])        ... and over dp as well
    PipelineStage, Schedule1F1B           delay FSDP's sums until the last micro-batch

They compose as ours do, since a DTensor also carries its placement; the order of the calls is the same. The
numbers are compared with one device, and the times with ours: with ZeRO-1 if there are several stages, else
with ZeRO-2, which is equivalent to FSDP2 if that keeps weights from the forward to the backward pass.

    python hybrid_torch.py --nproc 4 --pp 2 --dp 2      torchrun --nproc_per_node=4 hybrid_torch.py --dp 2 --tp 2
    mpirun -np 4 python hybrid_torch.py --benchmark --pp 2 --tp 2 --model llama-10m --dtype float32 --sequence 128
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.command_line import Count
from common.launch.runtime import Runtime
from common.lesson.comparison import report
from common.lesson.equality import OPTIMIZERS, watch
from common.lesson.job import Job, total
from common.lesson.proof import Proof
from common.lesson.runner import DTYPES, console, run
from common.lesson.training import make_model
from common.models.transformer import Layer, Transformer

from hybrid_explain import title
from hybrid_layout import HybridOptions
from hybrid_training import benchmark, reference
from pp_torch import InTorch
from tp_dtensor import dtensor_parallel


@dataclass
class Options(
    HybridOptions,
    without=(
        *("ep", "sp", "schedule", "chunks", "attention", "sequence_parallel"),
        *("checkpointing", "precision", "clip", "scaling", "explain"),
    ),
):
    """Options: a dense model on pp, dp and tp."""

    steps: Count = 3
    """Training steps."""
    model: str = "llama-tiny"
    """Name of a model in common/models/configs.py, dense and with an untied head."""


def shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply FSDP2 to every layer, then to the rest; weights stay whole until the backward pass ends."""
    for layer in [m for m in module.modules() if isinstance(m, Layer)]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return module


def accumulate(
    model: Transformer, parts: list[tuple[Tensor, ...]], scale: float, begin: Callable[[int], None]
) -> Tensor:
    """Run forward and backward of one micro-batch after the other; FSDP sums gradients with the last."""
    losses = []
    for i, (tokens_BS, targets_BS) in enumerate(parts):
        begin(i)
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(i == len(parts) - 1)
        loss, _ = model.loss(model(tokens_BS), targets_BS)
        (loss * scale).backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def train(job: Job[Options]) -> Iterator[Tensor]:
    """Train with torch's tensor, data and pipeline parallelism; yield the loss of each global batch."""
    model, mesh, o, device = job.model, job.mesh, job.options, job.rt.device
    shape, dp = (mesh.shape["pp"], mesh.shape["dp"], mesh.shape["tp"]), mesh.group("dp")
    devices = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
    if o.tp > 1:
        dtensor_parallel(model, devices["tp"])
    wrap = partial(shard, mesh=devices["dp"]) if dp.size > 1 else lambda module: module
    if o.pp > 1:
        B = o.batch // dp.size // o.micro_batches
        forward_backward = InTorch("torch-1f1b", model, mesh, device, o, B, wrap).run
    else:
        wrap(model)
        forward_backward = partial(accumulate, model)
    optimizer = job.optimizer(model)
    for batch in job.batches():
        count = batch.count_targets(dp)
        optimizer.zero_grad()
        loss_sum = forward_backward(batch.parts, dp.size / count, batch.begin)  # FSDP averages over dp
        optimizer.step()
        yield total([loss_sum], dp) / count


def refuse(rt: Runtime, o: Options, mesh: Mesh) -> None:
    """Check that torch's parts can run these options. Raises UsageError."""
    c, tp = o.model_config(), mesh.shape["tp"]
    if rt.world_size == 1:
        raise UsageError("torch's parts need a process group: start at least 2 ranks")
    if c.tied or c.experts:
        raise UsageError(
            f"--model {o.model}: give a dense one whose head is not its embedding, such as llama-tiny"
        )
    for what, number in (("key-value heads", c.kv_heads), ("columns of the MLP", c.mlp_width)):
        if number % tp:
            raise UsageError(
                f"{number} {what} do not divide over {tp} ranks along tp, which DTensor's plan needs"
            )
    parts = mesh.shape["dp"] * o.micro_batches
    if o.batch % parts or o.micro_batches < mesh.shape["pp"]:
        raise UsageError(
            f"--batch {o.batch} --micro-batches {o.micro_batches}: torch wants equal micro-batches, at least "
            f"as many as stages; --batch {max(1, o.batch // parts) * parts} "
            f"--micro-batches {max(o.micro_batches, o.pp)} would do"
        )


def main(rt: Runtime, o: Options) -> bool:
    """Compare torch's version with one device, then time it and ours in turn."""
    mesh, out = o.mesh(rt), console(rt)
    refuse(rt, o, mesh)
    zero: Literal[0, 1, 2] = 0 if mesh.shape["dp"] == 1 else 1 if mesh.shape["pp"] > 1 else 2
    o, torchs = replace(o, zero=o.zero or zero), f"{title(mesh)}, torch"
    if o.benchmark:
        report(rt, o, benchmark(rt, o, mesh, {torchs: train}))
        return True
    # full_tensor, which only the comparison calls, warns that it takes two messages where one would do
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    proof = Proof(mesh, DTYPES[o.dtype])
    for optimizer, make in OPTIMIZERS.items():
        job = Job(rt, o, torchs, make_model(o, rt.device), mesh, "dp", make, o.steps)
        found = watch(train(job), job, mesh)
        proof.add(torchs, optimizer, reference(rt, o, optimizer), found, None, Fraction(0))
    out.print(proof.tables(f"{title(mesh)} of torch, {o.model}, {o.dtype}, {o.steps} steps"))
    report(rt, o, proof.recorded(benchmark(rt, replace(o, steps=5), mesh, {torchs: train})))
    out.print(proof.sentence())
    return proof.holds


if __name__ == "__main__":
    run(main, Options)
