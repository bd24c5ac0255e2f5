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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jinja2
import numpy as np
import tyro
from markupsafe import Markup

from common.errors import UsageError
from common.launch.command_line import Checked, parse
from common.launch.program import run_program
from common.machine.verdict import Line, headline
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
    """A machine's name, verdict, and the newest record of each tool, with its pictures."""

    name: str
    verdict: str
    tools: list[tuple[str, Record, list[Markup]]]

    @property
    def status(self) -> str:
        """The first word of the verdict, in small letters."""
        return self.verdict.partition(":")[0].lower()


def read(path: Path) -> list[Record]:
    """Return the newest record of each tool. Raises UsageError if the file has none."""
    try:
        found = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    records = {r["tool"]: r for r in found if isinstance(r, dict) and "tool" in r and "lines" in r}
    if not records:
        raise UsageError(f"{path} has no record of a tool; write one with --json {path}")
    return list(records.values())


def machine(path: Path) -> Machine:
    """Return what the page shows of a machine."""
    records = read(path)
    lines = [Line(**line) for record in records for line in record["lines"]]
    name = next((r["host"] for r in records if "host" in r), path.stem)
    return Machine(name, headline(lines), [(r["tool"], r, pictures(r)) for r in records])


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
