"""Memory of a rank for a long sequence: the activations of a model by formula and measured, and the peaks.

    numbers kept for the backward pass (GPT-2, t = B s tokens of a rank, T = B S of all)

    a layer        t (8 D + 2 F + H + 4)     inputs of norms and projections, q, k, v, o, the GELU's two, softmax's sums
      ulysses      + t D                     if n > 1: o by heads and o by tokens are two tensors
      ring, zigzag + t D                     with --kernel hand: o is two tensors
      allgather    + 2 (T - t) D + s (r+1) s k and v of all ranks; and the mask
    the ends       t (2 D + 2 + V) + 1       and 8 bytes per token, target and position

Everything except the gathered keys and values falls as 1 / n, and so does the peak of a forward and backward
pass of the model: it falls as 1 / n if the sequence is fixed, and stays the same if the tokens per rank are
fixed. For n > 1 a ring adds two blocks of keys and values and two of their gradients to the peak of one
attention alone, so that peak falls as 1 / n only from n = 2 on. In the model these blocks do not raise the
peak, which the activations of all layers set.

    python sp_memory.py --nproc 8      torchrun --nproc_per_node=8 sp_memory.py      mpirun -np 8 python sp_memory.py

B batch  S sequence  s a rank's tokens  D width  F width of the MLP  H heads  V vocabulary  r rank  n ranks
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from rich.table import Table
from torch import Tensor, nn

from common import comm
from common.comm import Group
from common.comm.ledger import show_bytes
from common.comm.mesh import Mesh
from common.launch.command_line import Size
from common.launch.runtime import Runtime
from common.lesson import comparison
from common.lesson.runner import DTYPES, console, run
from common.lesson.training import Batches, make_model
from common.models.configs import config
from common.models.transformer import cross_entropy_sum
from common.utils.memory import peak_allocated, saved_bytes
from common.utils.visualizer import figure, memory_lines

from sp_sequence_parallel import ORDERS, Attention, attends, sequence_parallel
from sp_split import check_length, longest_sequence, split_sequence
from sp_training import SequenceOptions


@dataclass
class MemoryOptions(SequenceOptions, without=("steps", "micro_batches", "benchmark", "json", "check")):
    """Options: the shape of the attention whose peak is measured."""

    sequence: Size = 64
    """Tokens of a sample, all ranks together; a half is measured as well, with --plot a quarter and an eighth."""
    shape: tuple[Size, Size, Size] = (1024, 16, 64)
    """Tokens, heads and width of a head of the attention whose peak is measured."""
    long_model: str = "llama-tiny"
    """Name of the model whose peak is measured, with the tokens of --shape."""


def activation_bytes(name: str, o: SequenceOptions, group: Group) -> int:
    """Return the sum of the table above for this rank and the whole batch, in bytes."""
    c, size, s = config(o.model), DTYPES[o.dtype].itemsize, o.sequence // group.size
    t, whole = o.batch * s, o.batch * o.sequence
    layer = t * (8 * c.width + 2 * c.mlp_width + c.heads + 4)
    if name == "allgather":
        layer += 2 * (whole - t) * c.width + s * (group.rank + 1) * s
    elif (name == "ulysses" and group.size > 1) or (name != "ulysses" and o.kernel == "hand"):
        layer += t * c.width
    numbers = c.layers * layer + t * (2 * c.width + 2 + c.vocabulary)
    return (numbers + 1) * size + 8 * (2 * t + s)


def loss_of(
    name: str, o: SequenceOptions, group: Group, rt: Runtime
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a model, and a function that computes its loss on this rank's piece of the whole batch."""
    model = make_model(o, rt.device)
    sequence_parallel(model, group, cast(Attention, name), o.kernel)
    ((tokens_BS, targets_BS),) = Batches(o, Group.alone(), rt.device).parts(0)
    piece = split_sequence(tokens_BS, targets_BS, group, ORDERS[name], longest_sequence(model.config))
    tokens_Bs, positions_s, targets_Bs = piece
    return model, lambda: cross_entropy_sum(model(tokens_Bs, positions_s), targets_Bs)[0]


def saved(name: str, o: SequenceOptions, group: Group, rt: Runtime) -> int:
    """Return the bytes that autograd keeps of a forward pass on this rank."""
    model, loss = loss_of(name, o, group, rt)
    return saved_bytes(loss, model)


def model_peak(name: str, o: MemoryOptions, tokens: int, group: Group, rt: Runtime) -> int:
    """Return the peak bytes of both passes of the model, `tokens` per rank, without weights and gradients."""
    o = replace(o, model=o.long_model, batch=1, sequence=tokens * group.size)
    model, loss = loss_of(name, o, group, rt)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return peak_allocated(lambda: loss().backward(), rt.device.type)


def attention_peak(name: str, o: MemoryOptions, tokens: int, group: Group, rt: Runtime) -> int:
    """Return the peak bytes of both passes of attention, `tokens` per rank, without q, k, v and do."""
    shape, dtype = (1, o.shape[1], tokens, o.shape[2]), DTYPES[o.dtype]
    q, k, v = (torch.ones(shape, dtype=dtype, device=rt.device, requires_grad=True) for _ in range(3))
    do, attend = torch.ones_like(q), attends(group, o.kernel)[name]

    def call() -> None:
        attend(q, k, v, True).backward(do)

    return peak_allocated(call, rt.device.type)


