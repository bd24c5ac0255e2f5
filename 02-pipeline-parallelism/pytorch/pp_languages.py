"""One instruction list run in three languages, equal to one device and to one another.

                        str(make_schedule("zb-h1", ranks, micro_batches))
               ┌────────────────────┬─────────┴──────────┬────────────────────┐
           pytorch            pp_libtorch          pytorch-mlp             pp_mpi
    model  GPT-2, tied head   the same             the MLP of chapter 01   the same
    W      deferred, Python   deferred, C++        deferred, Python        a function called later
    sends  process group      process group        process group           MPI, pieces of 4000 bytes

The two versions on the MLP are in pp_mlp.py. Cost: that of the schedule's lesson; both versions of a pair
send the same activations and gradients. --benchmark times whole steps, in turn; in each, every version cuts
a new batch of the text.

    mpirun -np 3 python pp_languages.py --schedule zb-v
    OMP_NUM_THREADS=1 mpirun -np 2 --bind-to core python pp_languages.py --benchmark --model gpt2-10m --dtype float32
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

from torch import Tensor

from common.comm import Group, ledger
from common.comm.ledger import Ledger
from common.comm.mesh import Mesh
from common.comm.placement import tie
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson import languages
from common.lesson.comparison import records, report
from common.lesson.equality import OPTIMIZERS, Followed, Start, unmoved, watch
from common.lesson.job import Job, Train, one_device
from common.lesson.measure import BenchmarkRecord, in_turn
from common.lesson.runner import run
from common.lesson.training import Batches, TrainingOptions, make_model, shape_of
from common.models.mlp import sizes

from pp_costs import step_bytes
from pp_interleaved import train
from pp_mlp import InMPI, MLPOptions, Samples, mlp_bytes, plain_mlp
from pp_mlp import train as train_mlp
from pp_schedules import KINDS, make_schedule
from pp_stages import evenly
from pp_training import check

PAIRS = (("pytorch", "pp_libtorch"), ("pytorch-mlp", "pp_mpi"))
LANGUAGES = {"pp_libtorch": "libtorch", "pp_mpi": "cpp-mpi"}


class Named:
    """Parameters under their names, with a module's interface."""

    def __init__(self, named: dict[str, Tensor]) -> None:
        self.named_parameters = named.items


def train_libtorch(job: Job[MLPOptions]) -> Iterator[Tensor]:
    """Train GPT-2 under pp_libtorch, on the process groups of the executor in Python; yield the loss of each batch."""
    import pp_libtorch

    o, model, mesh = job.options, job.model, job.mesh
    schedule = make_schedule(o.schedule, job.group.size, o.micro_batches, o.chunks)
    groups = [mesh.part("pp", range(job.group.size), way) for way in ("up", "down")]
    ranks = [pp_libtorch.Ranks(group.pg if group else None) for group in groups]
    pipe = pp_libtorch.Pipeline(dict(model.named_parameters()), model.config.heads, str(schedule), *ranks)
    mine: dict[str, Tensor] = pipe.parameters()
    holders = mesh.part("pp", (schedule.owner[0], schedule.owner[-1]), "tied")
    if holders and holders.size > 1:
        tie(mine["embed_tokens.weight"], holders)  # so that the norm counts it once
    optimizer = job.optimizer(Named(mine))  # of this rank's layers
    for batch in job.batches():  # the same on all ranks
        count = batch.count_targets()
        optimizer.zero_grad()
        loss_sum = pipe.run(batch.parts, 1 / count)  # in C++, also the sum of a tied head's gradients
        for operation, n_bytes, seconds in pipe.take_messages():
            ledger.record(operation, "pp", Fraction(n_bytes, job.group.size), seconds)
        optimizer.step()
        yield loss_sum / count


LOOPS: dict[str, Train] = {
    "pytorch": lambda job: train(job, KINDS[job.options.schedule]),
    "pp_libtorch": train_libtorch,
    "pytorch-mlp": train_mlp,
}


