"""Ring attention in zigzag order in three languages: equal to one device, and with equal bytes sent.

    pytorch        sp_ring_attention.py, with torch's kernel for a block
    sp_libtorch    the same in C++ on LibTorch and a c10d process group, one autograd function
    sp_mpi         plain C++ on MPI and BLAS, with its own kernel

Each version gets this rank's pieces of the same q, k, v and of the gradient of o, and returns o, dq, dk and
dv, which are compared with scaled_dot_product_attention on one rank. Two versions within a tolerance of that
reference are within twice the tolerance of each other. On one rank nothing is sent, and the speed-up compares
the kernels with torch's.

    mpirun -np 4 python sp_languages.py
    OMP_NUM_THREADS=1 mpirun -np 2 --bind-to core python sp_languages.py --dtype float32 --shape 8192 8 64
    OMP_NUM_THREADS=1 python sp_languages.py --versions sp_mpi --dtype float32 --shape 8192 8 64 --steps 7

B batch  S sequence  s = S / n, a rank's tokens  H heads  K width of a head
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from common.comm import Group, ledger
from common.launch.command_line import Count, Size
from common.launch.runtime import Runtime
from common.lesson.comparison import check
from common.lesson.languages import check_modules
from common.lesson.runner import run

from sp_attention_benchmark import AttentionCase, attention_benchmark
from sp_costs import ring_bytes
from sp_ring_attention import ring_attention
from sp_split import check_length
from sp_training import SequenceOptions, sp_group

LANGUAGES = {"pytorch": "pytorch", "sp_libtorch": "libtorch", "sp_mpi": "cpp-mpi"}


@dataclass
class LanguageOptions(
    SequenceOptions, without=("model", "batch", "sequence", "micro_batches", "benchmark", "data", "check")
):
    """Options: the shape of the attention."""

    shape: tuple[Size, Size, Size] = (384, 8, 32)
    """Tokens, heads and width of a head."""
    steps: Count = 3
    """Timed rounds."""


def in_libtorch(q: Tensor, k: Tensor, v: Tensor, causal: bool, ranks: Any) -> Tensor:
    """Return this rank's rows of attention by sp_libtorch on `ranks`; record the bytes of both passes."""
    import sp_libtorch

    def count(_: Tensor | None = None) -> None:
        # the module reports bytes times the number of ranks
        sent = sum(n_bytes for _, n_bytes, _ in ranks.take_messages()) // ranks.size
        ledger.record("send", "sp", int(sent), 0.0)

    o = cast(Tensor, sp_libtorch.ring_attention(q, k, v, causal, ranks, "zigzag"))
    count()
    q.register_hook(count)  # dq is there when the backward pass has sent all its messages
    return o


class InMPI(torch.autograd.Function):
    """Attention of a sp_mpi.RingAttention in torch's graph; records the bytes of both passes."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Any) -> Tensor:
        ctx.ring = ring
        # the module keeps references, not copies
        ctx.inputs = [x.detach().contiguous().numpy() for x in (q, k, v)]
        o = torch.from_numpy(ring.forward(*ctx.inputs))
        ledger.record("send", "sp", ring.bytes_sent, 0.0)
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.ring.backward(gradients[0].contiguous().numpy())
        ledger.record("send", "sp", ctx.ring.bytes_sent, 0.0)
        return (*map(torch.from_numpy, found), None)


def attend(name: str, rt: Runtime, o: LanguageOptions, group: Group) -> Callable[..., Tensor]:
    """Return the attention of the language `name`."""
    if name == "pytorch":
        return partial(ring_attention, group=group, order="zigzag", kernel=o.kernel)
    if name == "sp_libtorch":
        import sp_libtorch

        return partial(in_libtorch, ranks=sp_libtorch.Ranks(rt.world.pg))
    from mpi4py import MPI

    import sp_mpi

    S, H, K = o.shape
    ring = sp_mpi.RingAttention(1, H, S, K, comm=MPI.COMM_WORLD if group.size > 1 else None, dtype=o.dtype)
    return lambda q, k, v, causal: cast(Tensor, InMPI.apply(q, k, v, ring))


def main(rt: Runtime, o: LanguageOptions) -> bool:
    """Compare all versions with one device, and time them in turn."""
    check(rt, tuple(LANGUAGES), o)
    check_length(o.shape[0], "zigzag", rt.world_size)
    check_modules(rt, "sp_languages.py", ("sp_mpi", "sp_libtorch"))
    group = sp_group(rt)
    cases = {
        name: AttentionCase(attend(name, rt, o, group), ring_bytes, group, "zigzag", language=LANGUAGES[name])
        for name in o.versions
    }
    return attention_benchmark(rt, o, cases)


if __name__ == "__main__":
    run(main, LanguageOptions, versions=LANGUAGES)
