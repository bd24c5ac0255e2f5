"""One mesh in three languages: the same model, the same weights and the same batches, step by step.

                        mesh, schedule as text, seed, samples of this rank's place along dp and ep
                   ┌──────────────────────────────┼──────────────────────────────┐
               pytorch                     hybrid_libtorch                  hybrid_mpi
    backward   torch.autograd              torch.autograd                   its own, C++ on BLAS
    strategy   Python (hybrid_model.py)    C++ (libtorch/)                  C++ (cpp/)
    messages   process groups              the same process groups          MPI
    optimizer  torch's                     torch's                          its own
                   └──────────────────────────────┼──────────────────────────────┘
                   equal: loss, every gradient, their norm, the weights, bytes along each axis

A Hybrid in Python stands beside each C++ model: its parameters say which piece of the whole a rank holds, and
its byte formula is what the C++ messages are compared with.

Cost: the same messages in all three, each counted where it is sent. hybrid_mpi is GPT-2, with experts or
without, and has neither ZeRO nor Megatron's sequence parallelism; leave it out with --versions where these are
wanted. --benchmark times whole steps, AdamW included, in turn, with one thread per rank.

    mpirun -np 4 python hybrid_languages.py --pp 2 --tp 2
    mpirun -np 4 python hybrid_languages.py --ep 2 --tp 2 --model gpt2-moe-tiny
    mpirun -np 8 python hybrid_languages.py --pp 2 --dp 2 --tp 2 --zero 1 --versions pytorch hybrid_libtorch
    mpirun -np 2 python hybrid_languages.py --tp 2 --benchmark --model gpt2-10m --batch 8 --sequence 128 --dtype float32
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common import comm
from common.comm import ledger
from common.comm.mesh import Mesh
from common.comm.placement import like
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson import languages
from common.lesson.comparison import records, report
from common.lesson.equality import OPTIMIZERS, Followed, Start, watch
from common.lesson.job import Job, Train, one_device
from common.lesson.measure import BenchmarkRecord, in_turn
from common.lesson.runner import run
from common.lesson.training import TrainingOptions, make_model
from common.models.configs import TransformerConfig, gpt2

from ep_moe import ExpertExchange
from hybrid_bytes import StepBytes
from hybrid_explain import title
from hybrid_layout import HybridOptions, Layout
from hybrid_model import Hybrid
from hybrid_training import HybridJob, alone, make_hybrid, make_job, train
from pp_schedules import make_schedule

LANGUAGES = {"hybrid_libtorch": "libtorch", "hybrid_mpi": "cpp-mpi"}
ORDERS = {"zigzag": "zigzag", "ring": "contiguous"}  # positions along sp, in the words of C++


def schedule_of(layout: Layout, mesh: Mesh) -> str:
    """Return the schedule as text, which all languages read."""
    return str(make_schedule(layout.schedule, mesh.shape["pp"], layout.micro_batches, layout.chunks))


def in_libtorch(
    config: TransformerConfig, layout: Layout, mesh: Mesh, whole: Mapping[str, Tensor], schedule: str
) -> Any:
    """Return hybrid_libtorch's model, on the process groups of the mesh. whole: the plain model's parameters."""
    import hybrid_libtorch

    def group(axes: list[str], places: list[int], purpose: str) -> dist.ProcessGroup | None:
        if not purpose:
            return mesh.group(*axes).pg
        part = mesh.part(axes[0], places or range(mesh.shape[axes[0]]), purpose)
        return part.pg if part else None

    axes = hybrid_libtorch.Mesh(list(mesh.shape.values()), mesh.world.rank, group)
    order = ORDERS[layout.attention]
    sharded = layout.sequence_parallel, layout.zero > 0
    return hybrid_libtorch.Hybrid(config, axes, dict(whole), schedule, order, *sharded)


class Named:
    """C++ tensors under their names, with a module's interface, placed as those of a model in Python."""

    def __init__(self, tensors: Mapping[str, Tensor], beside: Hybrid) -> None:
        placed, self.zero = dict(beside.named_parameters()), beside.zero
        for name, tensor in tensors.items():
            tensor.__dict__.update(placed[name].__dict__)
        self.named_parameters = tensors.items


