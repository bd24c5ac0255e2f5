"""The proof table: every way to write 8 as pp x dp x ep x sp x tp, and some of 12, 16 and 32, against one device.

    python hybrid_proof.py                          all rows: a quarter of an hour on two cores
    python hybrid_proof.py --write docs/proof.md    the same into a file: make proof
    python hybrid_proof.py --every 9                every ninth row
    python hybrid_proof.py --meshes "dp=4 zero=3" "pp=2 tp=2"        these meshes, of LLaMA, with experts where ep > 1

A row is a mesh and a model: GPT-2, LLaMA, or LLaMA with 8 experts, of 8 heads and 4 layers, 8 where there are more than
2 stages. Schedule, attention, ZeRO, sequence parallelism, checkpointing, clipping and dropout take turns from row to
row. Compared are the loss, every gradient and their norm in two steps, and the weights after them, with SGD and with
AdamW, in float64; the bytes of each step and group with the formula, on every rank; and the bits of weights that
several ranks hold.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from hybrid_bytes import StepBytes
from hybrid_check import check
from hybrid_training import Counted, HybridOptions, make_hybrid, mesh_step, reference, samples_of, timed
from rich.console import Console

from common import comm
from common.comm import Group
from common.equality import (
    KINDS,
    OPTIMIZERS,
    TOLERANCE,
    Difference,
    Followed,
    compare,
    follow,
    unequal_replicas,
    worst_of_world,
)
from common.lesson import DTYPES, write_records
from common.measure import BenchmarkRecord
from common.mesh import AXES, Mesh
from common.models.configs import CONFIGS, gpt2, llama, mixtral
from common.runtime import Runtime, UsageError
from common.spawn import RankError, spawn

MODELS = {
    "gpt2": gpt2(layers=4, width=32, heads=8, sequence=48),
    "llama": llama(layers=4, width=32, heads=8, kv_heads=2, mlp_width=44, sequence=48),
    "moe": mixtral(layers=4, width=32, heads=8, kv_heads=4, mlp_width=12, sequence=48, experts=8),
}
MODELS["gpt2-dropout"] = replace(MODELS["gpt2"], dropout=0.1)
for name, shape in MODELS.items():
    CONFIGS[f"proof-{name}"] = shape
    CONFIGS[f"proof-{name}-deep"] = replace(shape, layers=8)

Shape = tuple[int, int, int, int, int]  # pp, dp, ep, sp, tp
SAMPLE: dict[int, list[Shape]] = {
    12: [(3, 2, 1, 1, 2), (2, 3, 1, 2, 1), (1, 1, 3, 1, 4), (1, 2, 2, 3, 1), (3, 1, 2, 2, 1)],
    16: [(2, 2, 2, 2, 1), (2, 2, 1, 2, 2), (1, 2, 2, 2, 2), (4, 1, 1, 1, 4), (2, 1, 4, 2, 1)],
    32: [(2, 2, 2, 2, 2), (4, 2, 1, 1, 4), (1, 2, 4, 2, 2)],
}


HEADS = (*AXES, "model", "with", "loss", "gradients", "norm", "weights", "equal")
WORD = rf"(?:{'|'.join(AXES)})=[1-9]\d{{0,3}}|zero=[0-3]"
MOST = 128  # ranks of a mesh: all of them start on this machine


def ways(ranks: int) -> list[Shape]:
    """All ways to write `ranks` as a product of five."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [s for s in itertools.product(divisors, repeat=5) if math.prod(s) == ranks]  # type: ignore[misc]


@dataclass(frozen=True)
class Row:
    """A mesh, a model and a layout; afterwards what was found, for each optimizer and kind."""

    options: HybridOptions
    found: dict[str, dict[str, Difference]] | None = None
    bytes_agree: bool = False
    apart: list[str] = field(default_factory=list)
    """Parameters of which ranks hold different replicas."""
    seconds: float = 0.0
    record: BenchmarkRecord | None = None

    @property
    def largest(self) -> float:
        """The largest difference of the row."""
        return max(d.value for kinds in (self.found or {}).values() for d in kinds.values())

    @property
    def holds(self) -> bool:
        """Equal, in numbers and in bytes, and replicas to the bit."""
        equal = self.largest <= TOLERANCE[DTYPES[self.options.dtype]]
        return equal and self.bytes_agree and not self.apart


