"""Gradient compression: each rank sends an approximate gradient, and adds the error to its next gradient.

    x = g + e        message = compress(x)        e = x - decompress(message)        for the optimizer: sum over ranks

    rank 0    gradient + memory ─ compress ─┐                  ┌─ gradient of the step, the same on all ranks
                         └ left out: memory │    all-gather    │
                                            ├───────or─────────┤
    rank 1    gradient + memory ─ compress ─┘    all-reduce    └─ so the weights stay the same on all ranks
                         └ left out: memory

Without the memory e ("error feedback") small components are never sent; with e they are sent in later steps.
Memory: one more gradient per rank. Bytes a rank sends in a step, for N numbers of b bytes in P
parameters, on n ranks:

    all-reduce   2(n-1)/n b N                 as in dp_basic.py
    top-k        (n-1) k (b + 4)              k numbers and their indices: all-gathers, which grow with n
    powersgd     2(n-1)/n b (r (A+B) + V)     factors A×r, B×r of each A×B matrix; V numbers outside matrices
    sign         (n-1) (N/8 + b P)            1 bit per number, packed, 1 scale per parameter: all-gathers

    python dp_compression.py --nproc 4    torchrun --nproc_per_node=4 dp_compression.py
    mpirun -np 4 python dp_compression.py            with --plot curves.png: the loss of each, with and without memory
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common import comm
from common.comm import Group, share
from common.comm.checked import declare
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson, time_in_turn
from common.lesson.job import Job, total
from common.lesson.runner import console, run
from common.models.transformer import cross_entropy_sum

from dp_basic import DataParallel
from dp_compression_hooks import ddp_hook, torch_hook
from dp_compression_proof import prove_compression
from dp_compressor import VERSIONS, CompressionOptions, Compressor, Told, Views, compressor_of, cut
from dp_costs import basic_start, basic_step
from dp_training import check, joined


def largest(x_N: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest |x|, of equal ones the first. NaN counts as the largest."""
    size_N = x_N.abs().nan_to_num(math.inf, math.inf)
    least = size_N.topk(k).values[-1]
    return torch.cat([(size_N > least).nonzero(), (size_N == least).nonzero()]).flatten()[:k]


class TopK(Compressor):
    """Compressor to the ceil(share * numel) largest |x| per parameter, with indices (arXiv:1809.07599)."""

    def __init__(self, group: Group, share: float, feedback: bool = True) -> None:
        super().__init__(group, feedback)
        self.share = share

    def k(self, x: Tensor) -> int:
        """Return the number of elements of x that are sent."""
        return math.ceil(self.share * x.numel())

    def send(self, x: Views) -> Told:
        """Select the numbers. The returned function sends them.

        An all-gather here would block the backward pass until all ranks have called it.
        """
        flat_N, start, places = joined(x.values()), 0, []
        for tensor in x.values():
            places.append(start + largest(tensor.flatten(), self.k(tensor)))
            start += tensor.numel()
        places_K = torch.cat(places)
        values_K = flat_N[places_K]

        def told() -> tuple[Views, Views]:
            all_places = comm.all_gather(places_K.int(), self.group).long().chunk(self.group.size)
            all_values = comm.all_gather(values_K, self.group).chunk(self.group.size)
            mine_N, total_N = torch.zeros_like(flat_N), torch.zeros_like(flat_N)
            mine_N[places_K] = values_K
            for some_places, some_values in zip(all_places, all_values, strict=True):
                total_N[some_places] += some_values  # indices are distinct within a message
            return cut(mine_N, x), cut(total_N, x)

        return told

    def bytes_of_step(self, parameters: Iterable[Tensor]) -> Fraction:
        """Return the bytes a rank sends: (n-1) k (b + 4)."""
        return Fraction((self.group.size - 1) * sum(self.k(p) * (p.element_size() + 4) for p in parameters))


def pack(bits_N: Tensor) -> Tensor:
    """Return N booleans as ceil(N / 8) bytes, the first in the lowest bit."""
    padded = torch.cat([bits_N, bits_N.new_zeros(-len(bits_N) % 8)]).view(-1, 8).to(torch.uint8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits_N.device)).sum(1, dtype=torch.uint8)


def unpack(bytes_M: Tensor, n: int) -> Tensor:
    """Return the first n booleans that were packed into these bytes."""
    bits = bytes_M[:, None] >> torch.arange(8, dtype=torch.uint8, device=bytes_M.device)
    return (bits & 1).bool().flatten()[:n]


