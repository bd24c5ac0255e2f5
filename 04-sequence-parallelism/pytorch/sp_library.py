"""torch's own ring attention beside ours, on CPUs: the loops behind `context_parallel`, with the CPU's kernel.

`torch.distributed.tensor.experimental.context_parallel` is a context in which scaled_dot_product_attention becomes a
ring. In torch 2.13 it accepts the attention kernels of GPUs only. The loops behind it,
`_templated_ring_attention` and `_templated_ring_attention_backward`, take the kernel as an argument; this lesson gives
them the CPU kernel that sp_block.py calls `library`. The loops are private functions: another release may change them.

    zigzag         sp_ring_attention.py
    torch          torch's loops, keys and values sent round the ring: `set_rotate_method("alltoall")`
    torch-gather   torch's loops, keys and values all-gathered once per pass, the default: `"allgather"`

torch's order "head-tail load balancing" is zigzag order. Its forward pass sends (n-1) blocks of keys and values, its
backward pass (n-1) of keys and values and n of their gradients, because a rank also sends its own share round the
whole ring, where ours stays at home: 3n - 2 blocks, ours 3(n-1).

    python sp_library.py --nproc 4    torchrun --nproc_per_node=4 sp_library.py    mpirun -np 4 python sp_library.py

Times need one core per rank. The waits of torch's versions are not known.

S sequence  s = S / n, a rank's tokens  H heads  K width of a head  n ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as of_torch

from common.comm import Group, ledger
from common.comm.listen import Listener
from common.errors import UsageError
from common.launch.command_line import Count, Size
from common.launch.runtime import Runtime
from common.lesson.comparison import check
from common.lesson.runner import run

from sp_attention_benchmark import AttentionCase, attention_benchmark
from sp_block import KERNELS
from sp_costs import ring_bytes, sizes
from sp_ring_attention import ring_attention
from sp_split import check_length
from sp_training import SequenceOptions, sp_group

ROTATE = {"torch": "alltoall", "torch-gather": "allgather"}
VERSIONS = ("zigzag", *ROTATE)


@dataclass
class LibraryOptions(
    SequenceOptions,
    without=("model", "batch", "sequence", "micro_batches", "benchmark", "data", "kernel"),
):
    """Options: the shape of the attention."""

    shape: tuple[Size, Size, Size] = (384, 8, 32)
    """Tokens, heads and width of a head."""
    steps: Count = 3
    """Timed rounds."""


def forward_kernel(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Compute (o, lse) of one block by the CPU kernel, under the names that torch's loop gives."""
    return KERNELS["library"].forward(query, key, value, is_causal)


def backward_kernel(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dq, dk, dv) of one block by the CPU kernel, under the names that torch's loop gives."""
    return KERNELS["library"].backward(grad_out, query, out, logsumexp, key, value, is_causal)


@contextmanager
def counted(group: Group) -> Iterator[None]:
    """Record the bytes of torch's own calls in the open ledger; their waits are not known."""
    with Listener(group) as heard:
        yield
    for row in heard.rows:
        ledger.record(row.op, row.axis, row.bytes, 0.0)


class TorchRing(torch.autograd.Function):
    """Autograd function (q_BHsK, k_BHsK, v_BHsK) -> o_BHsK around torch's two loops; the order is zigzag."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, group: Group, rotate: str) -> Tensor:
        of_torch.set_rotate_method(rotate)
        loop: Any = of_torch._templated_ring_attention
        with counted(group):
            o, lse = loop(group.pg, 2, forward_kernel, q, k, v, causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.rest = causal, group, rotate
        return cast(Tensor, o)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, o, lse), (causal, group, rotate) = ctx.saved_tensors, ctx.rest
        of_torch.set_rotate_method(rotate)
        loop: Any = of_torch._templated_ring_attention_backward
        with counted(group):
            found = loop(group.pg, 2, backward_kernel, gradients[0], "grad_out", q, k, v, o, lse, causal)
        return (*found[:3], None, None, None)


def torch_bytes(o: SequenceOptions, ranks: int) -> int:
    """Return the bytes a rank sends for attention in torch's loops: 3n - 2 times its keys and values."""
    _, keys, _ = sizes(o, ranks)
    return (3 * ranks - 2) * 2 * keys


def attend(name: str, group: Group) -> Callable[..., Tensor]:
    """Return the attention of a version."""
    if name == "zigzag":
        return partial(ring_attention, group=group, order="zigzag")
    rotate = ROTATE[name]
    return lambda q, k, v, causal: cast(Tensor, TorchRing.apply(q, k, v, causal, group, rotate))


def main(rt: Runtime, o: LibraryOptions) -> bool:
    """Compare torch's ring and ours with one device, and time them in turn."""
    check(rt, VERSIONS, o)
    check_length(o.shape[0], "zigzag", rt.world_size)
    if rt.world_size == 1:
        raise UsageError("torch's ring needs at least 2 ranks: give --nproc 2")
    if rt.device.type != "cpu":
        raise UsageError("sp_library.py gives torch's ring the kernel of CPUs: start it on CPUs")
    of_torch._cp_options.convert_to_f32 = False  # merge float64 in float64
    of_torch._cp_options.enable_load_balance = True  # zigzag order
    group = sp_group(rt)
    cases = {
        name: AttentionCase(
            attend(name, group),
            torch_bytes if name in ROTATE else ring_bytes,
            group,
            "zigzag",
            waits=name not in ROTATE,
        )
        for name in o.versions
    }
    return attention_benchmark(rt, o, cases)


if __name__ == "__main__":
    run(main, LibraryOptions, versions=VERSIONS)
