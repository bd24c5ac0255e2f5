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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from common import comm
from common.comm.placement import sum_tied_gradients
from common.launch.command_line import Size
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson, prove, time_in_turn
from common.lesson.job import Job
from common.lesson.runner import DTYPES, run

from pp_1f1b import ONE_F_ONE_B
from pp_costs import step_bytes
from pp_gpipe import GPIPE
from pp_interleaved import INTERLEAVED
from pp_interleaved import train as train_ours
from pp_stages import cut_model, evenly
from pp_training import PipelineOptions, check, check_torch
from pp_zero_bubble import ZB_V

THEIRS: dict[str, Any] = {
    "torch-gpipe": schedules.ScheduleGPipe,
    "torch-1f1b": schedules.Schedule1F1B,
    "torch-interleaved": schedules.ScheduleInterleaved1F1B,
    "torch-zb-v": schedules.ScheduleZBVZeroBubble,
}
OURS = {kind.name: kind for kind in (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_V)}
VERSIONS = {name: kind for ours, kind in OURS.items() for name in (ours, f"torch-{ours}")}
"""Kind of schedule of each version."""


@dataclass
class TorchOptions(PipelineOptions, without=("balance", "checkpointing")):
    """Options: model and batch, with equal micro-batches."""

    batch: Size = 16
    """Number of samples in the batch, a multiple of --micro-batches."""


class InTorch:
    """The job's model in our stages, under torch's schedule. wrap: applied to each stage before it is scheduled."""

    def __init__(
        self, name: str, job: Job[Any], wrap: Callable[[nn.Module], nn.Module] = lambda stage: stage
    ) -> None:
        o, mesh, kind, c = job.options, job.mesh, VERSIONS[name], job.model.config
        self.model, self.group, self.scale = job.model, mesh.group("pp"), 1.0
        owner = kind.owner(self.group.size, o.chunks)
        cut = cut_model(job.model, owner, mesh, evenly(c.layers, len(owner)))
        B, S, dtype = o.batch // mesh.shape["dp"] // o.micro_batches, o.sequence, DTYPES[o.dtype]
        with torch.device("meta"):
            tokens_BS = torch.empty(B, S, dtype=torch.long)
            x_BSD = torch.empty(B, S, c.width, dtype=dtype, requires_grad=True)
            logits_BSV = torch.empty(B, S, c.vocabulary, dtype=dtype, requires_grad=True)
        stages = [
            PipelineStage(
                wrap(stage),
                number,
                len(owner),
                job.rt.device,
                input_args=(tokens_BS if stage.first else x_BSD,),
                output_args=(logits_BSV if stage.last else x_BSD,),
                group=self.group.pg,
            )
            for number, stage in cut.items()
        ]
        self.first, self.last = 0 in cut, len(owner) - 1 in cut
        self.schedule = THEIRS[name](
            stages[0] if kind.chunks == 1 else stages, o.micro_batches, self.loss, scale_grads=False
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


def train(job: Job[TorchOptions]) -> Iterator[Tensor]:
    """Train by torch's schedule; yield the loss of each batch."""
    pipe = InTorch(job.version, job)
    optimizer = job.optimizer(job.model)  # this rank's layers; SGD or AdamW: the runner's choice
    for batch in job.batches():  # the same on all ranks
        count = batch.count_targets()
        optimizer.zero_grad()
        loss_sum = pipe.run(batch.parts, 1 / count, batch.begin)  # forward and backward of all micro-batches
        sum_tied_gradients(job.model.parameters())  # which torch does not do
        optimizer.step()
        yield loss_sum / count


LESSON = Lesson(
    "pp",
    {name: train if name in THEIRS else partial(train_ours, kind=kind) for name, kind in VERSIONS.items()},
    step_bytes(VERSIONS),  # torch sends the same
    unseen=tuple(THEIRS),
)


def main(rt: Runtime, o: TorchOptions) -> bool:
    """Prove our schedules and torch's equal to one device, or with --benchmark time them."""
    o = check(rt, o, VERSIONS)
    check_torch(rt, o)
    return (time_in_turn if o.benchmark else prove)(rt, o, LESSON)


if __name__ == "__main__":
    run(main, TorchOptions)
