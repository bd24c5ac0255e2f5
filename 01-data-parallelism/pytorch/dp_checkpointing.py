"""Activation checkpointing: keep only each layer's input, and recompute the rest in the backward pass.

    gradients with checkpointing = gradients without, bit for bit: the same operations on the same numbers

    forward      x0 ─ layer 0 ─ x1 ─ layer 1 ─ x2 ─ loss         kept: x0, x1, x2
    backward     layer 1 again from x1, then its backward        kept for a moment: activations of one layer
                 layer 0 again from x0, then its backward

Versions, all with the same results:
    none        autograd keeps what every operation needs
    by-hand     an autograd function that saves the input and runs the layer again
    library     torch.utils.checkpoint, use_reentrant=False

Cost: one more forward pass of the layers, a third more operations per step. Communication: none. Memory of
GPT-2's activations, in numbers per token and layer: about 16 D without checkpointing, D with it, plus once
the 16 D of the layer that is being recomputed. Chen et al., "Training deep nets with sublinear memory cost"
(2016).

    python dp_checkpointing.py --nproc 4          torchrun --nproc_per_node=4 dp_checkpointing.py
    mpirun -np 4 python dp_checkpointing.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson, prove, time_in_turn
from common.lesson.job import Job, total
from common.lesson.runner import console, run
from common.models.transformer import Transformer, cross_entropy_sum

from dp_basic import DataParallel
from dp_costs import basic_start, basic_step
from dp_memory import activations
from dp_training import DataParallelOptions, check

VERSIONS = ("none", "by-hand", "library")


class Again(torch.autograd.Function):
    """Autograd function that runs forward(x, ...) and saves only its inputs.

    The parameters are inputs too, so that autograd asks for their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., Tensor], x_BSD: Tensor, positions_S: Tensor, *parameters: Tensor
    ) -> Tensor:
        """Return the layer's output. Autograd records nothing inside this method."""
        ctx.forward = forward
        ctx.save_for_backward(x_BSD, positions_S, *parameters)
        return forward(x_BSD, positions_S)

    @staticmethod
    def backward(ctx: Any, *dy_BSD: Tensor) -> tuple[Tensor | None, ...]:
        """Run the layer again, recorded this time, and return the gradients of all inputs."""
        x_BSD, positions_S, *parameters = ctx.saved_tensors
        x_BSD = x_BSD.detach().requires_grad_()
        with torch.enable_grad():
            y_BSD = ctx.forward(x_BSD, positions_S)
        dx_BSD, *gradients = torch.autograd.grad(y_BSD, (x_BSD, *parameters), dy_BSD)
        return None, dx_BSD, None, *gradients


def checkpoint_layers(model: Transformer, version: str = "library") -> None:
    """Checkpoint every layer of the model, in place. Names and values of the parameters stay the same."""
    if version == "by-hand":
        model.run_layer = lambda layer, x, at: Again.apply(layer, x, at, *layer.parameters())
    elif version == "library":
        model.run_layer = partial(checkpoint, use_reentrant=False)


def train(job: Job[DataParallelOptions]) -> Iterator[Tensor]:
    """Train as dp_basic.py does, with the layers checkpointed or not; yield the loss of each global batch."""
    model, group = job.model, job.group
    checkpoint_layers(model, job.version)
    dp = DataParallel(model, group, job.options.bucket_mb)
    optimizer = job.optimizer(model)
    for batch in job.batches():
        count, losses = batch.count_targets(group), []
        optimizer.zero_grad()
        for i, (tokens_BS, targets_BS) in enumerate(batch, 1):
            with dp.no_sync() if i < len(batch) else nullcontext():
                loss_sum, _ = cross_entropy_sum(model(tokens_BS), targets_BS)
                loss = loss_sum / count
                loss.backward()
            losses.append(loss.detach())
        dp.finish()
        optimizer.step()
        yield total(losses, group)


LESSON = Lesson("dp", dict.fromkeys(VERSIONS, train), basic_step, start_bytes=basic_start)


def main(rt: Runtime, o: DataParallelOptions) -> bool:
    """Prove equality of the versions with one device, or with --benchmark time them."""
    check(rt, VERSIONS, o)
    if o.benchmark:
        return time_in_turn(rt, o, LESSON)
    table, exact = activations(o, checkpoint_layers)
    console(rt).print(table)
    console(rt).print(f"checkpointing {'changes no bit of a gradient' if exact else 'CHANGES the gradients'}")
    return prove(rt, o, LESSON) and exact


if __name__ == "__main__":
    run(main, DataParallelOptions, versions=VERSIONS)
