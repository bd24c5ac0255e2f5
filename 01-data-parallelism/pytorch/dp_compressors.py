"""Compressors of gradients with error feedback: top-k, signs, PowerSGD; for our DataParallel and for torch's DDP.

    x = g + e        message = compress(x)        e = x - decompress(message)        for the optimizer: sum over ranks

The compressed gradient of a parameter does not depend on the bucket in which it is sent.

N numbers of a bucket  K of them that are sent  M bytes  P parameters  A×B a matrix  R rank of its factors
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from common import comm
from common.comm import Group, Pending

from dp_basic import Bucket

Future = torch.futures.Future[Tensor]
Views = dict[int, Tensor]  # by parameter index
Told = Callable[[], tuple[Views, Views]]  # completes the messages; (own decompressed message, sum over ranks)


@dataclass
class Message:
    """Exchange in flight; `wait` completes it."""

    wait: Callable[[], None]


class Compressor(ABC):
    """Exchange of a DataParallel: adds the error memory, compresses, and keeps the new error.

        dp = DataParallel(model, group, exchange=TopK(group, share=0.01))

    The memory is kept per parameter, not per bucket, since buckets are cut anew after the first step. One
    object serves one model.
    """

    def __init__(self, group: Group, feedback: bool = True) -> None:
        self.group, self.feedback = group, feedback
        self.memory: Views = {}
        self.used: Tensor | None = None
        self.flags: Pending | None = None

    @abstractmethod
    def send(self, x: Views) -> Told:
        """Compress x, all of one dtype; return a function that completes the exchange.

        Messages may be started here, or only by the returned function.
        """

    @abstractmethod
    def bytes_of_step(self, parameters: Iterable[Tensor]) -> Fraction:
        """Return the bytes a rank sends for the gradients of these parameters."""

    @torch.no_grad()
    def __call__(self, bucket: Bucket) -> Message:
        """Start the exchange of a bucket. The flags at the end of the last bucket are sent uncompressed."""
        x = {i: g + self.memory[i] if i in self.memory else g.clone() for i, g in bucket.views.items()}
        tail = bucket.flat[sum(g.numel() for g in x.values()) :]
        if tail.numel():
            self.used, self.flags = tail, comm.all_reduce(tail, self.group, async_op=True)
        return Message(partial(self._arrive, bucket, x, self.send(x)))

    @torch.no_grad()
    def _arrive(self, bucket: Bucket, x: Views, told: Told) -> None:
        mine, total = told()
        if self.flags:
            self.flags.wait()
        for i, view in bucket.views.items():
            if self.used is None or self.used[i]:  # else no gradient, and the memory stays
                view.copy_(total[i])
                if self.feedback:
                    self.memory[i] = x[i] - mine[i]


def cut(flat: Tensor, like: Views) -> Views:
    """Return the tensors that lie one after the other in `flat`, with the shapes of those in `like`."""
    pieces = torch.split(flat, [x.numel() for x in like.values()])
    return {i: piece.view(x.shape) for (i, x), piece in zip(like.items(), pieces, strict=True)}


def joined(pieces: Iterable[Tensor]) -> Tensor:
    """Return one flat tensor of all numbers."""
    return torch.cat([piece.flatten() for piece in pieces])


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


def ddp_hook(
    compressor: Compressor, parameters: Sequence[Tensor]
) -> Callable[[object, dist.GradBucket], Future]:
    """Return `compressor` as a communication hook of torch's DDP.

    The hook sums gradients, so losses under DDP must be scaled for a sum, not for a mean.
    """
    number = {p: i for i, p in enumerate(parameters)}

    def hook(state: object, bucket: dist.GradBucket) -> Future:
        views = {number[p]: g for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)}
        compressor(Bucket(bucket.buffer(), views)).wait()
        arrived: Future = torch.futures.Future()
        arrived.set_result(bucket.buffer())
        return arrived

    return hook


def torch_hook(
    group: Group, rank: int, parameters: Sequence[Tensor]
) -> Callable[[object, dist.GradBucket], Future]:
    """Return torch's powerSGD_hook with the settings of our PowerSGD, and with our first Q in its memory."""
    state = PowerSGDState(group.pg, rank, start_powerSGD_iter=2, min_compression_rate=1)
    number, ours = {p: i for i, p in enumerate(parameters)}, PowerSGD(group, rank)

    def hook(_: object, bucket: dist.GradBucket) -> Future:
        index = bucket.index()
        if state.iter >= 2 and index not in state.q_memory_dict:
            by_shape: dict[torch.Size, list[Tensor]] = {}  # torch's order
            for p in bucket.parameters():
                if p.dim() > 1:
                    by_shape.setdefault(p.flatten(1).shape, []).append(p)
            matrices = [(number[p], p.flatten(1)) for same in by_shape.values() for p in same]
            q = [ours.start(i, m) for i, m in matrices]
            state.q_memory_dict[index] = joined(q)
            state.p_memory_dict[index] = bucket.buffer().new_empty(
                sum(m.shape[0] * f.shape[1] for (_, m), f in zip(matrices, q, strict=True))
            )
        return powerSGD_hook(state, bucket)

    return hook
