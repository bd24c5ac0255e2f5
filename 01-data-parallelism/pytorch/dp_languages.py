"""Data parallelism in three languages: the same MLP, the same text, the same weights.

                       the same seed, the same text, cut over ranks and micro-batches
                   ┌──────────────────────────┼──────────────────────────┐
              pytorch-mlp                dp_libtorch                  dp_mpi
    backward  torch.autograd             torch.autograd               its own, C++ on BLAS
    buckets   Python (dp_basic.py)       C++ hooks (libtorch/)        C++ (cpp/)
    messages  process group              process group                MPI
                   └──────────────────────────┼──────────────────────────┘
                       equal: loss, every gradient, their norm, the weights

Cost of a step: in all versions each rank sends 2(n-1)/n bytes per byte of gradient. We count the bytes that
our own code, or DDP, sends, as the mean over ranks. Bytes sent inside MPI_Iallreduce are not visible, so
dp_mpi is counted in its second form, our ring. `dp_mlp.py` has the code that runs each language.

dp_mpi communicates through mpi4py, so several ranks need mpirun. --benchmark times whole steps, AdamW
included, in turn, with one thread per rank.

    mpirun -np 4 python dp_languages.py          python dp_languages.py       (one rank)
    mpirun -np 2 python dp_languages.py --benchmark --dtype float32 --batch 512 --hidden 1024 --layers 4 --steps 20
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

import torch
from rich.table import Table

from common.comm import Group
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson.comparison import timing_table
from common.lesson.equality import OPTIMIZERS, TOLERANCE, Followed, compare, worst_of_world
from common.lesson.measure import BenchmarkRecord, in_turn, peak_memory
from common.lesson.proof import Proof
from common.lesson.runner import DTYPES, console, run, write_records
from common.models.mlp import sizes

from dp_costs import bytes_of_run
from dp_mlp import (
    LOOPS,
    VERSIONS,
    MLPOptions,
    MPIModel,
    Samples,
    bytes_of_gradients,
    make_model,
    on_one_device,
    padding_of_step,
    torch_job,
    train,
)
from dp_training import check

LANGUAGES = {
    "dp_libtorch": "libtorch",
    "dp_libtorch-zero1": "libtorch",
    "dp_mpi": "cpp-mpi",
    "dp_mpi-ring": "cpp-mpi",
    "dp_mpi-zero1": "cpp-mpi",
}
INSIDE_MPI = ("dp_mpi", "dp_mpi-zero1")
"""Versions whose messages are sent inside MPI and cannot be counted."""


def prepare(rt: Runtime, o: MLPOptions) -> None:
    """Raise UsageError for options that cannot run; limit every library of this rank to one thread."""
    check(rt, VERSIONS, o)
    how = f"mpirun -np {rt.world_size} python dp_languages.py"
    if rt.world_size > 1 and rt.launcher not in ("openmpi", "mpich", "slurm"):
        raise UsageError(f"dp_mpi needs MPI between its {rt.world_size} ranks; start them with {how}")
    try:
        from fived import blas
        from mpi4py import MPI

        import dp_libtorch  # noqa: F401
        import dp_mpi  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"the Python module {error.name} is not built; run make setup") from None
    if MPI.COMM_WORLD.size != rt.world_size:
        raise UsageError(
            f"mpi4py sees {MPI.COMM_WORLD.size} rank(s), the launcher {rt.launcher} started {rt.world_size}; "
            f"start them with the mpirun of the MPI that mpi4py was built for: {how}"
        )
    torch.set_num_threads(1)
    blas.set_threads(1)


Runs = dict[str, dict[str, Followed]]  # optimizer: version: its results


def prove(rt: Runtime, o: MLPOptions) -> bool:
    """Train every version with SGD and AdamW; compare each with one device and with every other version."""
    mesh = Mesh(rt.world, dp=rt.world_size)
    proof = Proof(mesh, DTYPES[o.dtype])
    runs: Runs = {optimizer: {} for optimizer in OPTIMIZERS}
    for optimizer in OPTIMIZERS:
        reference = on_one_device(optimizer, rt, o)
        for name in o.versions:
            followed, counted = train(name, optimizer, rt, o)
            unseen = name in INSIDE_MPI and rt.world_size > 1
            sent, formula = None if unseen else counted, bytes_by_formula(name, rt.world, o)
            proof.add(name, optimizer, reference, followed, sent, formula)
            runs[optimizer][name] = followed
    table, largest = between(runs, o.versions, mesh)
    limit = 100 * TOLERANCE[proof.dtype]
    out = console(rt)
    title = f"{rt.world_size} rank(s), MLP, {o.dtype}, {o.steps} steps"
    out.print(proof.tables(title), table)
    records = benchmark(rt, replace(o, steps=5, benchmark=False))
    console(rt).print(timing_table(records))
    proof.agree = largest <= limit
    if rt.rank == 0:
        write_records(o.json, [r.as_json() for r in proof.recorded(records)])
    out.print(proof.sentence())
    agree = "agree with one another within" if proof.agree else "do NOT agree with one another within"
    out.print(f"the versions {agree} {limit:.0e}")
    return proof.holds


def between(runs: Runs, versions: Sequence[str], mesh: Mesh) -> tuple[Table, float]:
    """Return (a table of the largest differences between any two versions, the largest of all)."""
    table = Table(title="largest relative difference between two versions", title_justify="left")
    for column in ("versions", "", *runs):
        table.add_column(column, justify="right" if column in runs else "left")
    largest = 0.0
    for a, b in itertools.combinations(versions, 2):
        found = [worst_of_world(compare(by[a], by[b]), mesh) for by in runs.values()]
        values = [max(d.value for d in kinds.values()) for kinds in found]
        table.add_row(a, b, *(f"{v:.1e}" for v in values))
        largest = max(largest, *values)
    return table, largest


def bytes_by_formula(name: str, group: Group, o: MLPOptions) -> Fraction:
    """Return the bytes a rank sends in the whole run."""
    model = make_model(o, o.seed)
    if name.startswith("dp_mpi"):
        return o.steps * bytes_of_gradients(name, model, group, o)
    ours, zero1 = name != "ddp-mlp", name == "dp_libtorch-zero1"
    padding = padding_of_step(model, group, o) if zero1 else 0
    return bytes_of_run(model, group, o.steps, order=ours and not zero1, flags=ours) + o.steps * padding


def benchmark(rt: Runtime, o: MLPOptions) -> list[BenchmarkRecord]:
    """Time whole steps of every version in turn, on one batch: `o.steps` rounds after a warm-up round."""
    if o.benchmark and o.scaling == "weak":
        o = replace(o, batch=o.batch * rt.world_size)
    samples = Samples(o, rt.world, rt.device)
    measured = in_turn({name: whole_step(name, rt, o, samples) for name in o.versions}, o.steps, rt.world)
    model, widths = make_model(o, o.seed), sizes(o.context, o.hidden, o.layers)
    return [
        BenchmarkRecord(
            strategy="dp",
            implementation=name,
            language=LANGUAGES.get(name, "pytorch"),
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
            bytes_formula=float(bytes_of_gradients(name, model, rt.world, o)),
            peak_memory_bytes=peak_memory(rt.world),
            scaling=o.scaling,
        )
        for name, m in measured.items()
    ]


def whole_step(name: str, rt: Runtime, o: MLPOptions, samples: Samples) -> Callable[[], None]:
    """Return a function that does forward, backward, sum over ranks and AdamW, always on the same batch."""
    if name.startswith("dp_mpi"):
        mpi = MPIModel(name, "adamw", rt, o, samples)

        def mpi_step() -> None:
            mpi.backward(0)
            mpi.update()

        return mpi_step
    job = torch_job(name, "adamw", rt, o, make_model(o, o.seed))
    job.make_batches = partial(Samples, first_only=True)
    return partial(next, LOOPS[name](job))


def show_times(rt: Runtime, records: list[BenchmarkRecord]) -> None:
    """Print the times, and the ratio of dp_mpi's to those of each version in torch, round by round."""
    out, times = console(rt), {r.implementation: r.step_seconds for r in records}
    out.print(timing_table(records))
    for name in (v for v in times if v not in LANGUAGES and "dp_mpi" in times):
        ratios = [ours / theirs for ours, theirs in zip(times["dp_mpi"], times[name], strict=True)]
        out.print(
            f"dp_mpi takes {statistics.median(ratios):.2f} of the time of {name} "
            f"({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds, one thread a rank)",
            soft_wrap=True,
        )


def main(rt: Runtime, o: MLPOptions) -> bool:
    """Prove equality of the versions with one device, or with --benchmark time them."""
    prepare(rt, o)
    if not o.benchmark:
        return prove(rt, o)
    records = benchmark(rt, o)
    show_times(rt, records)
    if rt.rank == 0:
        write_records(o.json, [r.as_json() for r in records])
    return True


if __name__ == "__main__":
    run(main, MLPOptions)