class Sign(Compressor):
    """Compressor to signs, eight per byte, and mean |x| per parameter (arXiv:1901.09847, algorithm 1)."""

    def send(self, x: Views) -> Told:
        """Pack the signs. The returned function sends them, as in TopK."""
        sizes = [tensor.numel() for tensor in x.values()]
        bytes_M = torch.cat([pack(tensor.flatten() >= 0) for tensor in x.values()])
        scales_P = torch.stack([tensor.abs().mean() for tensor in x.values()])

        def read(bytes_M: Tensor, scales_P: Tensor) -> Tensor:
            packed = torch.split(bytes_M, [-(-n // 8) for n in sizes])
            signs_N = torch.cat([unpack(p, n) for p, n in zip(packed, sizes, strict=True)]).to(scales_P.dtype)
            return (2 * signs_N - 1) * scales_P.repeat_interleave(torch.tensor(sizes).to(scales_P.device))

        def told() -> tuple[Views, Views]:
            all_bytes = comm.all_gather(bytes_M, self.group).chunk(self.group.size)
            all_scales = comm.all_gather(scales_P, self.group).chunk(self.group.size)
            total_N = torch.zeros((), dtype=scales_P.dtype, device=scales_P.device)
            for their_bytes, their_scales in zip(all_bytes, all_scales, strict=True):
                total_N = total_N + read(their_bytes, their_scales)
            return cut(read(bytes_M, scales_P), x), cut(total_N, x)

        return told

    def bytes_of_step(self, parameters: Iterable[Tensor]) -> Fraction:
        """Return the bytes a rank sends: (n-1) (N/8 + b P), each parameter's bits rounded up to bytes."""
        return Fraction(
            (self.group.size - 1) * sum(-(-p.numel() // 8) + p.element_size() for p in parameters)
        )


class PowerSGD(Compressor):
    """Compressor to rank-r factors of matrices, one power iteration per step (arXiv:1905.13727, alg. 1, 2).

    M = sum over ranks of x        P = orthogonal(M Q)        Q = Mᵀ P        the step's gradient is P Qᵀ

    Q is kept, and the next step continues the iteration. A tensor of more than two dimensions is reshaped to
    a matrix, the first dimension against all others; vectors are sent whole, with P. Where Q has lost rank,
    its orthogonalisation restores the missing columns.
    """

    q: Views

    def __init__(self, group: Group, rank: int, feedback: bool = True) -> None:
        super().__init__(group, feedback)
        self.rank, self.q = rank, {}

    def start(self, i: int, matrix: Tensor) -> Tensor:
        """Return the first Q of parameter i, [B, r], the same on every rank."""
        shape, draw = (matrix.shape[1], min(self.rank, *matrix.shape)), torch.Generator().manual_seed(i)
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(matrix)

    def send(self, x: Views) -> Told:
        """Start to send P and the vectors. Q needs the sum of P, so the returned function sends Q."""
        matrices = {i: tensor.flatten(1) for i, tensor in x.items() if tensor.dim() > 1}
        whole = {i: tensor for i, tensor in x.items() if tensor.dim() < 2}
        p = {i: m @ orthogonal(self.q.get(i, self.start(i, m))) for i, m in matrices.items()}
        first = joined([*p.values(), *whole.values()])
        pending = comm.all_reduce(first, self.group, async_op=True)

        def told() -> tuple[Views, Views]:
            pending.wait()
            total, mine = cut(first, p | whole), dict(whole)
            basis = {i: orthogonal(total[i]) for i in p}
            q = {i: m.T @ basis[i] for i, m in matrices.items()}
            if q:
                second = joined(q.values())
                comm.all_reduce(second, self.group)
                self.q |= cut(second, q)
            for i in q:
                mine[i] = (basis[i] @ q[i].T).view_as(x[i])
                total[i] = (basis[i] @ self.q[i].T).view_as(x[i])
            return mine, total

        return told

    def bytes_of_step(self, parameters: Iterable[Tensor]) -> Fraction:
        """Return the bytes a rank sends: 2(n-1)/n b (r (A+B) + V)."""
        total = Fraction(0)
        for p in parameters:
            a, b = (p.shape[0], p.numel() // p.shape[0]) if p.dim() > 1 else (0, 0)
            numbers = min(self.rank, a, b) * (a + b) if p.dim() > 1 else p.numel()
            total += Fraction(2 * (self.group.size - 1) * numbers * p.element_size(), self.group.size)
        return total


def orthogonal(x_AR: Tensor) -> Tensor:
    """Return orthonormal columns that span those of x, completed where these are linearly dependent."""
    q_AR: Tensor = torch.linalg.qr(x_AR).Q
    return q_AR


def make_compressor(name: str, group: Group, o: CompressionOptions, feedback: bool = True) -> Compressor:
    """Return the compressor `name`, one of COMPRESSORS."""
    if name == "top-k":
        return TopK(group, o.k, feedback)
    return Sign(group, feedback) if name == "sign" else PowerSGD(group, o.rank, feedback)


def train(job: Job[CompressionOptions], feedback: bool = True) -> Iterator[Tensor]:
    """Train with the version's compressor, or with none; yield the loss of each global batch."""
    model, group, o = job.model, job.group, job.options
    exchange = None if job.version == "bucketed" else make_compressor(job.version, group, o, feedback)
    dp = DataParallel(model, group, o.bucket_mb, exchange)
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


def train_ddp(job: Job[CompressionOptions]) -> Iterator[Tensor]:
    """Train likewise under torch's DDP, with our compressor as its hook, or with torch's PowerSGD."""
    model, group, o = job.model, job.group, job.options
    parameters, theirs = list(model.parameters()), job.version.startswith("torch")
    # torch's hook sends Q from a callback when P has arrived: with several buckets, order differs by rank
    ddp = DistributedDataParallel(model, process_group=group.pg, bucket_cap_mb=1e6 if theirs else o.bucket_mb)
    if theirs:
        ddp.register_comm_hook(None, torch_hook(group, o.rank, parameters, PowerSGD(group, o.rank).start))
        for batch in itertools.islice(job.batches(), 2):  # it compresses from the third backward pass on
            tokens_BS, targets_BS = batch.parts[0]
            cross_entropy_sum(ddp(tokens_BS), targets_BS)[0].backward()
    else:
        compressor = make_compressor(compressor_of(job.version), group, o)
        ddp.register_comm_hook(None, ddp_hook(compressor, parameters))
    optimizer = job.optimizer(model)
    for batch in job.batches():
        count, losses = batch.count_targets(group), []
        optimizer.zero_grad()
        for i, (tokens_BS, targets_BS) in enumerate(batch, 1):
            with ddp.no_sync() if i < len(batch) else nullcontext():
                loss_sum, _ = cross_entropy_sum(ddp(tokens_BS), targets_BS)
                loss = loss_sum / count
                (loss * (group.size if theirs else 1)).backward()  # torch's hook averages
            losses.append(loss.detach())
        for p in parameters:
            declare(cast(Tensor, p.grad), dp="I")  # the sum that DDP has copied here, in C++
        optimizer.step()
        yield total(losses, group)


def step_bytes(name: str, model: nn.Module, group: Group, o: CompressionOptions) -> Fraction:
    """Return the bytes a rank sends in a step: the compressor's in place of the all-reduce of the gradients."""
    basic = basic_step("ddp" if name.startswith(("ddp", "torch")) else name, model, group, o)
    if name == "bucketed":
        return basic
    parameters = list(model.parameters())
    compressed = make_compressor(compressor_of(name), group, o).bytes_of_step(parameters)
    return basic + compressed - sum(share(p, 2, group) for p in parameters)


def start_bytes(name: str, model: nn.Module, group: Group, o: CompressionOptions) -> Fraction:
    """Return the bytes a rank sends before the first step. DDP's broadcast is not counted."""
    return Fraction(0) if name.startswith(("ddp", "torch")) else basic_start(name, model, group, o)


LESSON = Lesson(
    "dp",
    {name: train_ddp if name.startswith(("ddp", "torch")) else train for name in VERSIONS},
    step_bytes,
    start_bytes,
    unseen=("torch-powersgd",),
)


def main(rt: Runtime, o: CompressionOptions) -> bool:
    """Prove equality of the versions with one device, or with --benchmark time them."""
    check(rt, VERSIONS, o)
    # DDP needs a process group; torch's hook waits in a callback, where the one thread of our MPI group is busy
    cannot = ("ddp", "torch") if rt.world_size == 1 else ("torch",) if rt.backend == "mpi" else ()
    kept = tuple(name for name in o.versions if not name.startswith(cannot))
    if kept != o.versions:
        left_out = ", ".join(name for name in o.versions if name not in kept)
        console(rt).print(f"left out on {rt.world_size} ranks with {rt.backend}: {left_out}")
    o = replace(o, versions=kept or ("bucketed",))
    if o.benchmark:
        return time_in_turn(rt, o, LESSON)
    return prove_compression(rt, o, LESSON, make_compressor, partial(train, feedback=False))


if __name__ == "__main__":
    run(main, CompressionOptions)
