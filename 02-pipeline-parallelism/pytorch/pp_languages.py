"""One instruction list, three languages: each runs it on its model, equal to one device and to one another.

                        str(make_schedule("zb-h1", ranks, micro_batches))
               ┌────────────────────┬─────────┴──────────┬────────────────────┐
           pytorch            pp_libtorch          pytorch-mlp             pp_mpi
    model  GPT-2, tied head   the same             the MLP of chapter 01   the same
    W      put off in Python  put off in C++       put off in Python       a function called later
    sends  process group      process group        process group           MPI, pieces of 4000 bytes

The executor in Python knows no Transformer: a stage is any function of what the stage before sends. Cost: as each
lesson says; the two of a pair send the same activations and gradients. --benchmark times whole steps, in turn.

    mpirun -np 3 python pp_languages.py --schedule zb-v
    OMP_NUM_THREADS=1 mpirun -np 2 --bind-to core python pp_languages.py --benchmark --model gpt2-10m --dtype float32

B batch  I inputs of the MLP  n ranks
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from pp_deferred import Deferred
from pp_executor import Executor
from pp_schedules import KINDS, make_schedule
from pp_stages import evenly
from pp_training import PipelineOptions, check, make_batches, make_version, run_bytes, step_bytes
from torch import Tensor, nn

from common import comm, languages, ledger
from common.comm import Group
from common.comparison import check as check_versions
from common.comparison import report
from common.data.text import mlp_batch
from common.equality import OPTIMIZERS, Followed, follow
from common.ledger import Ledger
from common.lesson import DTYPES, run
from common.measure import BenchmarkRecord, in_turn, peak_memory
from common.mesh import Mesh
from common.models.mlp import MLP, sizes
from common.models.transformer import cross_entropy_sum
from common.placement import tie
from common.runtime import Runtime, UsageError
from common.training import Batches, TrainingOptions, Version, make_model, shape_of, training_step

PAIRS = (("pytorch", "pp_libtorch"), ("pytorch-mlp", "pp_mpi"))
LANGUAGES = {"pp_libtorch": "libtorch", "pp_mpi": "cpp-mpi"}


@dataclass
class LanguageOptions(PipelineOptions):
    """The schedule, and the shape of the MLP."""

    versions: tuple[str, ...] = tuple(itertools.chain(*PAIRS))
    """Which versions to run."""
    schedule: str = "zb-h1"
    """The schedule of all of them."""
    context: int = 16
    """Bytes that the MLP reads."""
    hidden: int = 64
    """Width of the MLP's hidden layers."""
    layers: int = 16
    """Its linear layers."""


class Samples(Batches):
    """What the MLP reads: all samples on every rank."""

    options: LanguageOptions

    def parts(self, step: int) -> list[tuple[Tensor, ...]]:
        """(x_BI, y_B) of each micro-batch."""
        o = self.options
        return [
            mlp_batch(self.text.train, o.seed, step, o.batch, o.context, lo, hi, DTYPES[o.dtype])
            for lo, hi in self.samples()
        ]


class Named:
    """Parameters under their names."""

    def __init__(self, named: dict[str, Tensor]) -> None:
        self.named = named

    def named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        """As a module's."""
        return self.named.items()


def plain_mlp(o: LanguageOptions) -> MLP:
    """The whole MLP."""
    return MLP(sizes(o.context, o.hidden, o.layers), o.seed, DTYPES[o.dtype])


def mlp_stage(model: MLP, layers: range, x_BI: Tensor, positions: Tensor) -> Tensor:
    """Some layers, with the GELU before each but the first of all: what passes on is the sum before the GELU."""
    for i in layers:
        x_BI = model.layers[i](x_BI if i == 0 else nn.functional.gelu(x_BI, approximate="tanh"))
    return x_BI


def mlp_version(rt: Runtime, o: LanguageOptions) -> Version:
    """The MLP under pp_executor.py."""
    model, mesh = plain_mlp(o), Mesh(rt.world, pp=rt.world_size, timeout=rt.timeout)
    schedule = make_schedule(o.schedule, rt.world_size, o.micro_batches, o.chunks)
    cuts, deferred = evenly(o.layers, schedule.stages), Deferred()
    mine = [s for s, rank in enumerate(schedule.owner) if rank == mesh.at["pp"]]
    if any(i.op == "W" for i in schedule.lists[mesh.at["pp"]]):
        deferred.replace(model)
    stages: dict[int, Any] = {s: partial(mlp_stage, model, cuts[s]) for s in mine}
    kept = tuple(f"layers.{i}." for s in mine for i in cuts[s])
    owner = Named({name: p for name, p in model.named_parameters() if name.startswith(kept)})
    executor = Executor(
        schedule,
        stages,
        mesh,
        cross_entropy_sum,
        lambda x_BI: (len(x_BI), o.hidden),
        DTYPES[o.dtype],
        deferred,
    )
    return Version(model, owner=owner, run=executor.run)