class Languages:
    """All versions, with their steps and their bytes by formula."""

    def __init__(self, rt: Runtime, o: MLPOptions) -> None:
        self.rt, self.o, self.mesh = rt, o, Mesh(rt.world, pp=rt.world_size, timeout=rt.timeout)

    def job(self, name: str, optimizer: str, steps: int | None = None) -> Job[Any]:
        """Return the run of a version in torch."""
        rt, o, mlp, make = self.rt, self.o, name in PAIRS[1], OPTIMIZERS[optimizer]
        model: Any = plain_mlp(o).to(rt.device) if mlp else make_model(o, rt.device)
        return Job(rt, o, name, model, self.mesh, "pp", make, steps, Samples if mlp else Batches)

    def train(
        self, pair: tuple[str, str], name: str, optimizer: str, start: Start = unmoved
    ) -> tuple[Followed, Fraction, Fraction]:
        """Train `o.steps` steps; return (the results, the bytes this rank sent, the bytes by formula)."""
        o, n = self.o, self.rt.world_size
        with Ledger() as counted:
            if name == "pp_mpi":
                found = InMPI(self.rt, o, optimizer).watched(o.steps, self.mesh)
            elif name == "one device":
                job, whole = self.job(pair[0], optimizer, o.steps), replace(o, micro_batches=1)
                job = replace(job, options=whole, model=start(job.model), mesh=Mesh(Group.alone()))
                found = watch(one_device(job), job)
            else:
                job = self.job(name, optimizer, o.steps)
                found = watch(LOOPS[name](job), job, self.mesh)
        norm = Fraction(0 if name == "pp_mpi" else 2 * (n - 1) * 8, n)  # pp_mpi's is inside MPI, uncounted
        return found, counted.bytes(), o.steps * (self.formula(name) + norm)

    def formula(self, name: str) -> Fraction:
        """Return the bytes this rank sends in a step."""
        o, rt = self.o, self.rt
        if name in PAIRS[1]:
            return mlp_bytes(o, rt.rank, rt.world_size, name == "pp_mpi")
        return step_bytes(KINDS)(o.schedule, shape_of(o), rt.world, o)

    def benchmark(self, given: TrainingOptions) -> list[BenchmarkRecord]:
        """Time whole steps of `given.versions` in turn, AdamW included: `given.steps` rounds after a warm-up round."""
        rt, o, done = self.rt, self.o, []
        runs: dict[str, Iterator[object]] = {
            name: InMPI(rt, o, "adamw").steps() if name == "pp_mpi" else LOOPS[name](self.job(name, "adamw"))
            for name in given.versions
        }
        measured = in_turn({name: partial(next, run) for name, run in runs.items()}, given.steps, rt.world)
        mlp, shape = plain_mlp(o), sizes(o.context, o.hidden, o.layers)
        for r in records(rt, o, measured, {name: self.formula(name) for name in measured}, axis="pp"):
            name = r.implementation
            if name in PAIRS[1]:
                r = replace(
                    r,
                    model="mlp-" + "-".join(map(str, shape)),
                    parameters=sum(p.numel() for p in mlp.parameters()),
                    tokens_per_step=o.batch,
                    flop_per_step=o.batch * mlp.flops_per_sample(),
                )
            backend, language = "mpi" if name == "pp_mpi" else rt.backend, LANGUAGES.get(name, "pytorch")
            done.append(
                replace(
                    r,
                    implementation=f"{o.schedule}, {name}",
                    language=language,
                    backend=backend,
                    seconds_by_axis=None,
                )
            )
        return done


def main(rt: Runtime, o: MLPOptions) -> bool:
    """Compare each pair with one device and with one another, or with --benchmark time all versions."""
    if o.schedule not in KINDS:
        raise UsageError(f"--schedule {o.schedule!r} is unknown; choose from {', '.join(KINDS)}")
    if not o.model.startswith("gpt2"):
        raise UsageError(f"--model {o.model}: pp_libtorch has GPT-2 alone; give gpt2-deep or gpt2-10m")
    kind = KINDS[o.schedule]
    o = check(rt, o, dict.fromkeys(itertools.chain(*PAIRS), kind))
    evenly(o.layers, len(kind.owner(rt.world_size, o.chunks)))
    languages.check_modules(rt, "pp_languages.py", [name for name in o.versions if name in LANGUAGES])
    lesson = Languages(rt, o)
    if o.benchmark:
        report(rt, o, lesson.benchmark(o))
        return True
    right = True
    for pair in PAIRS:
        if chosen := tuple(name for name in pair if name in o.versions):
            title = f"{o.schedule} on {rt.world_size} ranks, {o.dtype}, {o.steps} steps"
            some = replace(o, versions=chosen)
            right &= languages.prove_languages(
                rt, some, lesson.mesh, partial(lesson.train, pair), lesson.benchmark, title
            )
    return right


if __name__ == "__main__":
    run(main, MLPOptions)
