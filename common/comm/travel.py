"""Transport of messages: buffers that the backend can carry, work in flight, and the ledger's row.

Ranks that share a GPU talk over gloo, and what lies on the GPU travels through the host's memory. Where gloo's own
algorithm sends more bytes than the operation needs (reduce, reduce-scatter), this module sends the messages itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.comm import ledger
from common.comm.group import Group

T = TypeVar("T")
TREE_TAG = 1 << 30  # no message of a chapter has it

# Call in which this rank is blocked; the watchdog shows it when a run hangs.
blocked_in: dict[str, object] = {}
doing = ""
"""Operation that a call is a part of, as ` of matmul(...)`; shown with the call."""


def _nothing() -> None:
    pass


Posted = dist.Work | list[dist.Work] | None


@dataclass
class Pending:
    """Communication in flight; `wait()` blocks until it is done and adds its row to the ledger.

    sent: bytes that this rank sends; None adds no row.
    """

    op: str
    group: Group
    sent: Fraction | int | None
    finish: Callable[[], object] = _nothing
    peer: str = ""
    works: list[dist.Work] | None = field(default=None, init=False)
    seconds: float = field(default=0.0, init=False)
    call: Callable[[], Posted] | None = field(default=None, init=False)
    """The call in flight: it holds the tensors until they are there."""

    def start(self, call: Callable[[], Posted], async_op: bool = False) -> Pending:
        """Start the communication and, unless async_op, wait for it; one rank has nothing to communicate.

        A call that returns None is done. Where nothing overlaps it, `call` says so to the backend: our MPI transport
        then does not wake its progress thread, which would take the core from the thread that waits.
        """
        if self.group.size > 1:
            self.call, posted = call, self._blocked(call)
            self.works = [posted] if isinstance(posted, dist.Work) else posted or []
        if not async_op:
            self.wait()
        return self

    def wait(self) -> None:
        """Block until done; seconds blocked here are the exposed part of the communication."""
        if self.works is not None:
            self._blocked(self._complete)
            if self.sent is not None:
                ledger.record(self.op, self.group.axis, self.sent, self.seconds)
            self.works = self.call = None
            self.finish = _nothing

    def _complete(self) -> None:
        for work in self.works or ():
            work.wait()
        self.finish()

    def _blocked(self, call: Callable[[], T]) -> T:
        start = time.perf_counter()
        blocked_in.update(op=self.op + self.peer + doing, axis=self.group.axis, since=start)
        result = call()  # where it raises, blocked_in keeps saying where this rank stood
        blocked_in.clear()
        self.seconds += time.perf_counter() - start
        return result


def share(x: Tensor, times: int, group: Group) -> Fraction:
    """Return `times` * (n-1)/n of the bytes of x: one of n ranks' share of a total of times * (n-1) * S."""
    return _share(x.nbytes, times, group.size)


@lru_cache(4096)
def _share(nbytes: int, times: int, n: int) -> Fraction:
    return Fraction(times * (n - 1) * nbytes, n)


def staged_on(x: Tensor, group: Group) -> torch.device | None:
    """Return the device that x must be copied to in order to be sent, None if it need not be.

    NCCL carries the memory of GPUs only; no other backend carries it in every call.
    """
    if group.pg is None or x.is_cuda == (dist.get_backend(group.pg) == "nccl"):
        return None
    return torch.device("cpu" if x.is_cuda else "cuda")


def carried(x: Tensor, group: Group) -> Tensor:
    """Return the send buffer of x: contiguous, because libraries ignore strides; on the device that sends it."""
    device = staged_on(x, group)
    if is_plain(x) and not device:
        return x
    with torch.no_grad():
        x = x.resolve_conj().resolve_neg()
        return x.to(device, copy=True).contiguous() if device else x.contiguous()


def is_plain(x: Tensor) -> bool:
    """Return True if the memory of x holds its numbers in order, without the mark of a conjugate or a sign."""
    return x.is_contiguous() and not x.is_conj() and not x.is_neg()


def into(x: Tensor, y: Tensor) -> Callable[[], object]:
    """Return a callback that copies y into x."""
    if y is x:
        return _nothing

    def copy() -> None:
        with torch.no_grad():
            x.copy_(y)

    return copy


def joined(views: Sequence[Tensor]) -> Tensor | None:
    """Return the views as one flat view, if they lie in memory one behind another without gaps; else None."""
    filled = [x for x in views if x.numel()]
    if not filled:
        return views[0].new_empty(0)
    at = filled[0].data_ptr()
    for x in filled:
        if (
            not x.is_contiguous()
            or x.data_ptr() != at
            or x.untyped_storage().data_ptr() != filled[0].untyped_storage().data_ptr()
        ):
            return None
        at += x.nbytes
    return filled[0].as_strided((sum(x.numel() for x in filled),), (1,))


def in_place(x: Tensor, group: Group) -> tuple[Tensor, Callable[[], object]]:
    """Return a buffer that holds x, to send and receive in, and a callback that copies it into x."""
    y = carried(x, group)
    return y, into(x, y)


def room_for(x: Tensor, group: Group) -> tuple[Tensor, Callable[[], object]]:
    """Return a receive buffer for x, and a callback that copies it into x."""
    y, device = x, staged_on(x, group)
    if device or not is_plain(x):
        y = torch.empty(x.shape, dtype=x.dtype, device=device or x.device)
    return y, into(x, y)


def adds_itself(group: Group) -> bool:
    """Return True if reduce and reduce-scatter are ours: gloo's send 1.25 to 1.5 times and twice the bytes."""
    return group.pg is not None and dist.get_backend(group.pg) == "gloo"


@torch.no_grad()
def add_along_tree(x: Tensor, group: Group, dst: int) -> list[dist.Work]:
    """Sum x on rank `dst` along a binomial tree: in each round half of the remaining ranks send their sums and leave.

    Counted from `dst`, 6 ranks send 1->0 3->2 5->4, then 2->0, then 4->0: each but the first sends S once.
    Nothing is in flight afterwards.
    """
    n, term = group.size, torch.empty_like(x)
    rank = (group.rank - dst) % n
    for step in (2**k for k in range((n - 1).bit_length())):
        other = group.ranks[((rank ^ step) + dst) % n]
        if rank & step:
            dist.send(x, other, group=group.pg, tag=TREE_TAG)
            break
        if rank + step < n:
            dist.recv(term, other, group=group.pg, tag=TREE_TAG)
            x += term
    return []


def add_up(out: Tensor, terms: Tensor, n: int) -> None:
    """Write the ordered sum of the n pieces of `terms` to `out`; half types are summed in float32, rounded once."""
    with torch.no_grad():
        total, *others = terms.chunk(n)
        total = total.float() if total.dtype in (torch.float16, torch.bfloat16) else total
        for term in others:
            total += term
        out.copy_(total.view_as(out))
