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
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.comm import Group
from common.comm.ledger import show_bytes
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson, prove, time_in_turn
from common.lesson.job import Job, total
from common.lesson.runner import DTYPES, console, run
from common.lesson.training import Batches, make_model
from common.models.configs import TransformerConfig
from common.models.transformer import Transformer, cross_entropy_sum
from common.utils.memory import LiveBytes, saved_bytes

from dp_basic import DataParallel
from dp_costs import basic_run, basic_step
from dp_training import DataParallelOptions, check

VERSIONS = ("none", "by-hand", "library")


@dataclass
class CheckpointOptions(DataParallelOptions):
    """Options: the versions to run."""

    versions: tuple[str, ...] = VERSIONS
    """Versions to run."""


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


def activation_bytes(c: TransformerConfig, batch: int, sequence: int, size: int, checkpointed: bool) -> int:
    """Return the bytes that autograd keeps of GPT-2's forward pass, summed over its operations.

    size: bytes per number. Per token a layer keeps 8 D (the inputs of norms and projections, q, k, v and the
    attention's result), 2 F around the GELU, H for the softmax's sums, 4 for the norms; a checkpointed layer
    keeps only its input, D. The ends keep D into the last norm and D out of it, its 2 numbers, V logarithms
    of probabilities; 8 bytes per token and target and position; the sum of weights that the cross-entropy
    divides by.
    """
    layer = c.width if checkpointed else 8 * c.width + 2 * c.mlp_width + c.heads + 4
    numbers = batch * sequence * (c.layers * layer + 2 * c.width + 2 + c.vocabulary)
    return (numbers + 1) * size + 8 * (2 * batch * sequence + sequence)


def measure(model: Transformer, x_BS: Tensor, y_BS: Tensor) -> tuple[int, int]:
    """Return (bytes saved for the backward pass, peak bytes alive in forward and backward besides p.grad)."""

    def loss() -> Tensor:
        return cross_entropy_sum(model(x_BS), y_BS)[0]

    saved = saved_bytes(loss, model)
    loss().backward()  # from now on p.grad exists
    with LiveBytes() as live:
        loss().backward()
    return saved, live.peak


def on_one_device(o: CheckpointOptions) -> tuple[Table, bool]:
    """Run every version on the whole batch and on a micro-batch, on the CPU.

    Return the table of their bytes, and True if all versions have equal gradients.
    """
    c, size, cpu = o.model_config(), DTYPES[o.dtype].itemsize, torch.device("cpu")
    table = Table(
        title=f"bytes of activations: {o.model}, {o.dtype}, {o.batch} samples", title_justify="left"
    )
    for column in ("version", "micro-batches", "saved", "formula", "peak", "gradients"):
        table.add_column(column, justify="left" if column in ("version", "gradients") else "right")
    all_exact = True
    for micro_batches in sorted({1, min(o.micro_batches, o.batch)}):
        batches = Batches(replace(o, micro_batches=micro_batches), Group.alone(), cpu)
        x_BS, y_BS = max(batches.parts(0), key=lambda part: part[0].numel())
        models = {name: make_model(o, cpu) for name in o.versions}
        first = list(models[o.versions[0]].parameters())
        for name, model in models.items():
            checkpoint_layers(model, name)
            saved, peak = measure(model, x_BS, y_BS)
            exact = all(same_bits(p.grad, q.grad) for p, q in zip(first, model.parameters(), strict=True))
            formula = activation_bytes(c, len(x_BS), x_BS.shape[1], size, name != "none")
            known = show_bytes(formula) if o.model.startswith("gpt2") else "-"
            shown = (show_bytes(saved), known, show_bytes(peak), "the same bits" if exact else "DIFFER")
            table.add_row(name, str(micro_batches), *shown)
            all_exact &= exact
    return table, all_exact


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Return True if both tensors exist and all their elements are equal."""
    return a is not None and b is not None and torch.equal(a, b)


def train(job: Job[CheckpointOptions]) -> Iterator[Tensor]:
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


def step_bytes(name: str, model: nn.Module, group: Group, o: CheckpointOptions) -> Fraction:
    """Return the bytes a rank sends in a step; checkpointing sends nothing."""
    return basic_step("bucketed", model, group, o)


def run_bytes(name: str, model: nn.Module, group: Group, o: CheckpointOptions) -> Fraction:
    """Return the bytes a rank sends in `o.steps` steps, including the broadcast at the start."""
    return basic_run("bucketed", model, group, o)


LESSON = Lesson("dp", dict.fromkeys(VERSIONS, train), step_bytes, run_bytes=run_bytes)


def main(rt: Runtime, o: CheckpointOptions) -> bool:
    """Prove equality of the versions with one device, or with --benchmark time them."""
    check(rt, VERSIONS, o)
    if o.benchmark:
        return time_in_turn(rt, o, LESSON)
    table, exact = on_one_device(o)
    console(rt).print(table)
    console(rt).print(f"checkpointing {'changes no bit of a gradient' if exact else 'CHANGES the gradients'}")
    return prove(rt, o, LESSON) and exact


if __name__ == "__main__":
    run(main, CheckpointOptions)
