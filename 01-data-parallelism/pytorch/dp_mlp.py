"""The MLP of chapter 01: its options and samples, and the comparison of the versions of dp_languages.py.

I inputs (8 a byte of context)  B samples
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Annotated

import tyro
from torch import Tensor

from common import comm
from common.comm import Group
from common.comm.ledger import Ledger
from common.comm.listen import Listener
from common.comm.mesh import Mesh
from common.data.text import mlp_batch
from common.launch.command_line import Width, Within
from common.launch.runtime import Runtime
from common.lesson import languages
from common.lesson.comparison import report
from common.lesson.equality import OPTIMIZERS, Followed, Start, unmoved, watch
from common.lesson.job import Job, Train, one_device
from common.lesson.measure import BenchmarkRecord, in_turn, peak_memory
from common.lesson.runner import DTYPES, console
from common.lesson.training import Batches
from common.models.mlp import MLP, sizes

from dp_costs import mlp_run, mlp_step
from dp_training import DataParallelOptions

Loops = Mapping[str, Train]
LANGUAGES = {"dp_libtorch": "libtorch", "dp_mpi": "cpp-mpi"}
INSIDE_MPI = ("dp_mpi", "dp_mpi-zero1")
"""Versions whose messages are sent inside MPI and cannot be counted."""


@dataclass
class MLPOptions(DataParallelOptions, without=("plot",)):
    """Options: the MLP and its batch. A sample has one target."""

    model: Annotated[str, tyro.conf.Suppress] = "mlp"
    sequence: Annotated[int, tyro.conf.Suppress] = 1
    context: Width = 16
    """Number of bytes before the one to predict."""
    hidden: Width = 64
    """Width of the hidden layers."""
    layers: Annotated[int, Within(1, 1000)] = 3
    """Number of linear layers."""


@dataclass
class Samples(Batches):
    """This rank's part of every global batch, cut from the text once, so that no timing includes it."""

    options: MLPOptions
    first_only: bool = False
    """Give the batch of step 0 in every step."""
    cut: dict[int, list[tuple[Tensor, ...]]] = field(default_factory=dict)

    def take(self, step: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Return (x_BI, y_B) of samples [lo, hi) of the step's global batch."""
        o = self.options
        return mlp_batch(self.text.train, o.seed, step, o.batch, o.context, lo, hi, DTYPES[o.dtype])

    def parts(self, step: int) -> list[tuple[Tensor, ...]]:
        """Return (x_BI, y_B) of each micro-batch."""
        step = 0 if self.first_only else step
        if step not in self.cut:
            self.cut[step] = super().parts(step)
        return self.cut[step]


def make_model(o: MLPOptions, seed: int) -> MLP:
    """Return the MLP in torch; dp_mpi makes the same MLP from the same seed."""
    return MLP(sizes(o.context, o.hidden, o.layers), seed, DTYPES[o.dtype])


def make_job(
    rt: Runtime, o: MLPOptions, name: str, optimizer: str, steps: int | None = None
) -> Job[MLPOptions]:
    """Return the run of a version, or of "one device", which takes whole batches on every rank."""
    world = rt.world
    if name == "one device":
        world, o = Group.alone(), replace(o, micro_batches=1)
    model = make_model(o, o.seed + world.rank)  # the broadcast must mend this
    mesh = Mesh(world, dp=world.size)
    return Job(rt, o, name, model, mesh, "dp", OPTIMIZERS[optimizer], steps, Samples)  # type: ignore[arg-type]


def train(
    rt: Runtime, o: MLPOptions, loops: Loops, name: str, optimizer: str, start: Start = unmoved
) -> tuple[Followed, Fraction, Fraction]:
    """Train `o.steps` steps; return (the results, the mean bytes that ranks sent, the bytes by formula)."""
    job = make_job(rt, o, name, optimizer, o.steps)
    start(job.model)
    # dp_mpi has whole gradients, and sends none of torch's messages
    mesh = None if name == "one device" or name.startswith("dp_mpi") else job.mesh
    with Listener(rt.world) if name == "ddp-mlp" else Ledger() as counted:
        followed = watch(loops.get(name, one_device)(job), job, mesh)
    sent = sum(comm.everyones(counted.bytes() - counted.bytes("bookkeeping"), rt.world), Fraction(0))
    return followed, sent / rt.world_size, mlp_run(name, make_model(o, 0), rt.world, o.bucket_mb, o.steps)


def benchmark(rt: Runtime, loops: Loops, o: MLPOptions) -> list[BenchmarkRecord]:
    """Time whole steps of every version in turn, on one batch: `o.steps` rounds after a warm-up round."""
    if o.benchmark and o.scaling == "weak":
        o = replace(o, batch=o.batch * rt.world_size)
    jobs = {name: make_job(rt, o, name, "adamw") for name in o.versions}
    for job in jobs.values():
        job.make_batches = partial(Samples, first_only=True)
    measured = in_turn(
        {name: partial(next, loops[name](job)) for name, job in jobs.items()}, o.steps, rt.world
    )
    model, widths = make_model(o, o.seed), sizes(o.context, o.hidden, o.layers)
    return [
        BenchmarkRecord(
            strategy="dp",
            implementation=name,
            language=LANGUAGES.get(name.split("-")[0], "pytorch"),
            ranks=rt.world_size,
            backend="mpi" if name.startswith("dp_mpi") else rt.backend,
            dtype=o.dtype,
            model="mlp-" + "-".join(map(str, widths)),
            parameters=sum(p.numel() for p in model.parameters()),
            tokens_per_step=o.batch,
            flop_per_step=o.batch * model.flops_per_sample(),
            step_seconds=m.seconds,
            communication_seconds=None if name == "ddp-mlp" else statistics.median(m.blocked),
            bytes_counted=None if name in (*INSIDE_MPI, "ddp-mlp") else statistics.median(m.sent),
            bytes_formula=float(mlp_step(name, model, rt.world, o.bucket_mb)),
            peak_memory_bytes=peak_memory(rt.world),
            scaling=o.scaling,
        )
        for name, m in measured.items()
    ]


def show_ratios(rt: Runtime, records: list[BenchmarkRecord]) -> None:
    """Print the ratio of dp_mpi's times to those of each version in torch, round by round."""
    times = {r.implementation: r.step_seconds for r in records}
    for r in records:
        if r.language == "pytorch" and "dp_mpi" in times:
            ratios = [ours / theirs for ours, theirs in zip(times["dp_mpi"], r.step_seconds, strict=True)]
            console(rt).print(
                f"dp_mpi takes {statistics.median(ratios):.2f} of the time of {r.implementation} "
                f"({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds, one thread a rank)",
                soft_wrap=True,
            )


def prove_mlp(rt: Runtime, o: MLPOptions, loops: Loops) -> bool:
    """Compare the versions with one device and with one another, then time them."""

    def compared(name: str, optimizer: str, start: Start) -> tuple[Followed, Fraction | None, Fraction]:
        followed, sent, formula = train(rt, o, loops, name, optimizer, start)
        return followed, None if name in INSIDE_MPI and rt.world_size > 1 else sent, formula

    mesh, title = (
        Mesh(rt.world, dp=rt.world_size),
        f"{rt.world_size} rank(s), MLP, {o.dtype}, {o.steps} steps",
    )
    return languages.prove_languages(rt, o, mesh, compared, partial(benchmark, rt, loops), title)


def time_in_turn(rt: Runtime, o: MLPOptions, loops: Loops) -> bool:
    """Time the versions in turn and report; True, since nothing is compared."""
    records = benchmark(rt, loops, o)
    report(rt, o, records)
    show_ratios(rt, records)
    return True
