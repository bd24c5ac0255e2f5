"""Memory of a rank: weights, gradients and optimizer state, measured and by formula, in bytes.

Psi parameters of b bytes on n ranks; AdamW keeps K = 2b bytes of state per parameter, SGD none.

    version                              weights    gradients   state
    bucketed, ddp                        b Psi      b Psi       K Psi
    zero1, zero-redundancy               b Psi      b Psi       K Psi / n
    zero2                                b Psi      b Psi / n   K Psi / n
    zero3, fsdp and fsdp-keep            b Psi / n  b Psi / n   K Psi / n

We measure the memory behind the tensors after a step of the optimizer; memory that several tensors share
counts once. Tensors that live only during a part of the step are in its peak, measured by
common.utils.memory.peak_allocated.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from common import comm
from common.comm.mesh import Mesh
from common.comm.placement import local
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson
from common.lesson.job import Job
from common.lesson.training import make_model, timed_adamw
from common.utils.memory import peak_allocated

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
        table = Table(title="the most at once in two steps of AdamW", title_justify="left")
        table.add_column("version")
        table.add_column("bytes", justify="right")
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
        table = Table(title=title, title_justify="left")
        for column in ("version", "optimizer", *KINDS, "all"):
            table.add_column(column, justify="left" if column in ("version", "optimizer") else "right")
        for name, kind, measured, formula in self.rows:
            first = next(sum(row[2]) for row in self.rows if row[1] == kind)
            cells = [f"{a / 1e6:.3f} / {b / 1e6:.3f}" for a, b in zip(measured, formula, strict=True)]
            table.add_row(name, kind, *cells, f"{sum(measured) / first:.0%}")
        return table
