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

import math
import statistics
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor
from tp_layers import LANGUAGES, LanguageOptions, make, plain_layer
from tp_megatron import check_split

from common import random
from common.comparison import check, report
from common.equality import Followed, Start, unmoved
from common.errors import UsageError
from common.languages import Part, check_modules, follow, prove
from common.lesson import DTYPES, run
from common.measure import BenchmarkRecord, in_turn, peak_memory
from common.mesh import Mesh
from common.runtime import Runtime

VERSIONS = tuple(LANGUAGES)


def samples(o: LanguageOptions) -> tuple[Tensor, Tensor]:
    """x_BSD and the y_BSD that it should become: normal numbers, a function of the seed."""
    shape = (o.batch, o.sequence, o.model_config().width)
    made = (random.normals(o.seed, random.stream_of(name), math.prod(shape)).reshape(shape) for name in "xy")
    x, y = (torch.from_numpy(values).to(DTYPES[o.dtype]) for values in made)
    return x, y


def step(part: Part, x_BSD: Tensor, y_BSD: Tensor) -> tuple[float, Tensor]:
    """(loss, dx) of a forward and backward pass."""
    tokens = y_BSD.shape[0] * y_BSD.shape[1]
    away_BSD = part.forward(x_BSD) - y_BSD
    return away_BSD.square().sum().item() / 2 / tokens, part.backward(away_BSD / tokens)


def train(
    rt: Runtime, o: LanguageOptions, name: str, optimizer: str, start: Start = unmoved
) -> tuple[Followed, Fraction, Fraction]:
    """What the steps leave, gathered, the bytes this rank sent, and those by formula."""
    x_BSD, y_BSD = samples(o)
    plain, mesh = dict(plain_layer(o).named_parameters()), Mesh(rt.world, tp=rt.world_size)
    part = start(make(name, rt, o, optimizer))
    found, sent = follow(part, plain, mesh, "tp", o.steps, lambda part: step(part, x_BSD, y_BSD))
    return found, sent, o.steps * step_bytes(rt, o)


def step_bytes(rt: Runtime, o: LanguageOptions) -> Fraction:
    """Bytes a rank sends in a step: four all-reduces of x."""
    n, numbers = rt.world_size, o.batch * o.sequence * o.model_config().width
    return Fraction(4 * 2 * (n - 1) * numbers * DTYPES[o.dtype].itemsize, n)


def benchmark(rt: Runtime, o: LanguageOptions) -> list[BenchmarkRecord]:
    """Forward, backward and AdamW of every version in turn; `o.steps` rounds after one to warm up."""
    x_BSD, y_BSD = samples(o)

    def case(name: str) -> Callable[[], object]:
        part = make(name, rt, o, "adamw")

        def whole_step() -> None:
            step(part, x_BSD, y_BSD)
            part.update()

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
    check_modules(rt, "tp_languages.py", ("tp_mpi", "tp_libtorch"))


def main(rt: Runtime, o: LanguageOptions) -> bool:
    """Prove, or with --benchmark time."""
    prepare(rt, o)
    if o.benchmark:
        report(rt, o, benchmark(rt, o))
        return True
    mesh = Mesh(rt.world, tp=rt.world_size)
    title = f"a layer on {rt.world_size} rank(s), {o.model}, {o.dtype}"
    return prove(rt, o, mesh, partial(train, rt, o), partial(benchmark, rt), title)


if __name__ == "__main__":
    run(main, LanguageOptions)
