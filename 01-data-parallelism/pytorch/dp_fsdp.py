"""The library's ZeRO: fully_shard (FSDP2) beside DDP and beside the stages of dp_zero.py.

    fully_shard(layer)     each parameter becomes a DTensor, cut on dimension 0: row blocks, one per rank
    forward                all-gather of the layer's parameters, the next layer's meanwhile
    backward               all-gather again (unless kept), then reduce-scatter of the gradients

    dp_zero.py     a rank holds one run of the layer's flat buffer      [....|....]
    FSDP2          a rank holds some rows of every tensor               [..|..][.|.]   tensors keep their shapes

    ddp                DistributedDataParallel: everything on every rank
    zero-redundancy    ddp with ZeroRedundancyOptimizer: whole parameters per rank, then broadcast; stage 1
    fsdp-keep          fully_shard(reshard_after_forward=False): weights stay until backward ends
    fsdp               fully_shard: stage 3

Cost, for G bytes of weights: fsdp sends about 3 M (n-1)/n G bytes in a step of M micro-batches, DDP 2 (n-1)/n
G. The messages of the library's versions are counted by common/comm/listen.py. FSDP is by Zhao et al.
(arXiv:2304.11277); FSDP2 is PyTorch's later design, per parameter.

    python dp_fsdp.py --nproc 4      torchrun --nproc_per_node=4 dp_fsdp.py      mpirun -np 4 python dp_fsdp.py
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from common.comm import Group
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson
from common.lesson.job import Job, one_device, total
from common.lesson.runner import run
from common.models.transformer import cross_entropy_sum

import dp_basic
import dp_zero
from dp_basic import broadcast_model
from dp_costs import LIBRARY, fsdp_start, fsdp_step
from dp_memory import prove_with_memory
from dp_training import DataParallelOptions, check


def shard(model: nn.Module, group: Group, device: str, keep: bool) -> None:
    """Apply FSDP2 to every layer, then to the parameters outside of layers."""
    assert group.pg is not None
    broadcast_model(model, group)  # fully_shard takes each rank's own weights as they are
    mesh = DeviceMesh.from_group(group.pg, device, mesh_dim_names=("dp",))
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def train_redundant(job: Job[DataParallelOptions]) -> Iterator[Tensor]:
    """Train with DDP, and an optimizer that steps on some whole parameters and broadcasts them."""
    make = job.make_optimizer
    if job.group.size > 1:
        job.make_optimizer = lambda tensors: ZeroRedundancyOptimizer(
            tensors,
            lambda mine, **_: make(mine),  # type: ignore[arg-type]
            process_group=job.group.pg,
            parameters_as_bucket_view=True,
        )
    return dp_basic.train_ddp(job)


def train(job: Job[DataParallelOptions]) -> Iterator[Tensor]:
    """Train with FSDP2, which averages gradients over the ranks; yield the loss of each global batch."""
    model, group = job.model, job.group
    if group.size == 1:  # one rank, which shards nothing
        return (yield from one_device(job))
    shard(model, group, job.rt.device.type, keep=job.version == "fsdp-keep")
    optimizer = job.optimizer(model)  # steps on DTensors: this rank's rows
    for batch in job.batches():
        count, losses = batch.count_targets(group), []
        optimizer.zero_grad()
        for tokens_BS, targets_BS in batch:
            loss_sum, _ = cross_entropy_sum(model(tokens_BS), targets_BS)
            loss = loss_sum / count
            (loss * group.size).backward()
            losses.append(loss.detach())
        optimizer.step()
        yield total(losses, group)


THEIRS = {"ddp": dp_basic.train_ddp, "zero-redundancy": train_redundant, "fsdp-keep": train, "fsdp": train}
VERSIONS = THEIRS | dp_zero.VERSIONS
LESSON = Lesson("dp", VERSIONS, fsdp_step, start_bytes=fsdp_start, unseen=LIBRARY)


def main(rt: Runtime, o: DataParallelOptions) -> bool:
    """Prove equality of the versions with one device, or with --benchmark time them."""
    check(rt, tuple(VERSIONS), o)
    return prove_with_memory(rt, dp_zero.even(rt, o), LESSON, peaks=True)


if __name__ == "__main__":
    run(main, DataParallelOptions, versions=(*LIBRARY, "zero2", "zero3"))
