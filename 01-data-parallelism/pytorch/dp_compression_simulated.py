"""Simulation of dp_compression.py on one device: a loop over parts of a batch, each with its memory.

Compressors are written as in the papers, on whole tensors: no indices, no packed bits, no buckets, no
messages. The n ranks must give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from common.data.text import PADDING
from common.lesson.job import Job, total
from common.models.transformer import cross_entropy_sum

from dp_compressor import CompressionOptions, compressor_of
from dp_training import batches_of_ranks

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


def compression(name: str, o: CompressionOptions) -> Compression:
    """Return the compression of a version."""
    if compressor_of(name) == "top-k":
        return top_k(o.k)
    return signs() if compressor_of(name) == "sign" else powersgd(o.rank)


def train(job: Job[CompressionOptions], ranks: int | None = None) -> Iterator[Tensor]:
    """Train on one device, the part of one rank after the other; yield the loss of each global batch.

    ranks: number of parts, if it is not that of the world's ranks.
    """
    simulation = Simulation(compression(job.version, job.options))
    batches = batches_of_ranks(job.options, ranks or job.rt.world_size, job.rt.device)
    parameters = [p for p in job.model.parameters() if p.requires_grad]
    optimizer = job.optimizer(job.model)
    for t in job.numbers():
        parts, gradients, losses = [of_rank.parts(t) for of_rank in batches], [], []
        count = sum(int(y.ne(PADDING).sum()) for part in parts for _, y in part)
        for part in parts:
            optimizer.zero_grad()
            for tokens_BS, targets_BS in part:
                loss_sum, _ = cross_entropy_sum(job.model(tokens_BS), targets_BS)
                loss = loss_sum / count
                loss.backward()
                losses.append(loss.detach())
            gradients.append([p.grad for p in parameters])
        simulation.exchange(gradients, parameters)
        optimizer.step()
        yield total(losses)
