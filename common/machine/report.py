"""One page of a machine, or of several side by side, from the records of the tools' --json.

    python -m common.machine report machine.jsonl --output report.html
    python -m common.machine report node0.jsonl node1.jsonl

The verdict stands on top: the first failure by name. Then one column per file: the lines of each tool, the bandwidth
of the collectives, the pairs of ranks, the steps of the training. The page needs no other file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import jinja2
import numpy as np
import tyro
from markupsafe import Markup

from common.errors import UsageError
from common.launch.command_line import Checked, parse
from common.launch.program import run_program
from common.machine.verdict import COLOURS, Line, failed, headline
from common.utils.visualizer import bandwidth_lines, figure

Record = dict[str, Any]


@dataclass
class ReportOptions(Checked):
    """Options of the report."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Files of --json, one per machine."""
    output: Path = Path("results/machine.html")
    """Page to write."""


@dataclass
class Machine:
    """A machine's name, verdict, and the records of all runs, the newest last, each with its pictures."""

    name: str
    verdict: str
    runs: list[tuple[Record, list[Markup]]]

    @property
    def status(self) -> str:
        """The first word of the verdict, in small letters."""
        return self.verdict.partition(":")[0].split()[0].lower()

    @property
    def facts(self) -> Record:
        """Newest value of each fact of the machine."""
        names = ("system", "torch", "gpus", "driver", "serials")
        return {name: record[name] for record, _ in self.runs for name in names if record.get(name)}


def read(path: Path) -> list[Record]:
    """Return the records of a file; lines that a crash has cut are left out.

    Raises UsageError if there is no record of a tool, or a damaged one.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict) or "tool" not in record:
            continue
        try:
            lines = [Line(**line) for line in record["lines"]]
            if not lines or any(line.status not in COLOURS for line in lines):
                raise ValueError("no lines, or an unknown status")
            records.append({**record, "lines": lines, "tool": str(record["tool"])})
        except (TypeError, ValueError, KeyError) as error:
            raise UsageError(f"{path}, line {number} is damaged: {error!r}") from None
    if not records:
        raise UsageError(
            f"{path} has no record of a tool; check, communication, training, throughput, stress write them"
        )
    return records


def machine(path: Path) -> Machine:
    """Return what the page shows of a machine. Its verdict: the newest run of each kind, and how many others failed."""
    records = read(path)
    newest = {(r["tool"], r.get("title")): r for r in records}
    lines = [replace(x, name=f"{r['tool']}: {x.name}") for r in newest.values() for x in r["lines"]]
    earlier = [r for r in records if r not in newest.values() and failed(r["lines"])]
    verdict = headline(lines) + (f"; {len(earlier)} earlier run(s) failed" if earlier else "")
    name = next((str(r["host"]) for r in records if r.get("host")), path.stem)
    try:
        return Machine(name, verdict, [(r, pictures(r)) for r in records])
    except (TypeError, ValueError, LookupError, MemoryError) as error:
        raise UsageError(f"{path}: a record is damaged: {error!r}") from None


def pictures(record: Record) -> list[Markup]:
    """Return the drawings of a record."""
    found = []
    if rows := record.get("rows"):
        lines: dict[str, dict[int, float]] = {}
        for row in rows:
            where = ", in place" if row["in_place"] else ""
            lines.setdefault(row["name"] + where, {})[row["bytes"]] = row["bus"]
        found.append(drawn(lambda axes: bandwidth_lines(axes, lines, title="bus bandwidth, GB/s")))
    if pairs := record.get("pairs"):
        found.append(drawn(lambda axes: pair_map(axes, pairs)))
    if record["tool"] == "throughput":
        found.append(drawn(lambda axes: step_lines(axes, record["seconds"])))
    return found


def drawn(draw: Any) -> Markup:
    """Return what `draw(axes)` draws, as SVG inside a page."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "picture.svg")
        with figure(path) as (axes,):
            draw(axes)
        text = path.read_text(encoding="utf-8")
    return Markup(text[text.index("<svg") :])


def pair_map(axes: Any, pairs: list[list[float]]) -> None:
    """Draw the bandwidth of each pair of ranks."""
    n = 1 + int(max(max(a, b) for a, b, *_ in pairs))
    if n > 4096:
        raise ValueError(f"rank {n - 1}")
    speeds = np.full((n, n), np.nan)
    for a, b, _, speed in pairs:
        speeds[int(a), int(b)] = speeds[int(b), int(a)] = speed
    shown = axes.imshow(speeds, cmap="viridis", vmin=0)
    axes.figure.colorbar(shown, ax=axes, label="GB/s")
    axes.set(title="bandwidth of each pair", xlabel="rank", ylabel="rank", xticks=range(n), yticks=range(n))


def step_lines(axes: Any, seconds: list[float]) -> None:
    """Draw the time of each step."""
    axes.plot([1e3 * s for s in seconds])
    axes.set(title="time of each step", xlabel="step", ylabel="ms", ylim=(0, None))


def write(machines: list[Machine], path: Path) -> None:
    """Write the page. Raises UsageError if it cannot be written."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(machines=machines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {path} cannot be written: {error.strerror}") from None


def main(o: ReportOptions) -> int:
    """Write the page; return 1 if a machine failed."""
    if not o.files:
        raise UsageError("give a file of --json for each machine")
    machines = [machine(path) for path in o.files]
    write(machines, o.output)
    for each in machines:
        print(f"{each.name}: {each.verdict}")
    print(f"written: {o.output}")
    return int(any(each.status == "fail" for each in machines))


def start() -> None:
    """Run the command line."""
    run_program(lambda: main(parse(ReportOptions, sys.modules[__name__].__doc__)))