def options(shape: Shape, model: str, turn: int) -> HybridOptions:
    """The row's options: what the mesh allows takes turns."""
    pp, dp, ep, sp, tp = shape
    checkpointing = turn % 3 == 2
    if model == "gpt2" and sp == 1 and not checkpointing:
        model = "gpt2-dropout"
    schedules = (
        ("1f1b", "zb-h1", "gpipe") if pp in (3, 8) else ("1f1b", "zb-v", "interleaved", "zb-h1", "gpipe")
    )
    attentions = ("zigzag", "ring", "allgather", *(("ulysses",) if 8 // tp % sp == 0 else ()))
    return HybridOptions(
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
        zero=(turn // 3 % 2 if pp > 1 else turn // 3 % 4) if dp > 1 else 0,  # type: ignore[arg-type]
        checkpointing=checkpointing,
        clip=0.5 * (turn // 2 % 2),
    )


def rows(every: int = 1) -> dict[int, list[Row]]:
    """All rows by number of ranks, or one of `every`."""
    meshes = {8: ways(8), **SAMPLE}
    turns = itertools.count()
    cases = {
        n: [Row(options(s, m, next(turns))) for s in shapes for m in ("gpt2", "llama", "moe")]
        for n, shapes in meshes.items()
    }
    return {n: chosen for n, all_of_n in cases.items() if (chosen := all_of_n[::every])}


Key = tuple[str, int, float, str]  # model, batch, clip, optimizer


def key(o: HybridOptions, optimizer: str) -> Key:
    """What one device's run depends on."""
    return o.model, o.batch, o.clip, optimizer


def references(rt: Runtime, todo: list[Row]) -> dict[Key, Followed]:
    """One device's runs for all rows; each rank computes some, and has them all."""
    wanted = {key(row.options, name): row.options for row in todo for name in OPTIMIZERS}
    mine = list(wanted)[rt.rank :: rt.world_size]
    computed = {k: reference(rt, wanted[k], k[-1]) for k in mine}
    return {k: followed for of_rank in comm.everyones(computed, rt.world) for k, followed in of_rank.items()}


def prove(rt: Runtime, todo: list[Row], show: bool = True, time_too: bool = False) -> list[Row]:
    """Every row on the ranks of this world; a record of each, with the time of a step, where time_too."""
    expected = references(rt, todo)
    proved = []
    for todo_row in todo:
        row = prove_row(rt, todo_row.options, expected)
        if show and rt.rank == 0:
            print(" | ".join(cells(row)), f"{row.seconds:.1f} s", flush=True)
        proved.append(replace(row, record=record_of(rt, row)) if time_too else row)
    return proved


def prove_row(rt: Runtime, o: HybridOptions, expected: dict[Key, Followed]) -> Row:
    """One mesh against one device."""
    start, mesh, found, agree = time.perf_counter(), o.mesh(rt), {}, True
    apart: list[str] = []
    for optimizer in OPTIMIZERS:
        hybrid = make_hybrid(rt, o, mesh)
        formula = StepBytes(hybrid, samples_of(o, hybrid), o.sequence, o.clip > 0)
        run = Counted(mesh_step(hybrid, rt, o), formula)
        followed = follow(hybrid, optimizer, o.steps, run, mesh)
        found[optimizer] = worst_of_world(compare(expected[key(o, optimizer)], followed), mesh)
        agree &= all(comm.everyones(run.agree, rt.world))
        apart += unequal_replicas(hybrid.named_parameters(), mesh)
    mesh.close()
    return Row(o, found, agree, apart, time.perf_counter() - start)


def record_of(rt: Runtime, row: Row) -> BenchmarkRecord:
    """A line of --json: the row's verdict beside a timed step."""
    mesh = row.options.mesh(rt)
    (record,) = timed(rt, replace(row.options, steps=1), mesh)
    mesh.close()
    return replace(record, equal=row.holds, largest_difference=row.largest)


def cells(row: Row) -> list[str]:
    """What the table says of a row."""
    assert row.found is not None
    o = row.options
    worst = {kind: max(found[kind].value for found in row.found.values()) for kind in KINDS}
    split: list[str] = [o.schedule] if o.pp > 1 else []
    split += [o.attention] if o.sp > 1 else []
    split += ["sequence parallel"] if o.sequence_parallel else []
    split += [f"ZeRO-{o.zero}"] if o.zero else []
    split += ["checkpointing"] if o.checkpointing else []
    split += ["clipping"] if o.clip else []
    shape = [str(getattr(o, axis)) for axis in AXES]
    numbers = [f"{worst[kind]:.1e}" for kind in KINDS]
    return [
        *shape,
        o.model.removeprefix("proof-").removesuffix("-deep"),
        ", ".join(split) or "-",
        *numbers,
        "yes" if row.holds else "**NO**",
    ]


def markdown(proved: dict[int, list[Row]]) -> Iterator[str]:
    """The lines of docs/proof.md."""
    done = [row for rows in proved.values() for row in rows]
    worst = max(done, key=lambda row: row.largest)
    yield "# The proof table"
    yield ""
    yield from textwrap.wrap(
        "Each row trains a model on a mesh and on one device, two steps with SGD and two with AdamW, in float64, and "
        "gives the largest relative difference of the loss, of any gradient, of the gradients' norm and of any weight. "
        "`equal` says that all are at most 1e-12, that every rank sent, in each step and group, exactly the bytes of "
        "the formula, and that weights which several ranks hold are the same to the bit. What the columns `pp` to `tp` "
        "mean: [docs/06-hybrid-parallelism.md](06-hybrid-parallelism.md).",
        width=120,
        break_on_hyphens=False,
    )
    yield ""
    failing = sum(not row.holds for row in done)
    yield f"`make proof` wrote this: {len(done)} rows, {failing} failing; largest difference {worst.largest:.1e}."
    for n, of_n in proved.items():
        yield ""
        yield f"## {n} ranks"
        yield ""
        yield f"| {' | '.join(HEADS)} |"
        yield "|--:|--:|--:|--:|--:|---|---|--:|--:|--:|--:|---|"
        yield from (f"| {' | '.join(cells(row))} |" for row in of_n)


def mesh_of(text: str) -> Row:
    """The row of a mesh in words, `pp=2 dp=2 zero=1`. Raises UsageError for words that say none that can be."""
    words = text.split()
    if not words or not all(re.fullmatch(WORD, word, re.ASCII) for word in words):
        raise UsageError(
            f"--meshes {text!r}: say it like 'pp=2 dp=2 zero=1', of {', '.join((*AXES, 'zero'))}"
        )
    given: dict[str, Any] = {word.split("=")[0]: int(word.split("=")[1]) for word in words}
    if len(given) < len(words):
        raise UsageError(f"--meshes {text!r} says one of them twice")
    pp, dp, ep, sp, tp = shape = tuple(given.get(axis, 1) for axis in AXES)
    if (ranks := math.prod(shape)) > MOST:
        raise UsageError(
            f"--meshes {text!r} has {ranks} ranks, and all would start here; give at most {MOST}"
        )
    model = ("proof-moe" if ep > 1 else "proof-llama") + ("-deep" if pp > 2 else "")
    o = HybridOptions(model=model, batch=max(18, 2 * dp * ep), sequence=48, steps=2, **{"dp": 1, **given})
    on_paper = Mesh(Group("world", 0, ranks, tuple(range(ranks))), pp, dp, ep, sp, tp)
    check(o.model_config(), on_paper, o.layout(), o.batch, o.sequence)
    return Row(o)


def of_meshes(texts: Iterable[str]) -> dict[int, list[Row]]:
    """A row of each mesh, by the number of its ranks."""
    by_ranks: dict[int, list[Row]] = {}
    for row in map(mesh_of, texts):
        ranks = math.prod(getattr(row.options, axis) for axis in AXES)
        by_ranks.setdefault(ranks, []).append(row)
    return by_ranks


@dataclass
class ProofOptions:
    """Which rows, and where to."""

    every: int = 1
    """One row of so many."""
    ranks: tuple[int, ...] = (8, 12, 16, 32)
    """Sizes of the worlds."""
    meshes: tuple[str, ...] = ()
    """Meshes to prove in place of the table's, each in words: 'pp=2 dp=2 zero=1'."""
    write: Path | None = None
    """File for the table, in Markdown; not with --meshes."""
    json: Path | None = None
    """File to which a record of each row is appended, with the time of a step."""


def main(o: ProofOptions) -> int:
    """0 where all rows hold, 1 where one does not."""
    table = {n: of_n for n, of_n in rows(max(1, o.every)).items() if n in o.ranks}
    todo = of_meshes(o.meshes) or table
    if not todo:
        raise UsageError(
            f"--ranks {' '.join(map(str, o.ranks))}: the table has rows of 8, 12, 16 and 32 ranks"
        )
    if o.write and (o.meshes or o.write.is_dir() or not o.write.absolute().parent.is_dir()):
        raise UsageError(f"--write {o.write}: give a file in a folder that is there, and no --meshes")
    write_records(o.json, [])  # a file that cannot be written is known before the work
    work = partial(prove, time_too=o.json is not None)
    print(" | ".join(HEADS), flush=True)
    proved: dict[int, list[Row]] = {}
    for n, of_n in todo.items():
        proved[n] = spawn(work, n, of_n, timeout=120, limit=None)[0]
        write_records(o.json, [row.record.as_json() for row in proved[n] if row.record])
    done = [row for of_n in proved.values() for row in of_n]
    failing = [row for row in done if not row.holds]
    if o.write:
        o.write.write_text("\n".join(markdown(proved)) + "\n")
    largest = max(row.largest for row in done)
    Console().print(f"{len(done)} rows, {len(failing)} failing; largest difference {largest:.1e}")
    return 1 if failing else 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(ProofOptions, description=__doc__)))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RankError as error:
        print(error, file=sys.stderr)
        sys.exit(error.code)
