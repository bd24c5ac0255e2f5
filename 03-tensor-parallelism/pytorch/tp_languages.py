"""One Transformer layer, split along tp in three languages: equal to one device, and to one another.

    pytorch        split_layer of tp_megatron.py
    tp_libtorch    the same functions in C++ on LibTorch's autograd and a c10d process group
    tp_mpi         own forward and backward pass on MPI and BLAS, no torch

All three hold the same shards of GPT-2's layer, take the same x_BSD and all-reduce the same two tensors in
each pass. The loss is half the squared distance to a fixed y_BSD, divided by the number of tokens. dx, the
gradient for an earlier layer, is compared along with the gradients of the parameters.

    mpirun -np 2 python tp_languages.py
    OMP_NUM_THREADS=1 mpirun -np 2 --bind-to core python tp_languages.py --benchmark --model gpt2-10m --dtype float32
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import cast

import torch
from torch import Tensor

from common import random
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.lesson.comparison import check, report
from common.lesson.equality import Followed, Start, unmoved
from common.lesson.languages import (
    InLibTorch,
    InNumpy,
    InTorch,
    Part,
    check_modules,
    prove_languages,
    watch_layer,
)
from common.lesson.measure import BenchmarkRecord, in_turn, peak_memory
from common.lesson.runner import DTYPES, run
from common.models.transformer import Layer, Transformer

from tp_megatron import Region, check_split, split_layer
from tp_training import TensorOptions, tp_group

LANGUAGES = {"pytorch": "pytorch", "tp_libtorch": "libtorch", "tp_mpi": "cpp-mpi"}


@dataclass
class LanguageOptions(TensorOptions, without=("micro_batches", "scaling", "data", "check")):
    """Shape of the layer and of x."""


def plain_layer(o: LanguageOptions) -> Layer:
    """Return the first layer of the model, on the CPU."""
    return cast(Layer, Transformer(replace(o.model_config(), layers=1), o.seed, DTYPES[o.dtype]).layers[0])


def make(name: str, rt: Runtime, o: LanguageOptions, optimizer: str) -> Part:
    """Return the layer in the language `name`; "one device" is the plain layer."""
    layer, c = plain_layer(o), o.model_config()
    positions_S, named = torch.arange(o.sequence), dict(layer.named_parameters())
    if name == "tp_mpi":
        from mpi4py import MPI

        import tp_mpi

        comm = MPI.COMM_WORLD if rt.world_size > 1 else None
        return InNumpy(tp_mpi.Layer(c.width, c.heads, c.mlp_width, comm, o.seed, o.dtype), named, optimizer)
    if name == "tp_libtorch":
        import tp_libtorch

        ranks = tp_libtorch.Ranks(rt.world.pg)
        mine = tp_libtorch.split(named, ranks)
        return InLibTorch(ranks, lambda x: tp_libtorch.layer(x, mine, c.heads, ranks), mine, optimizer)
    if name == "pytorch":
        split_layer(layer, c, Region(tp_group(rt), sequence_parallel=False))
    return InTorch(lambda x: layer(x, positions_S), dict(layer.named_parameters()), optimizer)


def samples(o: LanguageOptions) -> tuple[Tensor, Tensor]:
    """Return (x_BSD, its target y_BSD): normal numbers that depend on the seed alone."""
    shape = (o.batch, o.sequence, o.model_config().width)
    made = (random.normals(o.seed, random.stream_of(name), math.prod(shape)).reshape(shape) for name in "xy")
    x, y = (torch.from_numpy(values).to(DTYPES[o.dtype]) for values in made)
    return x, y


def step(part: Part, x_BSD: Tensor, y_BSD: Tensor) -> tuple[float, Tensor]:
    """Run a forward and backward pass; return (loss, dx)."""
    tokens = y_BSD.shape[0] * y_BSD.shape[1]
    away_BSD = part.forward(x_BSD) - y_BSD
    return away_BSD.square().sum().item() / 2 / tokens, part.backward(away_BSD / tokens)


def train(
    rt: Runtime, o: LanguageOptions, name: str, optimizer: str, start: Start = unmoved
) -> tuple[Followed, Fraction, Fraction]:
    """Train `o.steps` steps; return (gathered results, bytes this rank sent, bytes by formula)."""
    x_BSD, y_BSD = samples(o)
    plain, mesh = dict(plain_layer(o).named_parameters()), Mesh(rt.world, tp=rt.world_size)
    part = start(make(name, rt, o, optimizer))
    found, sent = watch_layer(part, plain, mesh, "tp", o.steps, lambda part: step(part, x_BSD, y_BSD))
    return found, sent, o.steps * step_bytes(rt, o)


def step_bytes(rt: Runtime, o: LanguageOptions) -> Fraction:
    """Return the bytes a rank sends in a step: four all-reduces of x."""
    n, numbers = rt.world_size, o.batch * o.sequence * o.model_config().width
    return Fraction(4 * 2 * (n - 1) * numbers * DTYPES[o.dtype].itemsize, n)


def benchmark(rt: Runtime, o: LanguageOptions) -> list[BenchmarkRecord]:
    """Time forward, backward and AdamW of every version in turn: `o.steps` rounds after a warm-up."""
    x_BSD, y_BSD = samples(o)

    def whole_step(part: Part) -> None:
        step(part, x_BSD, y_BSD)
        part.update()

    cases: dict[str, Callable[[], object]] = {
        name: partial(whole_step, make(name, rt, o, "adamw")) for name in o.versions
    }
    measured = in_turn(cases, o.steps, rt.world)
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


def main(rt: Runtime, o: LanguageOptions) -> bool:
    """Prove equality of the versions with one device, or with --benchmark time them; one thread per library."""
    c, n = o.model_config(), rt.world_size
    check(rt, tuple(LANGUAGES), o)
    check_split(c, n)
    if c.mlp != "gelu" or c.post_norm or c.mlp_width % n:
        raise UsageError(
            f"--model {o.model}: the three languages share GPT-2's layer, its MLP divided by {n} ranks"
        )
    check_modules(rt, "tp_languages.py", ("tp_mpi", "tp_libtorch"))
    if o.benchmark:
        report(rt, o, benchmark(rt, o))
        return True
    title = f"a layer on {n} rank(s), {o.model}, {o.dtype}"
    return prove_languages(rt, o, Mesh(rt.world, tp=n), partial(train, rt, o), partial(benchmark, rt), title)


if __name__ == "__main__":
    run(main, LanguageOptions, versions=LANGUAGES)
