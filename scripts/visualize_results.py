"""Draw the benchmark's report again from its stored records, or compare two runs side by side; runs nothing.

    python scripts/visualize_results.py results                       results/report.html and results/plots/, anew
    python scripts/visualize_results.py earlier --compare results     earlier/comparison.html, and in the terminal

A folder of results is what benchmark_all.py wrote: its records.jsonl is enough. Exit code 0; with --compare 1 where the
second run is slower than the first by more than their spread; 2: bad input.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from common.benchmarks import benchmark_all, measures, report, tables
from common.errors import UsageError
from common.launch.command_line import parse
from common.launch.program import run_program
from common.launch.terminal import terminal


@dataclass
class Options:
    """Options: the run or the two runs to draw, and the output folder."""

    results: Annotated[Path, tyro.conf.Positional] = Path("results")
    """Folder of a run; with --compare of the first run."""
    compare: Path | None = None
    """Folder of the second run."""
    output: Path | None = None
    """Output folder; default: the first folder."""
    picture: Path | None = None
    """File for the figure of the README."""


def stored(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a folder. Raises UsageError if it has none."""
    file = folder / "records.jsonl"
    records = report.read(file) if file.is_file() else []
    if not records:
        raise UsageError(f"{file} holds no record; make benchmark writes results/, --output other folders")
    return records


def main(o: Options) -> int:
    """Draw; return the exit code. Raises UsageError."""
    output, first, console = o.output or o.results, stored(o.results), terminal()
    second = stored(o.compare) if o.compare else []
    try:
        output.mkdir(parents=True, exist_ok=True)
        if not o.compare:
            benchmark_all.show(first, output, o.picture, console)
            return 0
        path = report.write_comparison(first, second, output / "comparison.html")
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written: {error.strerror}") from None
    both, alone = measures.pairs(first, second)
    table = tables.beside(both, f"{o.results} beside {o.compare}", alone)
    benchmark_all.show_table(table, console, [head.lstrip(">") for head in table.heads])
    said = report.compared(first, second)
    for verdict in said:
        console.print(verdict.sentence, markup=False)
    console.print(f"comparison: {path}", markup=False, soft_wrap=True)
    return int(not all(verdict.good for verdict in said))


if __name__ == "__main__":
    run_program(lambda: main(parse(Options, __doc__)))
