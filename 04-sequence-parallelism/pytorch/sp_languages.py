"""Ring attention in zigzag order in three languages: equal to one device, and with equal bytes sent.

    pytorch        sp_ring_attention.py, with torch's kernel for a block
    sp_libtorch    the same in C++ on LibTorch and a c10d process group, one autograd function
    sp_mpi         plain C++ on MPI and BLAS, with its own kernel

Each version gets this rank's pieces of the same q, k, v and of the gradient of o, and returns o, dq, dk and
dv, which are compared with scaled_dot_product_attention on one rank. Two versions within a tolerance of that
reference are within twice the tolerance of each other.

    mpirun -np 4 python sp_languages.py
    OMP_NUM_THREADS=1 mpirun -np 2 --bind-to core python sp_languages.py --dtype float32 --shape 8192 8 64

B batch  S sequence  s = S / n, a rank's tokens  H heads  K width of a head
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from common.comm import Group, ledger
from common.errors import UsageError
from common.launch.command_line import Count, Size
from common.launch.runtime import Runtime
from common.lesson import comparison
from common.lesson.runner import run

from sp_attention_benchmark import AttentionCase, attention_benchmark
from sp_options import SequenceOptions
from sp_ring_attention import ring_attention, work
from sp_split import check_length, places
from sp_training import sp_group

VERSIONS = ("pytorch", "sp_libtorch", "sp_mpi")
LANGUAGES = {"sp_libtorch": "libtorch", "sp_mpi": "cpp-mpi"}


@dataclass
class LanguageOptions(
    SequenceOptions, without=("model", "batch", "sequence", "micro_batches", "benchmark", "data")
):
    """Options: the languages, and the shape of the attention."""

    versions: tuple[str, ...] = VERSIONS
    """Versions to run."""
    shape: tuple[Size, Size, Size] = (384, 8, 32)
    """Tokens, heads and width of a head."""
    steps: Count = 3
    """Timed rounds."""


class Ring(Protocol):
    """Interface to the attention of another language."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, int]:
        """Return (o_BHsK, bytes sent)."""

    def backward(self, do: Tensor) -> tuple[list[Tensor], int]:
        """Return ([dq, dk, dv], bytes sent) for the last forward pass."""


class InLibTorch:
    """Attention of sp_libtorch on the process group of the world."""

    def __init__(self, rt: Runtime) -> None:
        import sp_libtorch

        self.module, self.ranks = sp_libtorch, sp_libtorch.Ranks(rt.world.pg)

    def sent(self) -> int:
        """Return the bytes sent since the last call; the module reports them times the number of ranks."""
        total = sum(n_bytes for _, n_bytes, _ in self.ranks.take_messages())
        return int(total // self.ranks.size)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, int]:
        """Return (o_BHsK, bytes sent)."""
        self.inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            self.o = self.module.ring_attention(*self.inputs, True, self.ranks, "zigzag")
        return self.o.detach(), self.sent()

    def backward(self, do: Tensor) -> tuple[list[Tensor], int]:
        """Return ([dq, dk, dv], bytes sent)."""
        return list(torch.autograd.grad(self.o, self.inputs, do)), self.sent()


class InMPI:
    """Attention of sp_mpi on mpi4py's communicator."""

    def __init__(self, rt: Runtime, o: LanguageOptions) -> None:
        from mpi4py import MPI

        import sp_mpi

        (S, H, K), comm = o.shape, MPI.COMM_WORLD if rt.world_size > 1 else None
        self.ring = sp_mpi.RingAttention(1, H, S, K, comm=comm, dtype=o.dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, int]:
        """Return (o_BHsK, bytes sent)."""
        self.inputs = [
            x.detach().contiguous().numpy() for x in (q, k, v)
        ]  # the module keeps references, not copies
        return torch.from_numpy(self.ring.forward(*self.inputs)), self.ring.bytes_sent

    def backward(self, do: Tensor) -> tuple[list[Tensor], int]:
        """Return ([dq, dk, dv], bytes sent)."""
        found = [torch.from_numpy(x) for x in self.ring.backward(do.contiguous().numpy())]
        return found, self.ring.bytes_sent


class Counted(torch.autograd.Function):
    """Another language's attention in torch's graph; records its bytes in the ledger."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        o, sent = ring.forward(q, k, v)
        ledger.record("send", "sp", sent, 0.0)
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found, sent = ctx.ring.backward(gradients[0])
        ledger.record("send", "sp", sent, 0.0)
        return (*found, None)


def attend(name: str, rt: Runtime, o: LanguageOptions, group: Group) -> Callable[..., Tensor]:
    """Return the attention of the language `name`."""
    if name == "pytorch":
        return partial(ring_attention, group=group, order="zigzag", kernel=o.kernel)
    ring = InLibTorch(rt) if name == "sp_libtorch" else InMPI(rt, o)
    return lambda q, k, v, causal: cast(Tensor, Counted.apply(q, k, v, ring))


def prepare(rt: Runtime, o: LanguageOptions) -> None:
    """Raise UsageError for options that cannot run; limit torch to one thread."""
    comparison.check(rt, VERSIONS, o)
    check_length(o.shape[0], "zigzag", rt.world_size)
    how = f"mpirun -np {rt.world_size} python sp_languages.py"
    if rt.world_size > 1 and rt.launcher not in ("openmpi", "mpich", "slurm"):
        raise UsageError(f"sp_mpi needs MPI between its {rt.world_size} ranks; start them with {how}")
    if rt.device.type != "cpu":
        raise UsageError("sp_mpi computes on CPUs: give --device cpu")
    try:
        import sp_libtorch  # noqa: F401
        import sp_mpi  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"the Python module {error.name} is not built; run make setup") from None
    torch.set_num_threads(1)


def main(rt: Runtime, o: LanguageOptions) -> bool:
    """Compare all versions with one device, and time them in turn."""
    prepare(rt, o)
    group = sp_group(rt)
    n, s = group.size, o.shape[0] // group.size
    items = [work("zigzag", True, group.rank, owner, s) for owner in range(n)]
    pairs = o.shape[1] * sum(item.pairs(s) for item in items if item)
    mine = partial(places, group=group, order="zigzag")
    cases = {
        name: AttentionCase(
            attend(name, rt, o, group), mine, pairs, 3 * (n - 1) * 2, None, LANGUAGES.get(name)
        )
        for name in o.versions
    }
    return attention_benchmark(rt, o, cases)


if __name__ == "__main__":
    run(main, LanguageOptions)
