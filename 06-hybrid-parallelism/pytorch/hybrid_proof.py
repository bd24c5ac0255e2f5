"""The proof table: every way to write 8 as pp x dp x ep x sp x tp, and some of 12, 16 and 32, against one device.

    python hybrid_proof.py                          all rows: a quarter of an hour on two cores
    python hybrid_proof.py --write docs/proof.md    the same into a file: make proof
    python hybrid_proof.py --every 9                every ninth row
    python hybrid_proof.py --every 5 --check        every fifth, with types on ranks checked
    python hybrid_proof.py --meshes "dp=4 zero=3" "pp=2 tp=2"        these meshes, of LLaMA, with experts where ep > 1

hybrid_rows.py lists the rows. Each row compares the loss, every gradient and their norm in two steps, and the
weights after them, with SGD and with AdamW, in float64; the bytes of each step and group with the formula, on
every rank; and the bits of weights that several ranks hold.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from common import comm
from common.comm import Group
from common.comm.checked.asked import asking
from common.comm.mesh import AXES, Mesh
from common.errors import UsageError
from common.launch.command_line import Checked, Count, Ranks, parse
from common.launch.program import run_program
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import KINDS, OPTIMIZERS, ULPS, Followed, worst
from common.lesson.measure import BenchmarkRecord
from common.lesson.proof import Proof
from common.lesson.runner import write_records

from hybrid_layout import HybridOptions
from hybrid_rows import RowOptions, of_meshes, table
from hybrid_training import benchmark, prove_mesh, reference, train

HEADS = (*AXES, "model", "with", "loss", "gradients", "norm", "weights", "ulps", "equal")


@dataclass(frozen=True)
class Row:
    """Result of one mesh, model and layout."""

    options: HybridOptions
    proof: Proof
    """Proof rows, one per optimizer."""
    apart: list[str]
    """Parameters whose replicas differ between ranks."""
    record: BenchmarkRecord | None = None

    @property
    def largest(self) -> float:
        """The largest difference of the row."""
        return max(row.largest.value for row in self.proof.rows)

    @property
    def holds(self) -> bool:
        """True if numbers and bytes are equal, and replicas are equal to the bit."""
        return self.proof.holds and not self.apart


Key = tuple[str, int, float, str]  # model, batch, clip, optimizer


def key(o: HybridOptions, optimizer: str) -> Key:
    """Return the options that a one-device run depends on."""
    return o.model, o.batch, o.clip, optimizer


def references(rt: Runtime, todo: list[RowOptions]) -> dict[Key, Followed]:
    """Return the one-device runs for all rows; each rank computes some, and all ranks receive all."""
    wanted = {key(o, name): o for o in todo for name in OPTIMIZERS}
    mine = list(wanted)[rt.rank :: rt.world_size]
    computed = {k: reference(rt, wanted[k], k[-1]) for k in mine}
    return {k: followed for of_rank in comm.everyones(computed, rt.world) for k, followed in of_rank.items()}


def prove_rows(rt: Runtime, todo: list[RowOptions], show: bool = True, time_too: bool = False) -> list[Row]:
    """Compare every row with one device on the ranks of this world; with time_too add a record of a timed step."""
    expected, proved = references(rt, todo), []
    for o in todo:
        start, mesh = time.perf_counter(), o.mesh(rt)
        proof, apart, _ = prove_mesh(rt, o, mesh, train, lambda optimizer, o=o: expected[key(o, optimizer)])  # type: ignore[misc]
        row = Row(o, proof, apart)
        if show and rt.rank == 0:
            print(" | ".join(cells(row)), f"{time.perf_counter() - start:.1f} s", flush=True)
        if time_too:
            (record,) = proof.recorded(benchmark(rt, replace(o, steps=1), mesh))
            row = replace(row, record=replace(record, equal=row.holds))
        mesh.close()
        # process groups end with their ranks, and the row is sent to the process that started these
        proof.mesh = Mesh(Group.alone())
        proved.append(row)
    return proved


def prove_checked(rt: Runtime, todo: list[RowOptions], **how: bool) -> list[Row]:
    """Prove every row while the placement of each tensor is checked; see `prove_rows`."""
    with asking(rt.timeout / 2):
        return prove_rows(rt, todo, **how)


def cells(row: Row) -> list[str]:
    """Return the cells of a row in the table."""
    o = row.options
    largest = [max(of.found[kind].value for of in row.proof.rows) for kind in KINDS]
    ulps = worst(of.ulps for of in row.proof.rows if of.ulps)
    options = {
        o.schedule: o.pp > 1,
        o.attention: o.sp > 1,
        "sequence parallel": o.sequence_parallel,
        f"ZeRO-{o.zero}": o.zero,
        "checkpointing": o.checkpointing,
        "clipping": o.clip,
    }
    return [
        *(str(getattr(o, axis)) for axis in AXES),
        o.model.removeprefix("proof-").removesuffix("-deep"),
        ", ".join(name for name, on in options.items() if on) or "-",
        *(f"{value:.1e}" for value in largest),
        f"{ulps.value:.1f}",
        "yes" if row.holds else "**NO**",
    ]


def page(title: str, text: str, proved: Mapping[str, list[Row]]) -> Iterator[str]:
    """Yield the lines of a page in Markdown: a table of rows under each heading."""
    done = [row for rows in proved.values() for row in rows]
    failing, largest = sum(not row.holds for row in done), max(row.largest for row in done)
    yield f"# {title}"
    yield ""
    yield from textwrap.wrap(text, width=120, break_on_hyphens=False)
    yield ""
    yield f"`make proof` wrote this: {len(done)} rows, {failing} failing; largest difference {largest:.1e}."
    for heading, rows in proved.items():
        yield ""
        yield f"## {heading}"
        yield ""
        yield f"| {' | '.join(HEADS)} |"
        yield "|--:|--:|--:|--:|--:|---|---|--:|--:|--:|--:|--:|---|"
        yield from (f"| {' | '.join(cells(row))} |" for row in rows)


def markdown(proved: dict[int, list[Row]]) -> Iterator[str]:
    """Yield the lines of docs/proof.md."""
    text = (
        "Each row trains a model on a mesh and on one device, two steps with SGD and two with AdamW, in float64, and "
        "gives the largest relative difference of the loss, of any gradient, of the gradients' norm and of any weight. "
        "`ulps` is the largest difference of a tensor in units of how far it moves on one device when all weights "
        "begin one unit in the last place elsewhere. "
        f"`equal` says that the former are at most 1e-12, that the latter is below {ULPS}, that every rank booked, in "
        "each step and group, exactly the bytes of the formula, and that weights which several ranks hold are the same "
        "to the bit. What is booked is the formula "
        "of each call when it is made; [a test](../tests/test_wire.py) proves on a private network that the wire "
        "carries that, within 3 %. What the columns `pp` to `tp` mean: "
        "[docs/06-hybrid-parallelism.md](06-hybrid-parallelism.md)."
    )
    return page("The proof table", text, {f"{n} ranks": rows for n, rows in proved.items()})


@dataclass
class ProofOptions(Checked):
    """Options: the rows to prove, and the output files."""

    every: Count = 1
    """Prove every n-th row only."""
    ranks: tuple[Ranks, ...] = (8, 12, 16, 32)
    """World sizes to prove."""
    meshes: tuple[str, ...] = ()
    """Meshes to prove in place of the table's, each in words: 'pp=2 dp=2 zero=1'."""
    check: bool = False
    """Check on every tensor and collective how it lies on the ranks: docs/types-on-ranks.md."""
    write: Path | None = None
    """File for the table, in Markdown; not with --meshes."""
    json: Path | None = None
    """File to which a record of each row is appended, with the time of a step."""


def main(o: ProofOptions) -> int:
    """Prove the rows; return 0 if all hold, else 1."""
    todo = of_meshes(o.meshes) or {n: of_n for n, of_n in table(o.every).items() if n in o.ranks}
    if not todo:
        raise UsageError(
            f"--ranks {' '.join(map(str, o.ranks))}: the table has rows of 8, 12, 16 and 32 ranks"
        )
    if o.write and (o.meshes or o.write.is_dir() or not o.write.absolute().parent.is_dir()):
        raise UsageError(f"--write {o.write}: give a file in a folder that is there, and no --meshes")
    write_records(o.json, [])  # fails now if the file cannot be written
    work = partial(prove_checked if o.check else prove_rows, time_too=o.json is not None)
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
    print(f"{len(done)} rows, {len(failing)} failing; largest difference {largest:.1e}")
    return 1 if failing else 0


if __name__ == "__main__":
    run_program(lambda: main(parse(ProofOptions, __doc__)))