def libtorch_version(rt: Runtime, o: LanguageOptions) -> Version:
    """GPT-2 under pp_libtorch, on the process groups that the executor in Python has, too."""
    import pp_libtorch

    model, mesh = make_model(o, rt.device), Mesh(rt.world, pp=rt.world_size, timeout=rt.timeout)
    schedule = make_schedule(o.schedule, rt.world_size, o.micro_batches, o.chunks)
    groups = [mesh.part("pp", range(rt.world_size), way) for way in ("up", "down")]
    ranks = [pp_libtorch.Ranks(group.pg if group else None) for group in groups]
    pipe = pp_libtorch.Pipeline(dict(model.named_parameters()), model.config.heads, str(schedule), *ranks)
    mine: dict[str, Tensor] = pipe.parameters()
    holders = mesh.part("pp", (schedule.owner[0], schedule.owner[-1]), "tied")
    if holders and holders.size > 1:
        tie(mine["embed_tokens.weight"], holders)  # it counts once in the norm

    def step(parts: list[tuple[Tensor, ...]], scale: float, begin: Callable[[int], None]) -> Tensor:
        loss: Tensor = pipe.run(parts, scale)
        for operation, n_bytes, seconds in pipe.take_messages():
            ledger.record(operation, "pp", Fraction(n_bytes, rt.world_size), seconds)
        return loss

    return Version(model, owner=Named(mine), run=step)


class InMPI:
    """The MLP under pp_mpi, and its own optimizers."""

    def __init__(self, rt: Runtime, o: LanguageOptions, optimizer: str) -> None:
        import pp_mpi
        from mpi4py import MPI

        schedule = make_schedule(o.schedule, rt.world_size, o.micro_batches, o.chunks)
        shape = sizes(o.context, o.hidden, o.layers)
        self.model = pp_mpi.MLP(shape, str(schedule), MPI.COMM_WORLD, o.dtype, o.seed)
        self.optimizer, self.batches = optimizer, Samples(o, Group("one", 0, 1, (0,)), rt.device)
        self.cut: dict[int, tuple[Any, Any]] = {}

    def backward(self, t: int) -> float:
        """The loss of step t; leaves gradients."""
        if t not in self.cut:
            x, y = (torch.cat(pieces) for pieces in zip(*self.batches.parts(t), strict=True))
            self.cut[t] = x.numpy(), y.to(torch.uint8).numpy()
        loss: float = self.model.loss_and_gradients(*self.cut[t])
        ledger.record("send", "pp", self.model.bytes_sent, self.model.blocked_seconds)
        return loss

    def update(self) -> None:
        """A step, with the numbers of OPTIMIZERS."""
        if self.optimizer == "sgd":
            self.model.sgd(0.1)
        else:
            self.model.adamw(1e-3, epsilon=1e-5)

    def follow(self, steps: int, mesh: Mesh) -> Followed:
        """What common.equality.follow leaves of a model in torch."""
        found = Followed()

        def gathered(values: dict[str, Any]) -> dict[str, Tensor]:
            parts = comm.everyones(values, mesh.group("pp"))
            return {name: torch.from_numpy(x) for part in parts for name, x in part.items()}

        for t in range(steps):
            found.losses.append(self.backward(t))
            found.gradients.append(gathered(self.model.gradients()))
            found.norms.append(self.model.gradient_norm())
            self.update()
        found.weights = gathered(self.model.weights())
        return found


