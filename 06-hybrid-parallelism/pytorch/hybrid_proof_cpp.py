"""The proof table of the product in C++: every mesh of 8 ranks, in hybrid_libtorch and hybrid_mpi, against one device.

    mpirun -np 8 python hybrid_proof_cpp.py                                    all 140 rows: ten minutes on two cores
    mpirun -np 8 python hybrid_proof_cpp.py --every 9                          every ninth row
    mpirun -np 8 python hybrid_proof_cpp.py --write ../../docs/proof-cpp.md    the same into a file: make proof

Each row compares what a row of hybrid_proof.py does: loss, every gradient, their norm and the weights, with SGD and
with AdamW, in float64; the bytes that C++ counted in each step and group with Python's formula for the same mesh;
and the bits of weights that several ranks hold.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import UsageError
from common.launch.command_line import Count
from common.launch.runtime import Runtime
from common.lesson import languages
from common.lesson.runner import LessonOptions, run
from common.models.configs import gpt2_moe, llama, mixtral

from hybrid_languages import LANGUAGES, LOOPS
from hybrid_proof import HEADS, Row, cells, key, references
from hybrid_rows import MODELS, RowOptions, Shape, ways
from hybrid_training import prove_mesh

RANKS = 8
SHAPE = dict(layers=4, width=32, heads=8, sequence=48)
ADDED = {  # widths that divide by 8: of uneven ones the ranks of Python and of C++ hold other shards
    "proof-cpp-llama": llama(**SHAPE, kv_heads=2, mlp_width=48),
    "proof-cpp-mixtral": mixtral(**SHAPE, kv_heads=4, mlp_width=16, experts=8),
    "proof-cpp-moe": gpt2_moe(**SHAPE, experts=8),
}
MODELS |= ADDED | {f"{name}-deep": replace(shape, layers=8) for name, shape in ADDED.items()}
PROGRAMS = {"hybrid_libtorch": ("cpp-llama", "cpp-mixtral"), "hybrid_mpi": ("gpt2", "cpp-moe")}
"""The models that each program trains here."""


def options(shape: Shape, model: str, turn: int, sharded: bool) -> RowOptions:
    """Return the row's options; what the mesh allows takes turns. sharded: ZeRO-1 and sequence parallelism."""
    pp, dp, ep, sp, tp = shape
    schedules = ("1f1b", "zb-h1", "gpipe", *(("zb-v", "interleaved") if pp < 8 else ()))
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
        schedule=schedules[turn % len(schedules)] if pp > 1 else "1f1b",
        attention=("zigzag", "ring")[turn % 2],
        sequence_parallel=sharded and tp > 1 and turn % 2 == 1,
        zero=int(sharded and dp > 1 and turn % 3 > 0),  # type: ignore[arg-type]
    )


def table(program: str, every: int) -> list[RowOptions]:
    """Return the rows of a program, or one of `every`: all meshes, each with all models."""
    sharded, models = program == "hybrid_libtorch", PROGRAMS[program]
    rows = [options(s, m, i + j, sharded) for i, s in enumerate(ways(RANKS)) for j, m in enumerate(models)]
    return rows[::every]


def prove(rt: Runtime, program: str, todo: list[RowOptions]) -> list[Row]:
    """Compare every row of a program with one device."""
    expected, proved = references(rt, todo), []
    for o in todo:
        start, mesh = time.perf_counter(), o.mesh(rt)
        proof, apart, _ = prove_mesh(rt, o, mesh, LOOPS[program], lambda name, o=o: expected[key(o, name)])  # type: ignore[misc]
        proved.append(Row(o, proof, apart))
        mesh.close()
        if rt.rank == 0:
            print(
                program,
                "|",
                " | ".join(cells(proved[-1])),
                f"{time.perf_counter() - start:.1f} s",
                flush=True,
            )
    return proved


def markdown(proved: dict[str, list[Row]]) -> Iterator[str]:
    """Yield the lines of docs/proof-cpp.md."""
    done = [row for rows in proved.values() for row in rows]
    yield "# The proof table of the product in C++"
    yield ""
    yield from textwrap.wrap(
        "Each row trains a model in C++ on a mesh of 8 ranks, and the same model in Python on one device. The columns "
        "are those of [the proof table](proof.md). The bytes that C++ counted are compared, in each step and group, "
        "with Python's formula for the same mesh.",
        width=120,
        break_on_hyphens=False,
    )
    yield ""
    failing = sum(not row.holds for row in done)
    largest = max(row.largest for row in done)
    yield f"`make proof` wrote this: {len(done)} rows, {failing} failing; largest difference {largest:.1e}."
    for program, rows in proved.items():
        yield ""
        yield f"## {program}"
        yield ""
        yield f"| {' | '.join(HEADS)} |"
        yield "|--:|--:|--:|--:|--:|---|---|--:|--:|--:|--:|--:|---|"
        yield from (f"| {' | '.join(cells(row))} |" for row in rows)


@dataclass
class CppProofOptions(
    LessonOptions, without=("steps", "seed", "dtype", "device", "data", "json", "plot", "trace")
):
    """Options: the rows to prove, and the output file."""

    every: Count = 1
    """Prove every n-th row only."""
    programs: tuple[str, ...] = tuple(PROGRAMS)
    """Programs to prove."""
    write: Path | None = None
    """File for the table, in Markdown."""


def main(rt: Runtime, o: CppProofOptions) -> bool:
    """Prove the rows; return True if all hold."""
    if unknown := [name for name in o.programs if name not in PROGRAMS]:
        raise UsageError(f"--programs {unknown[0]}: choose from {', '.join(PROGRAMS)}")
    if rt.world_size != RANKS:
        raise UsageError(f"the table has meshes of {RANKS} ranks, the world has {rt.world_size}")
    if o.write and (o.write.is_dir() or not o.write.absolute().parent.is_dir()):
        raise UsageError(f"--write {o.write}: give a file in a folder that is there")
    languages.check_modules(rt, "hybrid_proof_cpp.py", [name for name in o.programs if name in LANGUAGES])
    proved = {program: prove(rt, program, table(program, o.every)) for program in o.programs}
    done = [row for rows in proved.values() for row in rows]
    if o.write and rt.rank == 0:
        o.write.write_text("\n".join(markdown(proved)) + "\n")
    if rt.rank == 0:
        failing, largest = sum(not row.holds for row in done), max(row.largest for row in done)
        print(f"{len(done)} rows, {failing} failing; largest difference {largest:.1e}")
    return all(row.holds for row in done)


if __name__ == "__main__":
    run(main, CppProofOptions)
