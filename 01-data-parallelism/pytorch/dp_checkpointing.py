"""Activation checkpointing: keep each layer's input, forget the rest, compute it again when backward comes by.

    gradients with checkpointing = gradients without, bit for bit: the same operations on the same numbers

    forward      x0 ─ layer 0 ─ x1 ─ layer 1 ─ x2 ─ loss         kept: x0, x1, x2
    backward     layer 1 again from x1, then its backward        kept for a moment: the inside of one layer
                 layer 0 again from x0, then its backward

Versions, all with the same numbers:
    none        autograd keeps what every operation needs
    by-hand     an autograd function that saves the input and runs the layer again
    library     torch.utils.checkpoint, use_reentrant=False

Cost: one more forward pass of the layers, a third of the step's operations. Communication: none. Memory of GPT-2's
activations, numbers per token and layer: about 16 D without, D with; and once the 16 D of the layer in work.
Chen et al., "Training deep nets with sublinear memory cost" (2016).

    python dp_checkpointing.py --nproc 4          torchrun --nproc_per_node=4 dp_checkpointing.py
    mpirun -np 4 python dp_checkpointing.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from dp_basic import DataParallel
from dp_training import DataParallelOptions, bytes_of_run, bytes_of_step, check
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.comm import Group
from common.comparison import benchmark, prove, report
from common.ledger import show_bytes
from common.lesson import DTYPES, console, run
from common.models.configs import TransformerConfig
from common.models.transformer import Transformer, cross_entropy_sum
from common.runtime import Runtime
from common.training import Batches, Version, make_model
from common.utils.memory import LiveBytes, saved_bytes

VERSIONS = ("none", "by-hand", "library")


@dataclass
class CheckpointOptions(DataParallelOptions):
    """Which versions."""

    versions: tuple[str, ...] = VERSIONS
    """Which versions to run."""


class Again(torch.autograd.Function):
    """forward(x, ...) that saves its inputs alone. The parameters are inputs too, so autograd wants their gradients."""

    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., Tensor], x_BSD: Tensor, positions_S: Tensor, *parameters: Tensor
    ) -> Tensor:
        """Autograd records nothing in here."""
        ctx.forward = forward
        ctx.save_for_backward(x_BSD, positions_S, *parameters)
        return forward(x_BSD, positions_S)

    @staticmethod
    def backward(ctx: Any, *dy_BSD: Tensor) -> tuple[Tensor | None, ...]:
        """The layer once more, this time recorded, and at once back through it."""
        x_BSD, positions_S, *parameters = ctx.saved_tensors
        x_BSD = x_BSD.detach().requires_grad_()
        with torch.enable_grad():
            y_BSD = ctx.forward(x_BSD, positions_S)
        dx_BSD, *gradients = torch.autograd.grad(y_BSD, (x_BSD, *parameters), dy_BSD)
        return None, dx_BSD, None, *gradients


def checkpoint_layers(model: Transformer, version: str = "library") -> None:
    """Let every layer keep its input and compute the rest again. Names and numbers of parameters stay."""
    for layer in model.layers:
        forward, parameters = layer.forward, tuple(layer.parameters())
        if version == "by-hand":
            # forward=... binds this layer's own, not the loop's last
            layer.forward = lambda x, at, forward=forward, own=parameters: Again.apply(forward, x, at, *own)
        elif version == "library":
            layer.forward = partial(checkpoint, forward, use_reentrant=False)


def activation_bytes(c: TransformerConfig, batch: int, sequence: int, size: int, checkpointed: bool) -> int:
    """What autograd keeps of GPT-2's forward pass, `size` bytes a number: a sum over its operations.

    A layer, per token: 8 D (the inputs of norms and projections, q, k, v and the attention's result), 2 F around
    the GELU, H for the softmax's sums, 4 for the norms; checkpointed its input, D. The ends: D into the last norm
    and D out of it, its 2 numbers, V logarithms of probabilities; 8 bytes a token and target and position; the
    sum of weights that the cross-entropy divides by.
    """
    layer = c.width if checkpointed else 8 * c.width + 2 * c.mlp_width + c.heads + 4
    numbers = batch * sequence * (c.layers * layer + 2 * c.width + 2 + c.vocabulary)
    return (numbers + 1) * size + 8 * (2 * batch * sequence + sequence)


def measure(model: Transformer, x_BS: Tensor, y_BS: Tensor) -> tuple[int, int]:
    """Bytes saved for the backward pass; peak of the bytes alive in forward and backward beside p.grad."""

    def loss() -> Tensor:
        return cross_entropy_sum(model(x_BS), y_BS)[0]

    saved = saved_bytes(loss, model)
    loss().backward()  # from now on p.grad exists
    with LiveBytes() as live:
        loss().backward()
    return saved, live.peak


def on_one_device(o: CheckpointOptions) -> tuple[Table, bool]:
    """Every version on the whole batch and on a micro-batch, on the CPU: its bytes; are all gradients the same bits?"""
    c, size, cpu = o.model_config(), DTYPES[o.dtype].itemsize, torch.device("cpu")
    table = Table(
        title=f"bytes of activations: {o.model}, {o.dtype}, {o.batch} samples", title_justify="left"
    )
    for column in ("version", "micro-batches", "saved", "formula", "peak", "gradients"):
        table.add_column(column, justify="left" if column in ("version", "gradients") else "right")
    all_exact = True
    for micro_batches in sorted({1, min(o.micro_batches, o.batch)}):
        batches = Batches(replace(o, micro_batches=micro_batches), Group("one", 0, 1, (0,)), cpu)
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
    """Both exist and no number differs."""
    return a is not None and b is not None and torch.equal(a, b)


def make_version(name: str, model: Transformer, rt: Runtime, o: CheckpointOptions) -> Version:
    """The bucketed data parallelism of dp_basic.py around a model with or without checkpointing."""
    checkpoint_layers(model, name)
    dp = DataParallel(model, rt.world, o.bucket_mb)
    return Version(model, dp.no_sync, dp.finish)


def step_bytes(name: str, model: nn.Module, group: Group, o: DataParallelOptions) -> Fraction:
    """Bytes a rank sends in a step: checkpointing sends nothing."""
    return bytes_of_step(model, group)


def run_bytes(name: str, model: nn.Module, group: Group, o: DataParallelOptions) -> Fraction:
    """Bytes a rank sends in `o.steps` steps, the start included."""
    return bytes_of_run(model, group, o.steps, order=True)


def main(rt: Runtime, o: CheckpointOptions) -> bool:
    """Prove, or with --benchmark time."""
    check(rt, VERSIONS, o)
    if o.benchmark:
        report(rt, o, benchmark(rt, o, make_version, step_bytes, unseen=()))
        return True
    table, exact = on_one_device(o)
    console(rt).print(table)
    console(rt).print(f"checkpointing {'changes no bit of a gradient' if exact else 'CHANGES the gradients'}")
    return prove(rt, o, make_version, run_bytes, step_bytes, unseen=()) and exact


if __name__ == "__main__":
    run(main, CheckpointOptions)
