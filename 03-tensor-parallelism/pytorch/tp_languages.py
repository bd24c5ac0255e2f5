"""One Transformer layer, split along tp in three languages: equal to one device, and to one another.

    pytorch        split_layer of tp_megatron.py
    tp_libtorch    the same functions in C++ on LibTorch's autograd and a c10d process group
    tp_mpi         own forward and backward pass on MPI and BLAS, no torch

All three hold the same pieces of GPT-2's layer, take the same x_BSD and sum the same two messages each way. The loss is
half the squared distance to a fixed y_BSD, over the number of tokens. dx, which a layer before would get, is compared
with the gradients.

    mpirun -np 2 python tp_languages.py
    OMP_NUM_THREADS=1 mpirun -np 2 --bind-to core python tp_languages.py --benchmark --model gpt2-10m --dtype float32
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import torch
from rich.table import Table
from torch import Tensor
from tp_layers import LANGUAGES, LanguageOptions, Split, make, plain_layer
from tp_megatron import check_split

from common import random
from common.comparison import check, report
from common.equality import OPTIMIZERS, TOLERANCE, Followed, compare, whole, worst_of_world
from common.lesson import DTYPES, console, run
from common.measure import BenchmarkRecord, in_turn, peak_memory
from common.mesh import Mesh
from common.placement import Shard, gradient_norm, place
from common.proof import Proof
from common.runtime import Runtime, UsageError

VERSIONS = tuple(LANGUAGES)


def samples(o: LanguageOptions) -> tuple[Tensor, Tensor]:
    """x_BSD and the y_BSD that it should become: normal numbers, a function of the seed."""
    shape = (o.batch, o.sequence, o.model_config().width)
    made = (random.normals(o.seed, random.stream_of(name), math.prod(shape)).reshape(shape) for name in "xy")
    x, y = (torch.from_numpy(values).to(DTYPES[o.dtype]) for values in made)
    return x, y


def step(split: Split, x_BSD: Tensor, y_BSD: Tensor) -> tuple[float, Tensor]:
    """(loss, dx) of a forward and backward pass."""
    tokens = y_BSD.shape[0] * y_BSD.shape[1]
    away_BSD = split.forward(x_BSD) - y_BSD
    return away_BSD.square().sum().item() / 2 / tokens, split.backward(away_BSD / tokens)


def train(name: str, rt: Runtime, o: LanguageOptions, optimizer: str) -> tuple[Followed, Fraction]:
    """What the steps leave, gathered, and the bytes this rank sent."""
    mesh = Mesh(rt.world, tp=rt.world_size)
    plain = dict(plain_layer(o).named_parameters())
    split, found, sent = make(name, rt, o, optimizer), Followed(), Fraction(0)
    x_BSD, y_BSD = samples(o)

    def lying(name: str, value: Tensor) -> Tensor:
        """The piece, and how it lies: along the dimension in which it is shorter than the plain parameter."""
        cut = [dim for dim in range(value.ndim) if value.shape[dim] != plain[name].shape[dim]]
        value = value.clone()
        if cut:
            place(value, "tp", Shard(cut[0]))
        return value

    for _ in range(o.steps):
        loss, dx = step(split, x_BSD, y_BSD)
        sent += split.sent()
        pieces = {name: (lying(name, p), g) for name, (p, g) in split.pieces().items()}
        for p, g in pieces.values():
            p.grad = g
        found.losses.append(loss)
        found.gradients.append({name: whole(g, p, mesh) for name, (p, g) in pieces.items()} | {"dx": dx})
        found.norms.append(gradient_norm((p for p, _ in pieces.values()), mesh).item())
        split.update()
    found.weights = {name: whole(p, lying(name, p), mesh) for name, (p, _) in split.pieces().items()}
    return found, sent


def step_bytes(rt: Runtime, o: LanguageOptions) -> Fraction:
    """Bytes a rank sends in a step: four all-reduces of x."""
    n, numbers = rt.world_size, o.batch * o.sequence * o.model_config().width
    return Fraction(4 * 2 * (n - 1) * numbers * DTYPES[o.dtype].itemsize, n)


def prove(rt: Runtime, o: LanguageOptions) -> bool:
    """Every version against one device, and against every other."""
    mesh, proof = Mesh(rt.world, tp=rt.world_size), Proof(DTYPES[o.dtype])
    table = Table(title="largest relative difference between two versions", title_justify="left")
    for column in ("versions", "", "optimizer", "difference"):
        table.add_column(column, justify="right" if column == "difference" else "left")
    largest = 0.0
    for optimizer in OPTIMIZERS:
        reference, _ = train("one device", rt, o, optimizer)
        runs = {name: train(name, rt, o, optimizer) for name in o.versions}
        for name, (found, sent) in runs.items():
            differences = worst_of_world(compare(reference, found), mesh)
            proof.add(name, optimizer, differences, sent, o.steps * step_bytes(rt, o))
        for a, b in itertools.combinations(o.versions, 2):
            kinds = worst_of_world(compare(runs[a][0], runs[b][0]), mesh).values()
            value = max(d.value for d in kinds)
            table.add_row(a, b, optimizer, f"{value:.1e}")
            largest = max(largest, value)
    out, limit = console(rt), 100 * TOLERANCE[DTYPES[o.dtype]]
    out.print(
        proof.tables(f"a layer on {rt.world_size} rank(s) against one device: {o.model}, {o.dtype}"), table
    )
    records = benchmark(rt, replace(o, steps=5))
    report(rt, o, [replace(r, equal=proof.equal, largest_difference=proof.largest) for r in records])
    out.print(proof.sentence())
    agree = "agree with one another within" if largest <= limit else "do NOT agree with one another within"
    out.print(f"the languages {agree} {limit:.0e}")
    return proof.holds and largest <= limit


def benchmark(rt: Runtime, o: LanguageOptions) -> list[BenchmarkRecord]:
    """Forward, backward and AdamW of every version in turn; `o.steps` rounds after two to warm up."""
    x_BSD, y_BSD = samples(o)

    def case(name: str) -> Callable[[], object]:
        split = make(name, rt, o, "adamw")

        def whole_step() -> None:
            step(split, x_BSD, y_BSD)
            split.update()

        return whole_step

    measured = in_turn({name: case(name) for name in o.versions}, o.steps, rt.world)
    c, tokens = o.model_config(), o.batch * o.sequence
    numbers = sum(p.numel() for p in plain_layer(o).parameters())
    matrices = 4 * c.width**2 + 2 * c.width * c.mlp_width
    return [
        BenchmarkRecord(
            strategy="tp",
            implementation=f"{name}-layer" if name == "pytorch" else name,
            language=LANGUAGES[name],
            ranks=rt.world_size,
            backend="mpi" if name == "tp_mpi" else rt.backend,
            dtype=o.dtype,
            model=f"layer of {o.model}",
            parameters=numbers,
            tokens_per_step=tokens,
            flop_per_step=tokens * (6 * matrices + 12 * o.sequence * c.width),
            step_seconds=m.seconds,
            communication_seconds=statistics.median(m.blocked) if name == "pytorch" else None,
            bytes_counted=statistics.median(m.sent) if name == "pytorch" else None,
            bytes_formula=float(step_bytes(rt, o)),
            peak_memory_bytes=peak_memory(rt.world),
            scaling="strong",
        )
        for name, m in measured.items()
    ]


def prepare(rt: Runtime, o: LanguageOptions) -> None:
    """Refuse what cannot run; give every library of this rank one thread."""
    check(rt, VERSIONS, o)
    c, n = o.model_config(), rt.world_size
    check_split(c, n)
    if c.mlp != "gelu" or c.mlp_width % n:
        raise UsageError(
            f"--model {o.model}: the three languages share GPT-2's layer, its MLP divided by {n} ranks"
        )
    how = f"mpirun -np {n} python tp_languages.py"
    if n > 1 and rt.launcher not in ("openmpi", "mpich", "slurm"):
        raise UsageError(f"tp_mpi needs MPI between its {n} ranks; start them with {how}")
    if rt.device.type != "cpu":
        raise UsageError("tp_mpi computes on CPUs: give --device cpu")
    try:
        import tp_libtorch  # noqa: F401
        import tp_mpi  # noqa: F401
        from fived import blas
    except ModuleNotFoundError as error:
        raise UsageError(f"the Python module {error.name} is not built; run make setup") from None
    torch.set_num_threads(1)
    blas.set_threads(1)


def main(rt: Runtime, o: LanguageOptions) -> bool:
    """Prove, or with --benchmark time."""
    prepare(rt, o)
    if not o.benchmark:
        return prove(rt, o)
    report(rt, o, benchmark(rt, o))
    return True


if __name__ == "__main__":
    run(main, LanguageOptions)
