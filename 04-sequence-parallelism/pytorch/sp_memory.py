"""What a rank holds of a long sequence: the activations of a model by formula and measured, and attention's peak.

    kept for the backward pass, numbers (GPT-2, t = B s tokens of a rank, T = B S of all)

    a layer        t (8 D + 2 F + H + 4)     inputs of norms and projections, q, k, v, o, the GELU's two, softmax's sums
      ulysses      + t D                     o by heads and o by tokens are two tensors (`--kernel hand`: also two)
      allgather    + 2 (T - t) D + s (r+1) s k and v of all ranks; and the mask
    the ends       t (2 D + 2 + V)           and 8 bytes a token, target and position

So everything falls as 1 / n but what is gathered. To the peak of attention, forward and backward, a ring adds two
blocks of keys and values and two of their gradients, whatever n: with the sequence fixed the peak falls as 1 / n from
n = 2 on, with a rank's tokens fixed it does not grow.

    python sp_memory.py --nproc 8      torchrun --nproc_per_node=8 sp_memory.py      mpirun -np 8 python sp_memory.py

B batch  S sequence  s a rank's tokens  D width  F width of the MLP  H heads  V vocabulary  r rank  n ranks
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast, get_args

import torch
from rich.table import Table
from sp_sequence_parallel import ORDERS, Attention, attends, sequence_parallel
from sp_split import check_length, longest_sequence, split_sequence
from sp_training import SequenceOptions, make_batches

from common import comm, comparison
from common.comm import Group
from common.ledger import show_bytes
from common.lesson import DTYPES, console, run
from common.mesh import Mesh
from common.models.configs import config
from common.models.transformer import cross_entropy_sum
from common.runtime import Runtime
from common.training import make_model
from common.utils.memory import peak_allocated, saved_bytes
from common.utils.visualizer import figure, memory_lines

VERSIONS = get_args(Attention)


@dataclass
class MemoryOptions(SequenceOptions):
    """Which versions, and the attention whose peak is measured."""

    sequence: int = 64
    """Tokens of a sample, all ranks together; half as many are measured, too."""
    versions: tuple[str, ...] = VERSIONS
    """Which versions to run."""
    shape: tuple[int, int, int] = (1024, 16, 64)
    """Tokens, heads and width of a head: the attention whose peak is measured."""


def activation_bytes(name: str, o: SequenceOptions, group: Group) -> int:
    """The table above, in bytes of this rank, for the whole batch at once."""
    c, size, s = config(o.model), DTYPES[o.dtype].itemsize, o.sequence // group.size
    t, whole = o.batch * s, o.batch * o.sequence
    layer = t * (8 * c.width + 2 * c.mlp_width + c.heads + 4)
    if name == "allgather":
        layer += 2 * (whole - t) * c.width + s * (group.rank + 1) * s
    elif (name == "ulysses" and group.size > 1) or (name != "ulysses" and o.kernel == "hand"):
        layer += t * c.width
    numbers = c.layers * layer + t * (2 * c.width + 2 + c.vocabulary)
    return (numbers + 1) * size + 8 * (2 * t + s)


def saved(name: Attention, o: SequenceOptions, group: Group, rt: Runtime) -> int:
    """Bytes that autograd keeps of a forward pass on this rank."""
    model = make_model(o, rt.device)
    sequence_parallel(model, group, name, o.kernel)
    ((tokens_BS, targets_BS),) = make_batches(o, group, rt.device).parts(0)
    piece = split_sequence(tokens_BS, targets_BS, group, ORDERS[name], longest_sequence(model.config))
    tokens_Bs, positions_s, targets_Bs = piece
    return saved_bytes(lambda: cross_entropy_sum(model(tokens_Bs, positions_s), targets_Bs)[0], model)


def attention_peak(name: Attention, o: SequenceOptions, tokens: int, group: Group, rt: Runtime) -> int:
    """The most bytes at once of attention forward and backward, `tokens` on this rank, beside q, k, v and do."""
    shape, dtype = (1, o.shape[1], tokens, o.shape[2]), DTYPES[o.dtype]
    q, k, v = (torch.ones(shape, dtype=dtype, device=rt.device, requires_grad=True) for _ in range(3))
    do, attend = torch.ones_like(q), attends(group, o.kernel)[name]

    def call() -> None:
        attend(q, k, v, True).backward(do)

    return peak_allocated(call, rt.device.type)


def largest(value: int, rt: Runtime) -> int:
    """The maximum over the world."""
    everywhere = torch.tensor(value, device=rt.device)
    comm.all_reduce(everywhere, rt.world, "max")
    return int(everywhere.item())


def main(rt: Runtime, o: MemoryOptions) -> bool:
    """Saved bytes = formula; the ring's peak falls as 1/n with the sequence, and stays with a rank's tokens."""
    comparison.check(rt, VERSIONS, o)
    o = replace(o, micro_batches=1)
    lengths = (o.sequence // 4, o.sequence // 2, o.sequence) if o.plot else (o.sequence // 2, o.sequence)
    known = o.model.startswith("gpt2") and rt.device.type == "cpu"
    sizes = [n for n in range(1, rt.world_size + 1) if rt.world_size % n == 0]
    meshes = {n: Mesh(rt.world, dp=rt.world_size // n, sp=n, timeout=rt.timeout) for n in sizes}
    groups = {n: mesh.group("sp") for n, mesh in meshes.items()}
    for name in cast(tuple[Attention, ...], o.versions):
        longest = longest_sequence(config(o.model))
        for length in lengths:
            check_length(length, ORDERS[name], rt.world_size, longest)
        check_length(o.shape[0], ORDERS[name], rt.world_size)
    kept = Table(title=f"bytes kept for the backward pass: {o.model}, {o.dtype}, {o.batch} samples")
    peak = Table(
        title=f"peak of attention: {o.shape[1]} heads of {o.shape[2]}, {o.dtype}, the most of any rank"
    )
    for table, columns in (
        (kept, ("attention", "ranks", "tokens", "measured", "formula")),
        (peak, ("attention", "ranks", f"{o.shape[0]} tokens in all", "times ranks", "as many on each rank")),
    ):
        table.title_justify = "left"
        for column in columns:
            table.add_column(column, justify="left" if column == "attention" else "right")
    exact, flat = True, True
    lines: dict[str, dict[int, float]] = {}
    for name in cast(tuple[Attention, ...], o.versions):
        first: tuple[int, int] | None = None
        for n, group in groups.items():
            if name == "ulysses" and (config(o.model).heads % n or o.shape[1] % n):
                continue
            for length in lengths:
                cut = replace(o, sequence=length)
                measured, formula = saved(name, cut, group, rt), activation_bytes(name, cut, group)
                exact &= measured == formula or not known
                if name != "ring" and (n > 1 or name == "zigzag"):  # others keep the same numbers
                    line = f"{name}, {n} ranks" if n > 1 else "one device"
                    lines.setdefault(line, {})[length] = largest(measured, rt)
                counts = (show_bytes(largest(x, rt)) for x in (measured, formula))
                kept.add_row(name, str(n), str(length), next(counts), next(counts) if known else "-")
            tokens = o.shape[0] // n, o.shape[0] // rt.world_size
            split, fixed = (largest(attention_peak(name, o, t, group, rt), rt) for t in tokens)
            peak.add_row(name, str(n), show_bytes(split), show_bytes(n * split), show_bytes(fixed))
            if n > 1 and name in ("ring", "zigzag"):
                first = first or (n * split, fixed)
                flat &= all(abs(a / b - 1) <= 0.05 for a, b in zip((n * split, fixed), first, strict=True))
    out = console(rt)
    out.print(kept, peak)
    if o.plot and rt.rank == 0:
        with figure(o.plot, width=7.4, height=4.2) as (axes,):
            memory_lines(
                axes, lines, against="tokens of a sequence", title="kept on a rank for the backward pass"
            )
    out.print(
        f"bytes kept {'=' if exact else 'are NOT those of the'} formula" if known else "no formula for this"
    )
    out.print(
        f"the ring's peak {'falls' if flat else 'does NOT fall'} as 1/ranks from 2 ranks on, within 5 %"
    )
    return exact and flat


if __name__ == "__main__":
    run(main, MemoryOptions)
