"""One mixture in three languages, its experts spread along ep: equal to one device, and to one another.

    pytorch        ep_moe.py: its exchange of rows replaces the experts of common/models/moe.py
    ep_libtorch    the same in C++ on LibTorch's autograd and a c10d process group
    ep_mpi         own forward and backward pass on MPI and BLAS, no torch

All hold the same experts, take the same tokens of this rank and drop none. The loss is half the squared
distance to a fixed y_BSD, divided by the number of tokens of all ranks. dx, the gradient for an earlier
layer, is compared along with the gradients of the parameters. All send the same number of bytes; ep_mpi sends
the rows for one expert after the other, so that they arrive sorted, where the others send the rows for all
experts of a rank at once.

    mpirun -np 2 python ep_languages.py
    mpirun -np 3 python ep_languages.py --model switch-tiny
    OMP_NUM_THREADS=1 mpirun -np 2 --bind-to core python ep_languages.py --benchmark --model mixtral-31m --dtype float32

B batch  S sequence  D width  E experts  n ranks
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from common import comm
from common.comm import sizes_of
from common.comm.ledger import Ledger
from common.comm.mesh import Mesh
from common.comm.placement import Shard, place, sum_gradients
from common.data.text import rank_slice
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson import languages
from common.lesson.comparison import check, report
from common.lesson.equality import Followed, Start, unmoved, whole
from common.lesson.languages import InLibTorch, InNumpy, InTorch, Part
from common.lesson.measure import BenchmarkRecord, in_turn, peak_memory
from common.lesson.runner import DTYPES, run
from common.lesson.training import TrainingOptions
from common.models.moe import MoE
from common.models.transformer import Transformer

from ep_moe import expert_parallel
from ep_training import ExpertOptions, check_split, load, mixtures

LANGUAGES = {"pytorch": "pytorch", "ep_libtorch": "libtorch", "ep_mpi": "cpp-mpi"}


@dataclass
class LanguageOptions(ExpertOptions, without=("micro_batches", "scaling", "data", "check")):
    """Shape of the mixture and of x."""


def plain(o: TrainingOptions) -> tuple[Transformer, MoE]:
    """Return one layer of the model, without a capacity, and its mixture: experts and their router."""
    c = replace(o.model_config(), layers=1, capacity_factor=None)
    model = Transformer(c, o.seed, DTYPES[o.dtype])
    return model, mixtures(model)[0]


class Lesson:
    """Mixture in every language, with its samples and its bytes by formula."""

    def __init__(self, rt: Runtime, o: TrainingOptions) -> None:
        self.rt, self.o, self.mesh = rt, o, Mesh(rt.world, ep=rt.world_size)
        self.group, (_, self.plain) = self.mesh.group("ep"), plain(o)
        self.x_BSD, self.y_BSD = languages.samples(o)
        self.slices = [rank_slice(o.batch, rank, rt.world_size) for rank in range(rt.world_size)]
        self.choices: list[Tensor] = []  # of every sample, in each step of the last reference

    def make(self, name: str, optimizer: str) -> Part:
        """Return the mixture in a language; "one device" is the plain one, which records its choices."""
        c, o, (model, moe) = self.o.model_config(), self.o, plain(self.o)
        named = dict(moe.named_parameters())
        if name == "one device":
            self.choices = []
            moe.observe = lambda routing: self.choices.append(routing.experts_BSK)
            return InTorch(moe, named, optimizer)
        if name == "ep_mpi":
            from mpi4py import MPI

            import ep_mpi

            sizes = (c.width, c.mlp_width, c.experts, c.experts_per_token)
            ranks = MPI.COMM_WORLD if self.rt.world_size > 1 else None
            layer = ep_mpi.Layer(*sizes, ranks, o.seed, o.dtype, c.mlp, c.router)
            return InNumpy(layer, named, optimizer)
        if name == "ep_libtorch":
            import ep_libtorch

            ranks = ep_libtorch.Ranks(self.rt.world.pg)
            mine = ep_libtorch.split(named, ranks)
            call = partial(
                ep_libtorch.mixture, mine=mine, k=c.experts_per_token, router=c.router, ranks=ranks
            )
            return InLibTorch(ranks, call, mine, optimizer, partial(ep_libtorch.sum_gradients, mine, ranks))
        expert_parallel(model, self.group)
        named = dict(moe.named_parameters())
        return InTorch(moe, named, optimizer, partial(sum_gradients, list(named.values()), self.mesh))

    def step(self, part: Part, alone: bool = False) -> tuple[float, Tensor]:
        """Run a forward and backward pass on this rank's samples, or `alone` on all; return (loss, dx)."""
        lo, hi = (0, self.o.batch) if alone else self.slices[self.group.rank]
        tokens = self.o.batch * self.o.sequence
        away_BSD = part.forward(self.x_BSD[lo:hi]) - self.y_BSD[lo:hi]
        return away_BSD.square().sum().item() / 2 / tokens, part.backward(away_BSD / tokens)

    def train(self, name: str, optimizer: str, start: Start = unmoved) -> tuple[Followed, Fraction, Fraction]:
        """Train `o.steps` steps; return (gathered results, mean bytes per rank, bytes by formula)."""
        alone = name == "one device"
        lies = torch.empty(0)
        if not alone and self.group.size > 1:
            place(lies, "ep", Shard(0, tuple(hi - lo for lo, hi in self.slices)))

        def step(part: Part) -> tuple[float, Tensor]:
            loss, dx = self.step(part, alone)
            total = sum([loss] if alone else comm.everyones(loss, self.group))
            return total, whole(dx, lies, self.mesh)

        part, plain = start(self.make(name, optimizer)), dict(self.plain.named_parameters())
        found, sent = languages.watch_layer(part, plain, self.mesh, "ep", self.o.steps, step)
        formula = sum((self.formula(experts_BSK) for experts_BSK in self.choices), Fraction(0))
        return found, self.mean(sent), formula

    def mean(self, sent: Fraction) -> Fraction:
        """Return the mean over the ranks."""
        return sum(comm.everyones(sent, self.group), Fraction(0)) / self.group.size

    def formula(self, experts_BSK: Tensor) -> Fraction:
        """Return the mean bytes per rank of a step in which the samples choose these experts."""
        c, n, size = self.o.model_config(), self.group.size, DTYPES[self.o.dtype].itemsize
        away = 0
        for rank, (lo, hi) in enumerate(self.slices):
            of_ranks = load(experts_BSK[lo:hi], c.experts).split(sizes_of(c.experts, n))
            away += sum(int(rows.sum()) for r, rows in enumerate(of_ranks) if r != rank)
        counts, router = 8 * c.experts * (n - 1), 2 * (n - 1) * self.plain.router.weight.numel() * size
        return Fraction(4 * away * c.width * size + counts + router, n)

    def benchmark(self, o: TrainingOptions) -> list[BenchmarkRecord]:
        """Time forward, backward and AdamW of every version in turn: `o.steps` rounds after a warm-up."""

        def whole_step(part: Part) -> None:
            self.step(part)
            part.update()

        self.step(self.make("one device", "adamw"), alone=True)
        formula, sent = float(self.formula(self.choices[0])), {}
        cases: dict[str, Callable[[], object]] = {}
        for name in o.versions:
            part = self.make(name, "adamw")
            with Ledger() as ledger:
                self.step(part)  # count bytes with the first weights, because training changes the choices
            sent[name] = float(self.mean(ledger.bytes()))
            cases[name] = partial(whole_step, part)
        measured = in_turn(cases, o.steps, self.rt.world)
        tokens, numbers = o.batch * o.sequence, sum(p.numel() for p in self.plain.parameters())
        return [
            BenchmarkRecord(
                strategy="ep",
                implementation=f"{name}-mixture" if name == "pytorch" else name,
                language=LANGUAGES[name],
                ranks=self.rt.world_size,
                backend="mpi" if name == "ep_mpi" else self.rt.backend,
                dtype=o.dtype,
                model=f"mixture of {o.model}",
                parameters=numbers,
                tokens_per_step=tokens,
                flop_per_step=tokens * 6 * self.plain.active_weights(),
                step_seconds=m.seconds,
                communication_seconds=statistics.median(m.blocked) if name == "pytorch" else None,
                bytes_counted=sent[name],
                bytes_formula=formula,
                peak_memory_bytes=peak_memory(self.rt.world),
                scaling="strong",
            )
            for name, m in measured.items()
        ]


def main(rt: Runtime, o: LanguageOptions) -> bool:
    """Prove equality of the versions with one device, or with --benchmark time them."""
    check(rt, tuple(LANGUAGES), o)
    c, n = o.model_config(), rt.world_size
    check_split(c.experts, n)
    if o.batch < n:
        raise UsageError(
            f"--batch {o.batch} is too small for {n} ranks; give at least {n}, so that each has a sample"
        )
    if c.router == "sigmoid" or c.shared_experts or c.bias != (c.mlp == "gelu"):
        raise UsageError(f"--model {o.model}: the languages share mixtral's mixture and switch's")
    languages.check_modules(rt, "ep_languages.py", [name for name in o.versions if name != "pytorch"])
    lesson = Lesson(rt, o)
    if o.benchmark:
        report(rt, o, lesson.benchmark(o))
        return True
    title = f"a mixture on {rt.world_size} rank(s), {o.model}, {o.dtype}"
    return languages.prove_languages(rt, o, lesson.mesh, lesson.train, lesson.benchmark, title)


if __name__ == "__main__":
    run(main, LanguageOptions, versions=LANGUAGES)
