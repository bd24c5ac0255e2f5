"""PyTorch's tensor parallelism: the plan in torch.distributed.tensor.parallel, results and bytes compared.

    ColwiseParallel     q, k, v, up, gate       weight Shard(0), input Replicate, output Shard(-1)
    RowwiseParallel     o, down, embedding      weight Shard(1), of the embedding Shard(0); output Replicate
    loss_parallel       the loss                of logits that are Shard(-1)

A DTensor is a tensor with a placement on a mesh of devices. Each operation derives the placement of its
output from those of its inputs; inputs whose placements do not fit are redistributed, and these
redistributions are the messages. tp_megatron.py spells out each message; here the messages follow from the
plan.

    megatron    tensor_parallel of tp_megatron.py
    dtensor     the plan above; the input of attention and MLP becomes a DTensor once, so that q, k and v share one
                all-reduce in the backward pass

Cost: the same messages, by formula and as counted at torch's dispatcher; DTensor needs extra time to derive
them. A plan is short and works on any module with linear layers; it has no rule for anything else, such as
key-value heads that several ranks share.

    python tp_dtensor.py --nproc 4     torchrun --nproc_per_node=4 tp_dtensor.py     mpirun -np 4 python tp_dtensor.py
    mpirun -np 2 --bind-to core python tp_dtensor.py --benchmark --model gpt2-10m --dtype float32 --batch 4
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
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

from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson
from common.lesson.job import Job, total
from common.lesson.runner import run
from common.models.transformer import Transformer

import tp_megatron
from tp_costs import megatron_bytes
from tp_megatron import MegatronOptions, check_split
from tp_training import lesson

VERSIONS = ("megatron", "dtensor")
_parallel_losses = ExitStack()  # stays entered, because the backward pass must run inside loss_parallel, too


def dtensor_parallel(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Apply the plan to the model, in place. Weights become DTensors on `mesh`, whose only axis is tp."""
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
        inside = dict(layer.named_modules())  # GPT-2 has no gate_proj
        parallelize_module(layer, mesh, {k: v for k, v in plan.items() if k in inside}, src_data_rank=None)
    ends: dict[str, ParallelStyle] = {"embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    if model.lm_head is not None:
        ends["lm_head"] = ColwiseParallel(use_local_output=False)
    parallelize_module(model, mesh, ends, src_data_rank=None)  # no scatter: all ranks have the model

    def loss(logits_BSV: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        total = F.cross_entropy(logits_BSV.flatten(0, -2), targets_BS.flatten(), reduction="sum")
        assert isinstance(total, DTensor)
        return total.to_local(), (targets_BS != -100).sum()

    model.unembed.register_forward_pre_hook(
        lambda _, given: (DTensor.from_local(given[0], mesh, (Replicate(),)), *given[1:])
    )
    _parallel_losses.enter_context(loss_parallel())
    model.loss = loss
    return model


@dataclass
class DTensorOptions(MegatronOptions, without=("dropout",)):
    """Model and batch of this lesson."""


def train(job: Job[DTensorOptions]) -> Iterator[Tensor]:
    """Train with the library's split; yield the loss of each batch."""
    model, pg = job.model, job.group.pg
    if pg is not None:  # a DTensor needs a process group; one rank has none
        dtensor_parallel(model, DeviceMesh.from_group(pg, job.rt.device.type, mesh_dim_names=("tp",)))
    optimizer = job.optimizer(model)  # SGD or AdamW: the runner's choice
    for batch in job.batches():  # the same on all ranks
        count = batch.count_targets()
        losses = []
        optimizer.zero_grad()
        for tokens_BS, targets_BS in batch:
            loss_sum, _ = model.loss(model(tokens_BS), targets_BS)
            loss = loss_sum / count
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        yield total(losses)


LESSON = Lesson("tp", {"megatron": tp_megatron.train, "dtensor": train}, megatron_bytes, unseen=("dtensor",))


def main(rt: Runtime, o: DTensorOptions) -> bool:
    """Prove both versions on one Transformer; with --benchmark only time them."""
    c, n = o.model_config(), rt.world_size
    check_split(c, n)
    if c.masked_head:
        raise UsageError(f"--model {o.model}: this plan does not split its head; tp_megatron.py does")
    for what, number in (("key-value heads", c.kv_heads), ("columns of the MLP", c.mlp_width)):
        if number % n:
            raise UsageError(
                f"{number} {what} do not divide over {n} ranks, which this plan needs; tp_megatron.py does without"
            )
    return lesson(rt, o, LESSON)


if __name__ == "__main__":
    run(main, DTensorOptions, versions=VERSIONS)