def note_rows(exchanges: list[ExpertExchange], moved: int) -> None:
    """Tell the byte formula the rows that C++ moved along ep in the last step, in all layers and micro-batches."""
    for exchange in exchanges[:1]:
        exchange.rows_sent = [moved]


def train_libtorch(job: Job[HybridOptions]) -> Iterator[Tensor]:
    """Train under hybrid_libtorch; yield the loss of each global batch."""
    o, beside = job.options, make_hybrid(job.rt, job.options, job.mesh)
    job.model = beside.model
    plain = dict(make_model(o, job.rt.device).named_parameters())
    hybrid = in_libtorch(beside.config, o, job.mesh, plain, schedule_of(o, job.mesh))
    hybrid.take_messages()  # ZeRO's broadcast of the initial weights, which Python's ranks make alike
    exchanges = StepBytes(beside.model, beside.zero, job.mesh, o).exchanges
    optimizer = job.optimizer(Named(hybrid.parameters(), beside))
    for batch in job.batches():
        optimizer.zero_grad()
        loss = hybrid.step(*batch.whole())
        note_rows(exchanges, hybrid.rows_moved)
        for axes, operation, n_bytes, seconds in hybrid.take_messages():
            sent = Fraction(n_bytes).limit_denominator(job.rt.world_size)
            ledger.record(operation, axes, sent, seconds)
        optimizer.step()
        hybrid.stepped()
        yield loss


class InMPI:
    """Copies of hybrid_mpi's weights and gradients, with a module's interface, placed as those of a model in Python."""

    def __init__(self, model: Any, beside: Hybrid) -> None:
        self.model, self.placed, self.zero = model, dict(beside.named_parameters()), beside.zero

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight with its gradient)."""
        gradients = self.model.gradients()
        for name, values in self.model.weights().items():
            weight = like(torch.from_numpy(values), self.placed[name])
            weight.grad = torch.from_numpy(gradients[name])
            yield name, weight


def train_mpi(job: Job[HybridOptions]) -> Iterator[Tensor]:
    """Train under hybrid_mpi, whose optimizer is in C++; yield the loss of each global batch."""
    from mpi4py import MPI

    import hybrid_mpi

    o, c, mesh = job.options, job.options.model_config(), job.mesh
    beside = make_hybrid(job.rt, o, mesh)
    job.model = beside.model
    model = hybrid_mpi.GPT2(
        *(c.layers, c.width, c.heads, c.sequence),
        comm=MPI.COMM_WORLD,
        mesh=tuple(mesh.shape.values()),
        lists=schedule_of(o, mesh),
        sequence=o.sequence,
        order=ORDERS[o.attention],
        dtype=o.dtype,
        seed=o.seed,
        experts=c.experts,
        experts_per_token=c.experts_per_token,
        router=c.router,
    )
    exchanges = StepBytes(beside.model, beside.zero, mesh, o).exchanges
    rates = job.optimizer(InMPI(model, beside)).defaults  # of torch's optimizer, which takes no step
    for batch in job.batches():
        loss = model.loss_and_gradients(*(x.numpy() for x in batch.whole()))
        note_rows(exchanges, model.rows_moved)
        if "betas" in rates:
            model.adamw(rates["lr"], rates["betas"], rates["eps"], rates["weight_decay"])
        else:
            model.sgd(rates["lr"])
        for axes, n_bytes in model.bytes_sent.items():
            sent = Fraction(n_bytes).limit_denominator(job.rt.world_size)
            ledger.record("all", axes, sent, model.seconds[axes])
        yield torch.tensor(loss, dtype=torch.float64)


LOOPS: dict[str, Train] = {"pytorch": train, "hybrid_libtorch": train_libtorch, "hybrid_mpi": train_mpi}


@dataclass
class LanguageOptions(HybridOptions, without=("clip", "checkpointing", "precision", "explain", "check")):
    """Options of hybrid_languages.py."""

    model: str = "gpt2-tiny"
    """Name of a model in common/models/configs.py; hybrid_mpi has GPT-2 alone, with experts or without."""
    versions: tuple[str, ...] = tuple(LOOPS)
    """Versions to run."""


class Languages:
    """All versions on one mesh."""

    def __init__(self, rt: Runtime, o: LanguageOptions, mesh: Mesh) -> None:
        self.rt, self.o, self.mesh = rt, o, mesh

    def train(self, version: str, optimizer: str, start: Start) -> tuple[Followed, Fraction | None, Fraction]:
        """Train `o.steps` steps; return the results, and this rank's bytes counted and by formula."""
        rt, o, make = self.rt, self.o, OPTIMIZERS[optimizer]
        if version == "one device":
            plain = alone(rt, o, start(make_model(o, rt.device)), make)
            return watch(one_device(plain), plain), None, Fraction(0)
        job = make_job(rt, o, self.mesh, make, o.steps)
        found = watch(job.count(LOOPS[version](job)), job, self.mesh)
        if not all(comm.everyones(job.agree, rt.world)):  # along one axis, on one rank
            return found, job.sent, Fraction(-1)
        return found, job.sent, job.by_formula

    def benchmark(self, given: TrainingOptions) -> list[BenchmarkRecord]:
        """Time whole steps of `given.versions` in turn, AdamW included: `given.steps` rounds after a warm-up round."""
        rt, o = self.rt, self.o
        jobs = {name: make_job(rt, o, self.mesh, OPTIMIZERS["adamw"]) for name in given.versions}
        runs = {name: LOOPS[name](job) for name, job in jobs.items()}
        measured = in_turn({name: partial(next, run) for name, run in runs.items()}, given.steps, rt.world)
        sent = {name: formula_of(job) for name, job in jobs.items()}
        return [
            replace(
                record,
                implementation=f"{title(self.mesh)}, {record.implementation}",
                language=LANGUAGES.get(record.implementation, "pytorch"),
                backend="mpi" if record.implementation == "hybrid_mpi" else rt.backend,
            )
            for record in records(rt, o, measured, sent, axis="hybrid")
        ]