Groups = dict[int, Group]
Lines = dict[str, dict[int, float]]


def make_table(title: str, *columns: str) -> Table:
    """Return a table whose first column is the attention and whose other columns are right-justified."""
    table = Table("attention", title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def kept(rt: Runtime, o: MemoryOptions, groups: Groups, lengths: Sequence[int]) -> tuple[Table, Lines, bool]:
    """Return (table of measured and formula bytes, lines to draw, True if they agree)."""
    known = o.model.startswith("gpt2") and rt.device.type == "cpu"
    title = f"bytes kept for the backward pass: {o.model}, {o.dtype}, {o.batch} samples"
    table = make_table(title, "ranks", "tokens", "measured", "formula" if known else "no formula")
    lines: Lines = {}
    exact = True
    for name, n, length in itertools.product(o.versions, groups, lengths):
        if name == "ulysses" and config(o.model).heads % n:
            continue
        cut = replace(o, sequence=length)
        measured, formula = saved(name, cut, groups[n], rt), activation_bytes(name, cut, groups[n])
        exact &= measured == formula or not known
        most, most_formula = (max(comm.everyones(x, rt.world)) for x in (measured, formula))
        table.add_row(name, str(n), str(length), show_bytes(most), show_bytes(most_formula) if known else "-")
        if name != "ring" and (n > 1 or name == "zigzag"):  # the others keep the same bytes as these
            line = f"{name}, {n} ranks" if n > 1 else "one device"
            lines.setdefault(line, {})[length] = most
    return table, lines, exact


def peaks(
    rt: Runtime, o: MemoryOptions, groups: Groups, what: str, heads: int, peak: Callable[..., int], since: int
) -> tuple[Table, bool]:
    """Return (table of peak bytes, True if the rings' peaks scale with the tokens per rank within 5 %).

    peak: `model_peak` or `attention_peak`. since: the smallest number of ranks that is checked.
    """
    length = o.shape[0]
    columns = ("ranks", f"{length} tokens in all", "times ranks", "as many on each rank")
    table = make_table(f"peak of {what}, the most of any rank", *columns)
    first: dict[str, tuple[int, int]] = {}
    flat = True
    for name, n in itertools.product(o.versions, groups):
        if name == "ulysses" and heads % n:
            continue
        split, fixed = (
            max(comm.everyones(peak(name, o, tokens, groups[n], rt), rt.world))
            for tokens in (length // n, length // max(groups))
        )
        table.add_row(name, str(n), show_bytes(split), show_bytes(n * split), show_bytes(fixed))
        if n >= since and name in ("ring", "zigzag"):
            at_first = first.setdefault(name, (n * split, fixed))
            flat &= all(abs(a / b - 1) <= 0.05 for a, b in zip((n * split, fixed), at_first, strict=True))
    return table, flat


def main(rt: Runtime, o: MemoryOptions) -> bool:
    """Print the tables; True if saved bytes equal the formula and the rings' peaks scale as 1/n."""
    comparison.check(rt, tuple(ORDERS), o)
    o = replace(o, micro_batches=1)
    lengths = tuple(o.sequence // cut for cut in ((8, 4, 2, 1) if o.plot else (2, 1)))
    longest = longest_sequence(config(o.model))
    for name in o.versions:
        for length in lengths:
            check_length(length, ORDERS[name], rt.world_size, longest)
        check_length(o.shape[0], ORDERS[name], rt.world_size, longest_sequence(config(o.long_model)))
    sizes = [n for n in range(1, rt.world_size + 1) if rt.world_size % n == 0]
    meshes = {n: Mesh(rt.world, dp=rt.world_size // n, sp=n, timeout=rt.timeout) for n in sizes}
    groups = {n: mesh.group("sp") for n, mesh in meshes.items()}
    kept_table, lines, exact = kept(rt, o, groups, lengths)
    _, heads, head_width = o.shape
    model = f"a forward and backward pass: {o.long_model}, {o.dtype}, a sample"
    model_heads = config(o.long_model).heads
    model_table, model_falls = peaks(rt, o, groups, model, model_heads, model_peak, since=1)
    one = f"one attention: {heads} heads of {head_width}, {o.dtype}"
    attention_table, attention_falls = peaks(rt, o, groups, one, heads, attention_peak, since=2)
    if o.plot and rt.rank == 0:
        with figure(o.plot, width=7.4, height=4.2) as (axes,):
            title = "kept on a rank for the backward pass"
            memory_lines(axes, lines, against="tokens of a sequence", title=title)
    out = console(rt)
    out.print(kept_table, model_table, attention_table)
    out.print(f"bytes kept {'=' if exact else 'are NOT those of the'} formula, wherever there is one")
    falls = {True: "falls", False: "does NOT fall"}
    out.print(f"with a ring the model's peak {falls[model_falls]} as 1/ranks, within 5 %")
    out.print(f"the peak of one attention {falls[attention_falls]} as 1/ranks from 2 ranks on, within 5 %")
    return exact and model_falls and attention_falls


if __name__ == "__main__":
    run(main, MemoryOptions, versions=ORDERS)
