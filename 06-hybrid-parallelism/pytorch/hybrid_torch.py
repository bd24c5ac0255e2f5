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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.command_line import Count
from common.launch.runtime import Runtime
from common.lesson.comparison import report
from common.lesson.equality import OPTIMIZERS, follow
from common.lesson.proof import Proof
from common.lesson.runner import DTYPES, console, run
from common.lesson.training import Batches, Version, make_model, training_step
from common.models.transformer import Layer

from hybrid_check import check
from hybrid_explain import title
from hybrid_training import HybridOptions, reference, timed
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


def sharded(model: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh) -> FSDPModule:
    """Apply FSDP2 to every layer, then to the rest; weights stay whole until the backward pass ends."""
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    whole = fully_shard(model, mesh=mesh, reshard_after_forward=False)
    assert isinstance(whole, FSDPModule)
    return whole


def make_torch(rt: Runtime, o: Options, mesh: Mesh) -> Version:
    """Apply torch's tensor, data and pipeline parallelism on one mesh of devices."""
    model, shape = make_model(o, rt.device), (mesh.shape["pp"], mesh.shape["dp"], mesh.shape["tp"])
    devices = init_device_mesh(rt.device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
    if shape[2] > 1:
        dtensor_parallel(model, devices["tp"])

    def wrap(stage: nn.Module) -> nn.Module:
        if shape[1] > 1:
            sharded(stage, (m for m in stage.modules() if isinstance(m, Layer)), devices["dp"])
        return stage

    if shape[0] > 1:
        samples = o.batch // shape[1]
        pipe = InTorch("torch-1f1b", model, mesh, rt.device, o, samples // o.micro_batches, wrap)
        return Version(model, run=pipe.run, loss=model.loss, averages=shape[1] > 1)
    wrap(model)
    return Version(model, partial(accumulating, model), loss=model.loss, averages=shape[1] > 1)


@contextmanager
def accumulating(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients inside the block without synchronising them."""
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def refuse(rt: Runtime, o: Options, mesh: Mesh) -> None:
    """Check that torch's parts can run these options. Raises UsageError."""
    check(o.model_config(), mesh, o.layout(), o.batch, o.sequence)
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
    o = replace(o, zero=o.zero or zero)
    if o.benchmark:
        report(rt, o, timed(rt, o, mesh, {f"{title(mesh)}, torch": make_torch(rt, o, mesh)}))
        return True
    # full_tensor, which only the comparison calls, warns that it takes two messages where one would do
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    proof, torchs = Proof(DTYPES[o.dtype]), f"{title(mesh)}, torch"
    dp = mesh.group("dp")
    for optimizer in OPTIMIZERS:
        version = make_torch(rt, o, mesh)
        step = training_step(version, Batches(o, dp, rt.device), dp)
        found = follow(version.model, optimizer, o.steps, step, mesh)
        proof.add(torchs, optimizer, reference(rt, o, optimizer), found, mesh, None, Fraction(0))
    out.print(proof.tables(f"{title(mesh)} of torch, {o.model}, {o.dtype}, {o.steps} steps"))
    records = timed(rt, replace(o, steps=5), mesh, {torchs: make_torch(rt, o, mesh)})
    report(rt, o, proof.recorded(records))
    out.print(proof.sentence())
    return proof.holds


if __name__ == "__main__":
    run(main, Options)