class Lesson:
    """All versions, their steps and their bytes by formula."""

    def __init__(self, rt: Runtime, o: LanguageOptions) -> None:
        self.rt, self.o = rt, o
        self.mesh, self.alone = Mesh(rt.world, pp=rt.world_size), Group("one", 0, 1, (rt.rank,))

    def version(self, name: str) -> tuple[Version, Batches]:
        """In torch; "one device" of GPT-2 and of the MLP."""
        rt, o = self.rt, self.o
        if name == "pytorch":
            return make_version(o.schedule, make_model(o, rt.device), rt, o), make_batches(
                o, rt.world, rt.device
            )
        if name == "pp_libtorch":
            return libtorch_version(rt, o), make_batches(o, rt.world, rt.device)
        if name == "pytorch-mlp":
            return mlp_version(rt, o), Samples(o, self.alone, rt.device)
        whole = replace(o, micro_batches=1)
        if name == "gpt2":
            return Version(make_model(o, rt.device)), make_batches(whole, rt.world, rt.device)
        return Version(plain_mlp(o)), Samples(whole, self.alone, rt.device)

    def train(self, pair: tuple[str, str], name: str, optimizer: str) -> tuple[Followed, Fraction, Fraction]:
        """What the steps leave, the bytes this rank sent, and those by formula."""
        o = self.o
        with Ledger() as counted:
            if name == "pp_mpi":
                found = InMPI(self.rt, o, optimizer).follow(o.steps, self.mesh)
            elif name == "one device":
                version, batches = self.version("gpt2" if pair == PAIRS[0] else "mlp")
                step = training_step(version, batches, self.alone)
                found = follow(version.model, optimizer, o.steps, step)
            else:
                version, batches = self.version(name)
                step = training_step(version, batches, self.alone)
                found = follow(version.owner or version.model, optimizer, o.steps, step, self.mesh)
        return found, counted.bytes(), self.formula(name)

    def formula(self, name: str, steps: int | None = None) -> Fraction:
        """Bytes this rank sends in the run, or in one step without the norm."""
        o, n = self.o, self.rt.world_size
        if name in PAIRS[0]:
            bytes_of = run_bytes if steps is None else step_bytes
            return bytes_of(o.schedule, shape_of(o), self.rt.world, o)
        owner = make_schedule(o.schedule, n, o.micro_batches, o.chunks).owner
        size, norm = DTYPES[o.dtype].itemsize, 8 if steps is None else 0
        sides = sum(self.rt.rank in border for border in itertools.pairwise(owner) if len(set(border)) > 1)
        beside = 0 if name == "pp_mpi" else Fraction(2 * (n - 1) * (size + norm), n)  # the loss, the norm
        return (steps or o.steps) * Fraction(sides * o.batch * o.hidden * size + beside)

    def step(self, name: str) -> Callable[[], object]:
        """Forward, backward and AdamW on one batch."""
        if name == "pp_mpi":
            mpi = InMPI(self.rt, self.o, "adamw")

            def whole() -> None:
                mpi.backward(0)
                mpi.update()

            return whole
        version, batches = self.version(name)
        optimizer = OPTIMIZERS["adamw"](version.parameters)
        step = training_step(version, batches, self.alone)

        def whole_in_torch() -> None:
            optimizer.zero_grad()
            step(0)
            optimizer.step()

        return whole_in_torch

    def benchmark(self, given: TrainingOptions) -> list[BenchmarkRecord]:
        """Whole steps of `given.versions` in turn; `given.steps` rounds after two to warm up."""
        o = self.o
        measured = in_turn({name: self.step(name) for name in given.versions}, given.steps, self.rt.world)
        mlp, gpt2, memory = plain_mlp(o), shape_of(o), peak_memory(self.rt.world)
        records = []
        for name, m in measured.items():
            of_gpt2 = name in PAIRS[0]
            tokens = o.batch * (o.sequence if of_gpt2 else 1)
            flop = gpt2.flops_per_token(o.sequence) if of_gpt2 else mlp.flops_per_sample()
            records.append(
                BenchmarkRecord(
                    strategy="pp",
                    implementation=f"{o.schedule}, {name}",
                    language=LANGUAGES.get(name, "pytorch"),
                    ranks=self.rt.world_size,
                    backend="mpi" if name == "pp_mpi" else self.rt.backend,
                    dtype=o.dtype,
                    model=o.model
                    if of_gpt2
                    else "mlp-" + "-".join(map(str, sizes(o.context, o.hidden, o.layers))),
                    parameters=sum(p.numel() for p in (gpt2 if of_gpt2 else mlp).parameters()),
                    tokens_per_step=tokens,
                    flop_per_step=tokens * flop,
                    step_seconds=m.seconds,
                    communication_seconds=statistics.median(m.blocked),
                    bytes_counted=statistics.median(m.sent),
                    bytes_formula=float(self.formula(name, 1)),
                    peak_memory_bytes=memory,
                    scaling="strong",
                )
            )
        return records


def main(rt: Runtime, o: LanguageOptions) -> bool:
    """Each pair: against one device and against one another; or with --benchmark all of them for time."""
    check_versions(rt, tuple(itertools.chain(*PAIRS)), o)
    if o.schedule not in KINDS:
        raise UsageError(f"--schedule {o.schedule!r} is unknown; choose from {', '.join(KINDS)}")
    if o.checkpointing or o.balance != "layers" or not o.model.startswith("gpt2"):
        raise UsageError(
            "pp_libtorch has GPT-2 in even stages: no other --model, --checkpointing or --balance"
        )
    if min(o.context, o.hidden) < 1:
        raise UsageError(f"--context {o.context} --hidden {o.hidden}: each must be at least 1")
    check(rt, replace(o, versions=(o.schedule,)))
    evenly(o.layers, rt.world_size * (KINDS[o.schedule].chunks or o.chunks))
    languages.check_modules(rt, "pp_languages.py", [name for name in o.versions if name in LANGUAGES])
    lesson = Lesson(rt, o)
    if o.benchmark:
        report(rt, o, lesson.benchmark(o))
        return True
    right = True
    for pair in PAIRS:
        if chosen := tuple(name for name in pair if name in o.versions):
            title = f"{o.schedule} on {rt.world_size} ranks against one device: {o.dtype}, {o.steps} steps"
            some = replace(o, versions=chosen)
            right &= languages.prove(
                rt, some, lesson.mesh, partial(lesson.train, pair), lesson.benchmark, title
            )
    return right


if __name__ == "__main__":
    run(main, LanguageOptions)
