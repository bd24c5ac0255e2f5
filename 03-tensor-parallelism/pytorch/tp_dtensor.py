"""The library's tensor parallelism: the same plan in torch.distributed.tensor.parallel, equal numbers, bytes compared.

    ColwiseParallel     q, k, v, up, gate       weight Shard(0), input Replicate, output Shard(-1)
    RowwiseParallel     o, down, embedding      weight Shard(1), of the embedding Shard(0); output Replicate
    loss_parallel       the loss                of logits that are Shard(-1)

A DTensor is a tensor that knows how it lies over a mesh of devices. Each operation looks at the placements of its
inputs and chooses that of its output; where they do not fit, it redistributes, and those are the messages.
tp_megatron.py writes each message down; here they follow from the plan.

    megatron    tensor_parallel of tp_megatron.py
    dtensor     the plan above; the input of attention and MLP becomes a DTensor once, so that q, k and v share one
                all-reduce in the backward pass

Cost: the same messages, by formula and as counted at torch's dispatcher; what differs is the time to find them. A plan
is short and works on any module with linear layers; it has no rule for what is not in it, such as key-value heads that
ranks share.

    python tp_dtensor.py --nproc 4     torchrun --nproc_per_node=4 tp_dtensor.py     mpirun -np 4 python tp_dtensor.py
    mpirun -np 2 --bind-to core python tp_dtensor.py --benchmark --model gpt2-10m --dtype float32 --batch 4
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from tp_megatron import MegatronOptions, check_split
from tp_megatron import make_version as make_megatron
from tp_megatron import step_bytes as megatron_bytes
from tp_training import lesson

from common.comm import Group
from common.errors import UsageError
from common.lesson import run
from common.models.transformer import Transformer
from common.runtime import Runtime
from common.training import Version

VERSIONS = ("megatron", "dtensor")
_parallel_losses = ExitStack()  # the backward pass, too, must run inside; an empty stack enters nothing


def dtensor_parallel(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """The plan, carried out on the model in place. Weights are DTensors on `mesh`, whose axis is tp."""
    into = PrepareModuleInput(input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None))
    into_mlp = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
    plan: dict[str, ParallelStyle] = {
        "attention": into,
        **{f"attention.{name}_proj": ColwiseParallel() for name in "qkv"},
        "attention.o_proj": RowwiseParallel(),
        "mlp": into_mlp,
        "mlp.up_proj": ColwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, {k: v for k, v in plan.items() if _has(layer, k)}, src_data_rank=None)
    ends: dict[str, ParallelStyle] = {"embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    if model.lm_head is not None:
        ends["lm_head"] = ColwiseParallel(use_local_output=False)
    parallelize_module(model, mesh, ends, src_data_rank=None)  # no scatter: all ranks have the model

    def unembed(x_BSD: Tensor, weight_VD: Tensor) -> Tensor:
        return F.linear(DTensor.from_local(x_BSD, mesh, (Replicate(),)), weight_VD)

    def loss(logits_BSV: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        total = F.cross_entropy(logits_BSV.flatten(0, -2), targets_BS.flatten(), reduction="sum")
        assert isinstance(total, DTensor)
        return total.to_local(), (targets_BS != -100).sum()

    _parallel_losses.enter_context(loss_parallel())
    model.unembed, model.loss = unembed, loss
    return model


def _has(module: nn.Module, name: str) -> bool:
    return any(path == name for path, _ in module.named_modules())


@dataclass
class DTensorOptions(MegatronOptions, without=("dropout",)):
    """Model and batch of this lesson."""

    versions: tuple[str, ...] = VERSIONS
    """Which versions to run."""


def make_version(name: str, model: nn.Module, rt: Runtime, o: DTensorOptions) -> Version:
    """Ours or the library's."""
    assert isinstance(model, Transformer)
    if name == "megatron" or rt.world_size == 1:  # a DTensor needs a process group
        return make_megatron("plain", model, rt, o)
    assert rt.world.pg is not None
    dtensor_parallel(model, DeviceMesh.from_group(rt.world.pg, rt.device.type, mesh_dim_names=("tp",)))
    return Version(model, loss=model.loss)


def step_bytes(name: str, model: nn.Module, group: Group, o: DTensorOptions) -> Fraction:
    """Bytes a rank sends in a step: the same."""
    return megatron_bytes("plain", model, group, o)


def main(rt: Runtime, o: DTensorOptions) -> bool:
    """Both on one Transformer; with --benchmark their times alone."""
    check_split(o.model_config(), rt.world_size)
    for what, number in (
        ("key-value heads", o.model_config().kv_heads),
        ("columns of the MLP", o.model_config().mlp_width),
    ):
        if number % rt.world_size:
            raise UsageError(
                f"{number} {what} do not divide over {rt.world_size} ranks, which this plan needs; "
                f"tp_megatron.py does without"
            )
    return lesson(rt, o, VERSIONS, make_version, step_bytes, unseen=("dtensor",))


if __name__ == "__main__":
    run(main, DTensorOptions)
