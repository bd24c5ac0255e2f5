"""Memory of a rank: weights, gradients and optimizer state, measured and by formula, in bytes.

Psi parameters of b bytes on n ranks; AdamW keeps K = 2b bytes of state per parameter, SGD none.

    version                              weights    gradients   state
    bucketed, ddp                        b Psi      b Psi       K Psi
    zero1, zero-redundancy               b Psi      b Psi       K Psi / n
    zero2                                b Psi      b Psi / n   K Psi / n
    zero3, fsdp and fsdp-keep            b Psi / n  b Psi / n   K Psi / n

We measure the memory behind the tensors after a step of the optimizer; memory that several tensors share
counts once. Tensors that live only during a part of the step are in its peak, measured by
common.utils.memory.peak_allocated. Activations are measured separately, on one device.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from common import comm
from common.comm import Group
from common.comm.ledger import show_bytes
from common.comm.mesh import Mesh
from common.comm.placement import local
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.comparison import Lesson, prove, time_in_turn
from common.lesson.job import Job
from common.lesson.runner import DTYPES, console
from common.lesson.training import Batches, make_model, timed_adamw
from common.models.configs import TransformerConfig
from common.models.transformer import Transformer, cross_entropy_sum
from common.utils.memory import LiveBytes, peak_allocated, saved_bytes

from dp_training import DataParallelOptions

KINDS = ("weights", "gradients", "state")
SHARDED = {"zero1": 1, "zero-redundancy": 1, "zero2": 2, "zero3": 3, "fsdp-keep": 3, "fsdp": 3}


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the memory behind the tensors; memory that several tensors share counts once."""
    storages = [local(x).untyped_storage() for x in tensors if x is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held(job: Job[Any]) -> tuple[int, int, int]:
    """Return (weights, gradients, state): the bytes of each on this rank, now."""
    assert job.owner
    assert job.stepped
    tensors = [*job.model.parameters(), *(p for _, p in job.owner.named_parameters())]
    inner = getattr(job.stepped, "optim", job.stepped)  # ZeroRedundancyOptimizer keeps the real one inside
    state = [x for of in inner.state.values() for x in of.values() if isinstance(x, Tensor)]
    return bytes_of(tensors), bytes_of(p.grad for p in tensors), bytes_of(state)


def by_formula(name: str, numbers: int, size: int, ranks: int, state: int) -> tuple[float, float, float]:
    """Return (weights, gradients, state) by the table above, in bytes.

    size, state: bytes per parameter of the weights and of the optimizer's state.
    """
    stage = SHARDED.get(name, 0)
    share = [numbers / ranks if stage >= first else float(numbers) for first in (3, 2, 1)]
    return share[0] * size, share[1] * size, share[2] * state


@dataclass
class MemoryTable:
    """Table of the memory of one lesson's versions, the mean over ranks, whose padding differs."""

    rt: Runtime
    rows: list[tuple[str, str, list[float], tuple[float, ...]]] = field(default_factory=list)

    def examine(self, job: Job[Any], kind: str) -> None:
        """Add a row for a run and its optimizer. Every rank must call this."""
        mine = torch.tensor(held(job), dtype=torch.float64)
        comm.all_reduce(mine, self.rt.world)
        parameters = list(job.model.parameters())
        size = parameters[0].element_size()
        formula = by_formula(
            job.version,
            sum(p.numel() for p in parameters),
            size,
            self.rt.world_size,
            2 * size * (kind == "adamw"),
        )
        self.rows.append((job.version, kind, (mine / self.rt.world_size).tolist(), formula))

    @property
    def largest(self) -> float:
        """Largest relative difference of measured from formula, without FSDP2, which pads every tensor."""
        rows = (row for row in self.rows if not row[0].startswith("fsdp"))
        pairs = [pair for _, _, *both in rows for pair in zip(*both, strict=True)]
        return max(float(abs(a - b) / (b or 1.0)) for a, b in pairs)

    def peaks(self, o: DataParallelOptions, lesson: Lesson) -> Table:
        """Return a table of peak bytes, activations included, from nothing to the end of a second step."""
        table = make_table("the most at once in two steps of AdamW", ("version", ">bytes"))
        for name in o.versions:

            def life(name: str = name) -> None:
                mesh, model = Mesh(self.rt.world, dp=self.rt.world_size), make_model(o, self.rt.device)
                job = Job(self.rt, o, name, model, mesh, "dp", timed_adamw, steps=2)
                collections.deque(lesson.versions[name](job), maxlen=0)

            peak = torch.tensor(peak_allocated(life, self.rt.device.type))
            comm.all_reduce(peak, self.rt.world, "max")
            table.add_row(name, f"{peak.item():,}")
        return table

    def table(self, title: str) -> Table:
        """Return a table of measured / formula, in MB, and of the total relative to the first version."""
        table = make_table(title, ("version", "optimizer", *(f">{kind}" for kind in KINDS), ">all"))
        for name, kind, measured, formula in self.rows:
            first = next(sum(row[2]) for row in self.rows if row[1] == kind)
            cells = [f"{a / 1e6:.3f} / {b / 1e6:.3f}" for a, b in zip(measured, formula, strict=True)]
            table.add_row(name, kind, *cells, f"{sum(measured) / first:.0%}")
        return table


def prove_with_memory(rt: Runtime, o: DataParallelOptions, lesson: Lesson, peaks: bool = False) -> bool:
    """Prove the lesson, and that every version holds the memory of the formula; with --benchmark only time it.

    peaks: show also the peak of each version.
    """
    memory = MemoryTable(rt)
    if o.benchmark:
        return time_in_turn(rt, o, lesson)
    holds = prove(rt, o, replace(lesson, examine=memory.examine))
    console(rt).print(memory.table("MB that a rank holds after a step, measured / formula"))
    if peaks:
        console(rt).print(memory.peaks(o, lesson))
    return holds and memory.largest <= 0.01


def activation_bytes(c: TransformerConfig, batch: int, sequence: int, size: int, checkpointed: bool) -> int:
    """Return the bytes that autograd keeps of GPT-2's forward pass, summed over its operations.

    size: bytes per number. Per token a layer keeps 8 D (the inputs of norms and projections, q, k, v and the
    attention's result), 2 F around the GELU, H for the softmax's sums, 4 for the norms; a checkpointed layer
    keeps only its input, D. The ends keep D into the last norm and D out of it, its 2 numbers, V logarithms
    of probabilities; 8 bytes per token and target and position; the sum of weights that the cross-entropy
    divides by.
    """
    layer = c.width if checkpointed else 8 * c.width + 2 * c.mlp_width + c.heads + 4
    numbers = batch * sequence * (c.layers * layer + 2 * c.width + 2 + c.vocabulary)
    return (numbers + 1) * size + 8 * (2 * batch * sequence + sequence)


def measure(model: Transformer, x_BS: Tensor, y_BS: Tensor) -> tuple[int, int]:
    """Return (bytes saved for the backward pass, peak bytes alive in forward and backward besides p.grad)."""

    def loss() -> Tensor:
        return cross_entropy_sum(model(x_BS), y_BS)[0]

    saved = saved_bytes(loss, model)
    loss().backward()  # from now on p.grad exists
    with LiveBytes() as live:
        loss().backward()
    return saved, live.peak


def activations(
    o: DataParallelOptions, checkpoint_layers: Callable[[Transformer, str], None]
) -> tuple[Table, bool]:
    """Run every version on the whole batch and on a micro-batch, on the CPU.

    Return the table of their bytes, and True if all versions have equal gradients.
    """
    c, size, cpu = o.model_config(), DTYPES[o.dtype].itemsize, torch.device("cpu")
    heads = ("version", ">micro-batches", ">saved", ">formula", ">peak", "gradients")
    title = f"bytes of activations: {o.model}, {o.dtype}, {o.batch} samples"
    table, all_exact = make_table(title, heads), True
    for micro_batches in sorted({1, min(o.micro_batches, o.batch)}):
        batches = Batches(replace(o, micro_batches=micro_batches), Group.alone(), cpu)
        x_BS, y_BS = max(batches.parts(0), key=lambda part: part[0].numel())
        first: list[Tensor | None] = []
        for name in o.versions:
            model = make_model(o, cpu)
            checkpoint_layers(model, name)
            saved, peak = measure(model, x_BS, y_BS)
            gradients = [p.grad for p in model.parameters()]
            first = first or gradients
            exact = all(
                a is not None and b is not None and torch.equal(a, b)
                for a, b in zip(first, gradients, strict=True)
            )
            formula = activation_bytes(c, len(x_BS), x_BS.shape[1], size, name != "none")
            known = show_bytes(formula) if o.model.startswith("gpt2") else "-"
            shown = (show_bytes(saved), known, show_bytes(peak), "the same bits" if exact else "DIFFER")
            table.add_row(name, str(micro_batches), *shown)
            all_exact &= exact
    return table, all_exact