def formula_of(job: HybridJob) -> Fraction:
    """Return the bytes of a step by formula."""
    return sum(job.formula().all().values(), Fraction(0))


def check(o: LanguageOptions) -> None:
    """Raise UsageError for a version that does not exist or that lacks what is asked for."""
    if not o.versions:
        raise UsageError(f"--versions: choose at least one of {', '.join(LOOPS)}")
    if unknown := [name for name in o.versions if name not in LOOPS]:
        raise UsageError(f"--versions {unknown[0]}: choose from {', '.join(LOOPS)}")
    if o.attention not in ORDERS and set(o.versions) & set(LANGUAGES):
        raise UsageError(
            f"--attention {o.attention}: C++ has {' and '.join(ORDERS)}; or give --versions pytorch"
        )
    if o.zero > 1 and set(o.versions) & set(LANGUAGES):
        raise UsageError(f"--zero {o.zero}: C++ has stage 1; or give --versions pytorch")
    c = o.model_config()
    if c.experts and c.capacity_factor is not None and set(o.versions) & set(LANGUAGES):
        raise UsageError(
            f"--model {o.model}: an expert has a capacity, and C++ drops no token; or give --versions pytorch"
        )
    if "hybrid_mpi" in o.versions:
        shape = {name: getattr(c, name) for name in ("experts", "experts_per_token", "router")}
        lacking = {
            f"--model {o.model}": c != replace(gpt2(c.layers, c.width, c.heads, c.sequence), **shape),
            f"--zero {o.zero}": o.zero > 0,
            "--sequence-parallel": o.sequence_parallel,
        }
        for option, lacks in lacking.items():
            if lacks:
                raise UsageError(f"hybrid_mpi has no {option}: give --versions pytorch hybrid_libtorch")


def main(rt: Runtime, o: LanguageOptions) -> bool:
    """Compare the versions with one device and with one another, or with --benchmark time them."""
    o.validate()
    check(o)
    mesh = o.mesh(rt)
    languages.check_modules(rt, "hybrid_languages.py", [name for name in o.versions if name in LANGUAGES])
    lesson = Languages(rt, o, mesh)
    if o.benchmark:
        report(rt, o, lesson.benchmark(o))
        return True
    said = f"{title(mesh)}, {o.model}, {o.dtype}, {o.steps} steps"
    return languages.prove_languages(rt, o, mesh, lesson.train, lesson.benchmark, said)


if __name__ == "__main__":
    run(main, LanguageOptions)
