"""The rows of the proof table: options of a lesson, each a mesh with a model and a layout.

`table()` has all 35 ways to write 8 as pp x dp x ep x sp x tp and a sample of 12, 16 and 32, each with GPT-2, LLaMA and
LLaMA with 8 experts, of 8 heads and 4 layers, 8 where there are more than 2 stages. Schedule, attention, ZeRO, sequence
parallelism, checkpointing, clipping and dropout take turns from row to row. `of_meshes` makes rows of meshes in words.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from common.comm.mesh import AXES
from common.errors import UsageError
from common.models.configs import TransformerConfig, gpt2, llama, mixtral

from hybrid_layout import HybridOptions, check_batch, check_layout

MODELS = {
    "proof-gpt2": gpt2(layers=4, width=32, heads=8, sequence=48),
    "proof-llama": llama(layers=4, width=32, heads=8, kv_heads=2, mlp_width=44, sequence=48),
    "proof-moe": mixtral(layers=4, width=32, heads=8, kv_heads=4, mlp_width=12, sequence=48, experts=8),
}
MODELS["proof-gpt2-dropout"] = replace(MODELS["proof-gpt2"], dropout=0.1)
MODELS |= {f"{name}-deep": replace(shape, layers=8) for name, shape in MODELS.items()}

Shape = tuple[int, int, int, int, int]  # pp, dp, ep, sp, tp
SAMPLE: dict[int, list[Shape]] = {
    12: [(3, 2, 1, 1, 2), (2, 3, 1, 2, 1), (1, 1, 3, 1, 4), (1, 2, 2, 3, 1), (3, 1, 2, 2, 1)],
    16: [(2, 2, 2, 2, 1), (2, 2, 1, 2, 2), (1, 2, 2, 2, 2), (4, 1, 1, 1, 4), (2, 1, 4, 2, 1)],
    32: [(2, 2, 2, 2, 2), (4, 2, 1, 1, 4), (1, 2, 4, 2, 2)],
}

WORD = rf"(?:{'|'.join(AXES)})=[1-9]\d{{0,3}}|zero=[0-3]"
MOST = 128  # ranks of a mesh at most: all of them start on this machine


class RowOptions(HybridOptions):
    """Options of a row, with one of MODELS."""

    def model_config(self) -> TransformerConfig:
        """Return the shape of the model."""
        return MODELS[self.model]


def ways(ranks: int) -> list[Shape]:
    """List all ways to write `ranks` as a product of five factors."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [s for s in itertools.product(divisors, repeat=5) if math.prod(s) == ranks]  # type: ignore[misc]


def options(shape: Shape, model: str, turn: int) -> RowOptions:
    """Return the row's options; the variants that the mesh allows take turns."""
    pp, dp, ep, sp, tp = shape
    checkpointing = turn % 3 == 2
    if model == "gpt2" and sp == 1 and not checkpointing:
        model = "gpt2-dropout"
    schedules = (
        ("1f1b", "zb-h1", "gpipe") if pp in (3, 8) else ("1f1b", "zb-v", "interleaved", "zb-h1", "gpipe")
    )
    attentions = ("zigzag", "ring", "allgather", *(("ulysses",) if 8 // tp % sp == 0 else ()))
    return RowOptions(
        model=f"proof-{model}-deep" if pp > 2 else f"proof-{model}",
        batch=max(18, 2 * dp * ep),
        sequence=48,
        steps=2,
        pp=pp,
        dp=dp,
        ep=ep,
        sp=sp,
        tp=tp,
        schedule=schedules[turn % len(schedules)] if pp > 1 else "1f1b",  # type: ignore[arg-type]
        attention=attentions[turn % len(attentions)],
        sequence_parallel=tp > 1 and turn % 2 == 1,
        zero=(turn // 3 % 2 if pp > 1 else turn // 3 % 4) if dp * ep * sp > 1 else 0,  # type: ignore[arg-type]
        checkpointing=checkpointing,
        clip=0.5 * (turn // 2 % 2),
    )


def table(every: int = 1) -> dict[int, list[RowOptions]]:
    """Return all rows by the number of ranks, or one of `every`."""
    meshes = {8: ways(8), **SAMPLE}
    turns = itertools.count()
    cases = {
        n: [options(s, m, next(turns)) for s in shapes for m in ("gpt2", "llama", "moe")]
        for n, shapes in meshes.items()
    }
    return {n: chosen for n, all_of_n in cases.items() if (chosen := all_of_n[::every])}


def of_mesh(text: str) -> RowOptions:
    """Return the row of a mesh in words, `pp=2 dp=2 zero=1`. Raises UsageError for an invalid mesh."""
    words = text.split()
    wrong = [word for word in words if not re.fullmatch(WORD, word, re.ASCII)]
    if wrong or not words:
        of = f"; {wrong[0]!a:.40} is none of them" if wrong else ""
        raise UsageError(
            f"--meshes {text!a:.80}: give words like 'pp=2 dp=2 zero=1', of {', '.join(AXES)} with 1 or more and "
            f"zero with 0 to 3{of}"
        )
    given: dict[str, Any] = {word.split("=")[0]: int(word.split("=")[1]) for word in words}
    if len(given) < len(words):
        raise UsageError(f"--meshes {text!r} says one of them twice")
    shape = {axis: given.get(axis, 1) for axis in AXES}
    if (ranks := math.prod(shape.values())) > MOST:
        raise UsageError(
            f"--meshes {text!r} has {ranks} ranks, and all would start here; give at most {MOST}"
        )
    model = ("proof-moe" if shape["ep"] > 1 else "proof-llama") + ("-deep" if shape["pp"] > 2 else "")
    batch = max(18, 2 * shape["dp"] * shape["ep"])
    o = RowOptions(model=model, batch=batch, sequence=48, steps=2, **{"dp": 1, **given})
    check_layout(o, o.model_config(), shape)
    check_batch(o, o.model_config(), shape, o.batch, o.sequence)
    return o


def of_meshes(texts: Iterable[str]) -> dict[int, list[RowOptions]]:
    """Return a row per mesh, by the number of its ranks. Raises UsageError."""
    by_ranks: dict[int, list[RowOptions]] = {}
    for row in map(of_mesh, texts):
        by_ranks.setdefault(math.prod(getattr(row, axis) for axis in AXES), []).append(row)
    return by_ranks
