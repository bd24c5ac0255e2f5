"""Simulation of dp_compression.py on one device: a loop over parts of a batch, each with its memory.

Compressors are written as in the papers, on whole tensors: no indices, no packed bits, no buckets, no
messages. The n ranks must give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from common.comm import Group
from common.lesson.training import Batches
from common.models.transformer import cross_entropy_sum

from dp_training import DataParallelOptions

# (i, gradient plus memory of parameter i in each part) -> decompressed message of each part
Compression = Callable[[int, list[Tensor]], list[Tensor]]


def top_k(share: float) -> Compression:
    """Return top-k: each part keeps its ceil(share * numel) largest |x|, the first of equal ones."""

    def largest(x: Tensor) -> Tensor:
        kept = x.abs().flatten().sort(descending=True, stable=True).indices[: -int(-share * x.numel() // 1)]
        return torch.zeros_like(x).flatten().index_copy(0, kept, x.flatten()[kept]).view_as(x)

    return lambda i, parts: [largest(x) for x in parts]


def signs() -> Compression:
    """Return sign compression: mean |x| and signs; 0 counts as positive (arXiv:1901.09847, algorithm 1)."""
    return lambda i, parts: [torch.where(x >= 0, x.abs().mean(), -x.abs().mean()) for x in parts]


def powersgd(rank: int) -> Compression:
    """Return PowerSGD: one power iteration on the sum of the parts (arXiv:1905.13727, algorithm 1).

    Vectors are not compressed.
    """
    q: dict[int, Tensor] = {}

    def project(i: int, parts: list[Tensor]) -> list[Tensor]:
        if parts[0].dim() < 2:
            return parts
        matrices = [x.flatten(1) for x in parts]
        total = torch.stack(matrices).sum(0)
        if i not in q:
            shape, draw = (total.shape[1], min(rank, *total.shape)), torch.Generator().manual_seed(i)
            q[i] = torch.randn(shape, generator=draw, dtype=torch.float64).to(total)
        p = torch.linalg.qr(total @ torch.linalg.qr(q[i]).Q).Q
        q[i] = total.T @ p
        return [(p @ (p.T @ m)).view(x.shape) for m, x in zip(matrices, parts, strict=True)]

    return project


class Simulation:
    """Compression and sum of n parts. Without feedback no error is kept from one step to the next."""

    def __init__(self, compression: Compression, feedback: bool = True) -> None:
        self.compression, self.feedback = compression, feedback
        self.memory: dict[tuple[int, int], Tensor] = {}  # by (part, parameter)

    def exchange(self, gradients: Sequence[Sequence[Tensor | None]], parameters: Sequence[Tensor]) -> None:
        """Store in p.grad the sum of the compressed gradients, or None where no part has a gradient."""
        for i, p in enumerate(parameters):
            p.grad = None
            if all(part[i] is None for part in gradients):
                continue
            given = [torch.zeros_like(p) if g is None else g for g in (part[i] for part in gradients)]
            x = [g + self.memory.get((r, i), torch.zeros_like(p)) for r, g in enumerate(given)]
            sent = self.compression(i, x)
            if self.feedback:
                self.memory |= {(r, i): x[r] - sent[r] for r in range(len(x))}
            p.grad = torch.stack(sent).sum(0)


def simulated_step(
    model: nn.Module, simulation: Simulation, o: DataParallelOptions, parts: int, device: torch.device
) -> Callable[[int], Tensor]:
    """Return the step of common/lesson/training.py for `parts` parts on one device.

    step(t) leaves the summed gradients in p.grad and returns the global loss.
    """
    groups = [Group("part", r, parts, tuple(range(parts))) for r in range(parts)]
    batches = Batches(o, groups[0], device)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step(t: int) -> Tensor:
        micro_batches = []
        for batches.group in groups:  # the text is read once
            micro_batches.append(batches.parts(t))
        targets = sum(int(y.ne(-100).sum()) for part in micro_batches for _, y in part)
        loss, gradients = torch.zeros((), dtype=parameters[0].dtype, device=device), []
        for part in micro_batches:
            for p in parameters:
                p.grad = None
            for tokens_BS, targets_BS in part:
                total, _ = cross_entropy_sum(model(tokens_BS), targets_BS)
                (total / targets).backward()
                loss += total.detach()
            gradients.append([p.grad for p in parameters])
        simulation.exchange(gradients, parameters)
        return loss / targets

    return step
