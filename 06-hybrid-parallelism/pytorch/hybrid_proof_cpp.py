"""The proof table of the product in C++: every mesh of 8 ranks, in hybrid_libtorch and hybrid_mpi, against one device.

    mpirun -np 8 python hybrid_proof_cpp.py                                    all 140 rows: three minutes on two cores
    mpirun -np 8 python hybrid_proof_cpp.py --every 9                          every ninth row
    mpirun -np 8 python hybrid_proof_cpp.py --write ../../docs/proof-cpp.md    the same into a file: make proof

Each row compares what a row of hybrid_proof.py does: loss, every gradient, their norm and the weights, with SGD and
with AdamW, in float64; the bytes that C++ counted in each step and group with Python's formula for the same mesh;
and the bits of weights that several ranks hold.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import UsageError
from common.launch.command_line import Count
from common.launch.runtime import Runtime
from common.lesson import languages
from common.lesson.runner import LessonOptions, run
from common.models.configs import gpt2_moe

import hybrid_rows
from hybrid_languages import LANGUAGES, LOOPS
from hybrid_proof import Row, cells, key, page, references
from hybrid_rows import MODELS, RowOptions, Shape, ways
from hybrid_training import prove_mesh

RANKS = 8
MOE = gpt2_moe(layers=4, width=32, heads=8, sequence=48, experts=8)
MODELS |= {"proof-gpt2-moe": MOE, "proof-gpt2-moe-deep": replace(MOE, layers=8)}
PROGRAMS = {"hybrid_libtorch": ("llama", "moe"), "hybrid_mpi": ("gpt2", "gpt2-moe")}
"""The models that each program trains here."""


def options(shape: Shape, model: str, turn: int, sharded: bool) -> RowOptions:
    """Return the row's options: those of Python's row that C++ has. sharded: ZeRO-1 and sequence parallelism."""
    o = hybrid_rows.options(shape, model, turn)
    copies = shape[1] * shape[2] * shape[3]
    return replace(
        o,
        model=o.model.replace("-dropout", ""),
        attention=("zigzag", "ring")[turn % 2],
        sequence_parallel=sharded and o.sequence_parallel,
        zero=int(sharded and copies > 1 and turn % 3 > 0),  # type: ignore[arg-type]
        checkpointing=False,
        clip=0.0,
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
    text = (
        "Each row trains a model in C++ on a mesh of 8 ranks, and the same model in Python on one device. The columns "
        "are those of [the proof table](proof.md). The bytes that C++ counted are compared, in each step and group, "
        "with Python's formula for the same mesh."
    )
    return page("The proof table of the product in C++", text, proved)


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
