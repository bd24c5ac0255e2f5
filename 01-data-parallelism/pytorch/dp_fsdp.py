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

Cost, for S bytes of weights: fsdp sends about 3 M (n-1)/n S bytes in a step of M micro-batches, DDP 2 (n-1)/n
S. The messages of the library's versions are counted by common/comm/listen.py. FSDP is by Zhao et al.
(arXiv:2304.11277); FSDP2 is PyTorch's later design, per parameter.

    python dp_fsdp.py --nproc 4      torchrun --nproc_per_node=4 dp_fsdp.py      mpirun -np 4 python dp_fsdp.py
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from common.comm import Group
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson, by_version, prove, time_in_turn
from common.lesson.equality import MakeOptimizer
from common.lesson.runner import console, run
from common.lesson.training import Version

import dp_zero
from dp_basic import broadcast_model
from dp_memory import MemoryTable
from dp_training import DataParallelOptions, check

LIBRARY = ("ddp", "zero-redundancy", "fsdp-keep", "fsdp")
VERSIONS = (*LIBRARY, *dp_zero.VERSIONS)


def shard(model: nn.Module, group: Group, device: str, keep: bool) -> None:
    """Apply FSDP2 to every layer, then to the parameters outside of layers."""
    assert group.pg is not None
    broadcast_model(model, group)  # fully_shard takes each rank's own weights as they are
    mesh = DeviceMesh.from_group(group.pg, device, mesh_dim_names=("dp",))
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keep)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def make_version(name: str, model: nn.Module, rt: Runtime, o: DataParallelOptions) -> Version:
    """Return a version of the library (plain torch on one rank) or of dp_zero.py around `model`."""
    if name not in LIBRARY or rt.world_size == 1:
        return dp_zero.make_version("ddp" if name in LIBRARY else name, model, rt, o)
    if name.startswith("fsdp"):
        shard(model, rt.world, rt.device.type, keep=name == "fsdp-keep")
        return Version(model, averages=True)
    version = dp_zero.make_version("ddp", model, rt, o)
    if name == "zero-redundancy":

        def wrap(make: MakeOptimizer, tensors: list[Tensor]) -> torch.optim.Optimizer:
            def inner(pieces: list[Tensor], **_: object) -> torch.optim.Optimizer:
                return make(pieces)

            return ZeroRedundancyOptimizer(
                tensors,
                inner,  # type: ignore[arg-type]
                process_group=rt.world.pg,
                parameters_as_bucket_view=True,
            )

        version.wrap = wrap
    return version


def fsdp_bytes(model: nn.Module, group: Group, micro_batches: int, keep: bool) -> int:
    """Return the bytes of the tensors that FSDP2 gathers and reduce-scatters in a step.

    Rows are padded to a multiple of n.
    """

    def padded(module: nn.Module) -> int:
        rows = [(len(p), p.numel() // len(p) * p.element_size()) for p in module.parameters()]
        return sum(-(-length // group.size) * group.size * width for length, width in rows)

    layers = sum(padded(layer) for layer in model.layers)  # type: ignore[union-attr, misc]
    return micro_batches * (2 * padded(model) + (0 if keep else layers))


def step_bytes(name: str, model: nn.Module, group: Group, o: DataParallelOptions) -> Fraction:
    """Return the bytes a rank sends in a step."""
    if not name.startswith("fsdp"):
        zero = dp_zero.step_bytes(name if name not in LIBRARY else "ddp", model, group, o)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        return zero + Fraction((group.size - 1) * weights * (name == "zero-redundancy"), group.size)
    loss_and_targets = 2 * (next(model.parameters()).element_size() + 8)
    moved = fsdp_bytes(model, group, o.micro_batches, keep=name == "fsdp-keep")
    return Fraction((group.size - 1) * (moved + loss_and_targets), group.size)


def run_bytes(name: str, model: nn.Module, group: Group, o: DataParallelOptions) -> Fraction:
    """Return the bytes a rank sends in `o.steps` steps: the model, then each step and its gradient norm."""
    if name not in LIBRARY or group.size == 1:
        return dp_zero.run_bytes("ddp" if name in LIBRARY else name, model, group, o)
    start = sum(p.numel() * p.element_size() for p in model.parameters())
    norm = Fraction(2 * (group.size - 1) * 8, group.size)
    return Fraction((group.size - 1) * start, group.size) + o.steps * (
        step_bytes(name, model, group, o) + norm
    )


def main(rt: Runtime, o: DataParallelOptions) -> bool:
    """Prove equality of the versions with one device, or with --benchmark time them."""
    check(rt, VERSIONS, o)
    o = dp_zero.even(rt, o)
    memory = MemoryTable(rt)
    lesson = Lesson(
        "dp",
        dict.fromkeys(VERSIONS, by_version(make_version)),
        step_bytes,
        run_bytes=run_bytes,
        unseen=LIBRARY,
        examine=memory.examine,
    )
    if o.benchmark:
        return time_in_turn(rt, o, lesson)
    holds = prove(rt, o, lesson)
    console(rt).print(memory.table("MB that a rank holds after a step, measured / formula"))
    console(rt).print(memory.peaks(o, make_version))
    return holds and memory.largest <= 0.01


@dataclass
class FsdpOptions(DataParallelOptions):
    """Options of chapter 01, for the library's versions and our own."""

    versions: tuple[str, ...] = (*LIBRARY, "zero2", "zero3")
    """Versions to run."""


if __name__ == "__main__":
    run(main, FsdpOptions)
