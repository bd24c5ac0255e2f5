"""One instruction list, three languages: each runs it on its model, equal to one device and to one another.

                        str(make_schedule("zb-h1", ranks, micro_batches))
               ┌────────────────────┬─────────┴──────────┬────────────────────┐
           pytorch            pp_libtorch          pytorch-mlp             pp_mpi
    model  GPT-2, tied head   the same             the MLP of chapter 01   the same
    W      put off in Python  put off in C++       put off in Python       a function called later
    sends  process group      process group        process group           MPI, pieces of 4000 bytes

The two on the MLP are in pp_mlp.py. Cost: as each lesson says; the two of a pair send the same activations and
gradients. --benchmark times whole steps, in turn.

    mpirun -np 3 python pp_languages.py --schedule zb-v
    OMP_NUM_THREADS=1 mpirun -np 2 --bind-to core python pp_languages.py --benchmark --model gpt2-10m --dtype float32
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from pp_mlp import InMPI, MLPOptions, Named, Samples, mlp_bytes, mlp_version, plain_mlp
from pp_schedules import KINDS, make_schedule
from pp_stages import evenly
from pp_training import check, make_batches, make_version, run_bytes, step_bytes
from torch import Tensor

from common import languages, ledger
from common.comm import Group
from common.comparison import check as check_versions
from common.comparison import report
from common.equality import OPTIMIZERS, Followed, Start, follow, unmoved
from common.errors import UsageError
from common.ledger import Ledger
from common.lesson import run
from common.measure import BenchmarkRecord, in_turn, peak_memory
from common.mesh import Mesh
from common.models.mlp import sizes
from common.placement import tie
from common.runtime import Runtime
from common.training import Batches, TrainingOptions, Version, make_model, shape_of, training_step

PAIRS = (("pytorch", "pp_libtorch"), ("pytorch-mlp", "pp_mpi"))
LANGUAGES = {"pp_libtorch": "libtorch", "pp_mpi": "cpp-mpi"}


@dataclass
class LanguageOptions(MLPOptions, without=("balance", "checkpointing", "scaling")):
    """Options of pp_mlp.py; all versions."""

    versions: tuple[str, ...] = tuple(itertools.chain(*PAIRS))
    """Which versions to run."""


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

    def train(
        self, pair: tuple[str, str], name: str, optimizer: str, start: Start = unmoved
    ) -> tuple[Followed, Fraction, Fraction]:
        """What the steps leave, the bytes this rank sent, and those by formula."""
        o = self.o
        with Ledger() as counted:
            if name == "pp_mpi":
                found = InMPI(self.rt, o, optimizer).follow(o.steps, self.mesh)
            elif name == "one device":
                version, batches = self.version("gpt2" if pair == PAIRS[0] else "mlp")
                step = training_step(version, batches, self.alone)
                found = follow(start(version.model), optimizer, o.steps, step)
            else:
                version, batches = self.version(name)
                step = training_step(version, batches, self.alone)
                found = follow(version.owner or version.model, optimizer, o.steps, step, self.mesh)
        return found, counted.bytes(), self.formula(name)

    def formula(self, name: str, steps: int | None = None) -> Fraction:
        """Bytes this rank sends in the run, or in one step without the norm."""
        o, rt = self.o, self.rt
        if name in PAIRS[0]:
            bytes_of = run_bytes if steps is None else step_bytes
            return bytes_of(o.schedule, shape_of(o), rt.world, o)
        return mlp_bytes(o, rt.rank, rt.world_size, name == "pp_mpi", steps)

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
        """Whole steps of `given.versions` in turn; `given.steps` rounds after one to warm up."""
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
    if not o.model.startswith("gpt2"):
        raise UsageError(f"--model {o.model}: pp_libtorch has GPT-2 alone; give gpt2-deep or gpt2-10m")
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
            title = f"{o.schedule} on {rt.world_size} ranks, {o.dtype}, {o.steps} steps"
            some = replace(o, versions=chosen)
            right &= languages.prove(
                rt, some, lesson.mesh, partial(lesson.train, pair), lesson.benchmark, title
            )
    return right


if __name__ == "__main__":
    run(main, LanguageOptions)
