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

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from common.launch.runtime import Runtime
from common.lesson.job import Job, total
from common.lesson.runner import run
from common.models.transformer import Layer, Transformer

from hybrid_layout import TorchOptions
from hybrid_training import beside_torch
from pp_torch import InTorch
from tp_dtensor import dtensor_parallel


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


def train(job: Job[TorchOptions]) -> Iterator[Tensor]:
    """Train with torch's tensor, data and pipeline parallelism; yield the loss of each global batch."""
    model, mesh, o, axes = job.model, job.mesh, job.options, ("pp", "dp", "tp")
    shape, dp = tuple(mesh.shape[axis] for axis in axes), mesh.group("dp")
    devices = init_device_mesh(job.rt.device.type, shape, mesh_dim_names=axes)
    if o.tp > 1:
        dtensor_parallel(model, devices["tp"])
    wrap = partial(shard, mesh=devices["dp"]) if dp.size > 1 else lambda module: module
    if o.pp > 1:
        forward_backward = InTorch("torch-1f1b", job, wrap).run
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


def main(rt: Runtime, o: TorchOptions) -> bool:
    """Compare torch's version with one device, then time it and ours in turn."""
    return beside_torch(rt, o, train)


if __name__ == "__main__":
    run(main, TorchOptions)
