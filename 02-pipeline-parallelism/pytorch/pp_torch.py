"""Our stages under torch.distributed.pipelining: its schedules beside ours, equal results, bytes and times.

    stage = PipelineStage(module, number, stages, device, input_args, output_args, group)
    schedule = Schedule1F1B(stage, micro_batches, loss_fn, scale_grads=False)
    schedule.step(tokens_BS, target=targets_BS)

A stage of torch is any module; all activations between stages have one shape, so the batch must divide into
equal micro-batches. With scale_grads=True, the default, torch divides gradients by the number of
micro-batches, for a loss that is a mean. Our loss is a sum divided once by the tokens of the whole batch, so
scale_grads must be False. To split the backward pass, torch walks autograd's graph; we defer the products
(pp_deferred.py).

    python pp_torch.py --nproc 4      torchrun --nproc_per_node=4 pp_torch.py      mpirun -np 4 python pp_torch.py
    mpirun -np 2 --bind-to core python pp_torch.py --benchmark --model gpt2-10m --dtype float32 --batch 8 --sequence 128
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from common import comm
from common.comm import Group
from common.comm.mesh import Mesh
from common.comm.placement import sum_tied_gradients
from common.errors import UsageError
from common.launch.command_line import Size
from common.launch.runtime import Runtime
from common.lesson import comparison
from common.lesson.comparison import Lesson, by_version, prove, time_in_turn
from common.lesson.runner import DTYPES, run
from common.lesson.training import Version
from common.models.transformer import Transformer

from pp_schedule import in_a_line, in_a_v
from pp_stages import Stage, cut_model, evenly
from pp_training import PipelineOptions, check, make_batches
from pp_training import make_version as make_ours
from pp_training import step_bytes as our_step_bytes

THEIRS: dict[str, Any] = {
    "torch-gpipe": schedules.ScheduleGPipe,
    "torch-1f1b": schedules.Schedule1F1B,
    "torch-interleaved": schedules.ScheduleInterleaved1F1B,
    "torch-zb-v": schedules.ScheduleZBVZeroBubble,
}
VERSIONS = (
    "gpipe",
    "torch-gpipe",
    "1f1b",
    "torch-1f1b",
    "interleaved",
    "torch-interleaved",
    "zb-v",
    "torch-zb-v",
)


@dataclass
class TorchOptions(PipelineOptions, without=("balance", "checkpointing")):
    """Options: model and batch, with equal micro-batches."""

    batch: Size = 16
    """Number of samples in the batch, a multiple of --micro-batches."""


class Sizes(Protocol):
    """Options from which a schedule is made."""

    dtype: Any
    sequence: int
    micro_batches: int
    chunks: int


class WithPositions(nn.Module):
    """Stage that makes its positions itself."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage on tokens_BS or x_BSD."""
        y: Tensor = self.stage(x, torch.arange(x.shape[1], device=x.device))
        return y


class InTorch:
    """Our stages under torch's schedule.

    B: samples of a micro-batch. wrap: function applied to each stage before it is scheduled.
    """

    def __init__(
        self,
        name: str,
        model: Transformer,
        mesh: Mesh,
        device: torch.device,
        o: Sizes,
        B: int,
        wrap: Callable[[nn.Module], nn.Module] = lambda stage: stage,
    ) -> None:
        n, several = mesh.shape["pp"], name in ("torch-interleaved", "torch-zb-v")
        owner = in_a_v(n) if name == "torch-zb-v" else in_a_line(n, o.chunks if several else 1)
        cut = cut_model(model, owner, mesh, evenly(len(model.layers), len(owner)))
        self.model, self.group, self.scale, c = model, mesh.group("pp"), 1.0, model.config
        dtype = DTYPES[o.dtype]
        tokens_BS = torch.empty(B, o.sequence, dtype=torch.long, device="meta")
        x_BSD = torch.empty(B, o.sequence, c.width, dtype=dtype, device="meta", requires_grad=True)
        logits_BSV = torch.empty(B, o.sequence, c.vocabulary, dtype=dtype, device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                wrap(WithPositions(stage)),
                number,
                len(owner),
                device,
                input_args=(tokens_BS if stage.first else x_BSD,),
                output_args=(logits_BSV if stage.last else x_BSD,),
                group=self.group.pg,
            )
            for number, stage in cut.items()
        ]
        self.first, self.last = 0 in cut, len(owner) - 1 in cut
        self.schedule = THEIRS[name](
            stages if several else stages[0], o.micro_batches, self.loss, scale_grads=False
        )

    def loss(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        """Return a micro-batch's part of the loss of the whole batch."""
        return self.model.loss(logits_BSV, targets_BS)[0] * self.scale

    def run(self, parts: list[tuple[Tensor, ...]], scale: float, begin: Callable[[int], None]) -> Tensor:
        """Run forward and backward of all micro-batches; return the sum of their losses."""
        self.scale = scale
        tokens_BS, targets_BS = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        losses: list[Tensor] = []
        given = (tokens_BS,) if self.first else ()
        wanted = {"target": targets_BS, "losses": losses} if self.last else {}
        self.schedule.step(*given, **wanted, return_outputs=False)
        total = torch.zeros((), dtype=next(self.model.parameters()).dtype, device=tokens_BS.device)
        total += sum(loss.detach() for loss in losses) / scale
        comm.all_reduce(total, self.group)
        return total

    def finish(self) -> None:
        """Sum the gradients of tied weights, which torch does not do."""
        sum_tied_gradients(self.model.parameters())


def make_version(name: str, model: Transformer, rt: Runtime, o: PipelineOptions) -> Version:
    """Return the version `name`, ours or torch's."""
    if name not in THEIRS:
        return make_ours(name, model, rt, o)
    mesh = Mesh(rt.world, pp=rt.world_size, timeout=rt.timeout)
    theirs = InTorch(name, model, mesh, rt.device, o, o.batch // o.micro_batches)
    return Version(model, run=theirs.run, finish=theirs.finish)


def step_bytes(name: str, model: nn.Module, group: Group, o: PipelineOptions) -> Fraction:
    """Return the bytes this rank sends in a step, the same for our schedule and torch's."""
    return our_step_bytes(name.removeprefix("torch-"), model, group, o)


LESSON = Lesson(
    "pp", dict.fromkeys(VERSIONS, by_version(make_version, make_batches)), step_bytes, unseen=tuple(THEIRS)
)


def main(rt: Runtime, o: TorchOptions) -> bool:
    """Prove our schedules and torch's equal to one device, or with --benchmark time them."""
    o = replace(o, versions=o.versions or VERSIONS)
    comparison.check(rt, VERSIONS, o)
    check(rt, replace(o, versions=tuple(name.removeprefix("torch-") for name in o.versions)))
    if o.batch % o.micro_batches:
        near = max(1, o.batch // o.micro_batches) * o.micro_batches
        raise UsageError(
            f"--batch {o.batch}: torch wants equal micro-batches; {near} divides into {o.micro_batches}"
        )
    M, n = o.micro_batches, rt.world_size
    if n > M or M % (M // n):
        raise UsageError(
            f"--micro-batches {M}: torch wants at least as many as ranks, in groups of one length; "
            f"{max(1, M // n) * n} would do"
        )
    if o.model_config().dropout:
        raise UsageError(f"--model {o.model}: torch's schedules are shown without dropout")
    if rt.world_size == 1:
        raise UsageError("torch.distributed.pipelining needs a process group: start at least 2 ranks")
    return (time_in_turn if o.benchmark else prove)(rt, o, LESSON)


if __name__ == "__main__":
    run(main, TorchOptions)
