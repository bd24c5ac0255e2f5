"""Report of a run: one page, report.html, made from the records, that needs no network and no other file."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from common.benchmarks import measures, plots, tables
from common.benchmarks.measures import Timing, timings
from common.benchmarks.tables import Table
from common.errors import UsageError

Record = Mapping[str, Any]


class Verdict(NamedTuple):
    """One sentence of the summary, whether its news is good, and details to fold below."""

    good: bool
    sentence: str
    more: str = ""


@dataclass
class Section:
    """The page's section on a chapter: tables, and groups of figures (drawing, plot)."""

    title: str
    blocks: list[Table | list[tuple[Markup, plots.Plot]]] = field(default_factory=list)


def read(file: Path) -> list[dict[str, Any]]:
    """Return the good records of a file, none if it does not exist; print one line about damaged ones."""
    try:
        records, wrong = measures.read(file, measures.KEPT)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    if wrong:
        left_out = _count(len(wrong), "damaged record")
        print(f"{file}: {left_out} left out; the first: {wrong[0]}", file=sys.stderr)
    return records


def write(records: Sequence[Record], output: Path) -> Path:
    """Draw the plots into output/plots and write output/report.html; return the page's path."""
    chapters = list(dict.fromkeys(r["chapter"] for r in records))
    content = [_section(title, [r for r in records if r["chapter"] == title], output) for title in chapters]
    return _page(output / "report.html", content, verdicts(records), _about(records))


def write_comparison(first: Sequence[Record], second: Sequence[Record], path: Path) -> Path:
    """Write a page of two runs side by side, a table per chapter, to `path`; return `path`."""
    content = []
    for title in dict.fromkeys(r["chapter"] for r in (*first, *second)):
        both, alone = measures.pairs(*([r for r in run if r["chapter"] == title] for run in (first, second)))
        if both or alone:
            content.append(Section(title, [tables.beside(both, "Two runs side by side", alone)]))
    about = {
        f"{which} run, {key}": value
        for which, run in (("first", first), ("second", second))
        for key, value in _about(run).items()
    }
    return _page(path, content, compared(first, second), about)


def compared(first: Sequence[Record], second: Sequence[Record]) -> list[Verdict]:
    """Return the summary sentences of two runs side by side."""
    both, alone = measures.pairs(first, second)
    found = [Verdict(True, f"{len(both)} timings are in both runs, {len(alone)} in one only.")]
    for verdict in ("slower", "faster"):
        if so := [f"{p.first.case} ({p.first.implementation})" for p in both if p.verdict == verdict]:
            said = f"The second run is {verdict} beyond the spread: {', '.join(so)}."
            found.append(Verdict(verdict == "faster", said))
    return found


def _page(path: Path, content: Sequence[Section], said: Sequence[Verdict], about: Mapping[str, str]) -> Path:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        sections=content,
        verdicts=said,
        about=about,
        is_table=lambda b: isinstance(b, Table),
    )
    path.write_text(page)
    return path


def _section(title: str, records: Sequence[Record], output: Path) -> Section:
    section, every = Section(title), timings(records)
    prefix = re.sub(r"\W+", "-", title.lower()).strip("-")
    if failed := [r for r in records if "error" in r]:
        section.blocks.append(tables.failures(failed))
    timed = [t for t in every if t.purpose == "time"]
    for place, work in enumerate(dict.fromkeys(t.work for t in timed), 1):
        same = in_order([t for t in timed if t.work == work])
        fixed = [t for t in same if t.scaling == "strong"] or same
        section.blocks.append(_draw(plots.of_work(same, f"{prefix}-{place}"), output))
        made = [tables.throughput(fixed, every), tables.scaling(same), tables.communication(same)]
        section.blocks += [table for table in made if table.rows]
    if swept := [r for r in records if "bus_bandwidth" in r]:
        section.blocks += [_draw(plots.of_bandwidth(swept, prefix), output), tables.bandwidths(swept)]
    if piped := [r for r in records if r.get("timelines") and r["ranks"] > 1 and r["purpose"] == "time"]:
        section.blocks += [_draw(plots.of_schedules(piped, prefix), output), tables.bubbles(piped)]
    if any(t.equal is not None for t in every):
        section.blocks.append(tables.proofs(every))
    section.blocks = [b.without_empty_columns() if isinstance(b, Table) else b for b in section.blocks]
    return section


def _draw(drawn: list[plots.Plot], output: Path) -> list[tuple[Markup, plots.Plot]]:
    return [(Markup(plot.save(output / "plots")), plot) for plot in drawn]


def in_order(same: list[Timing]) -> list[Timing]:
    """Keep the order of the implementations; within each sort strong before weak, few ranks before many."""
    order = [t.who for t in same]
    return sorted(same, key=lambda t: (order.index(t.who), t.scaling, t.ranks))


def verdicts(records: Sequence[Record]) -> list[Verdict]:
    """Return the summary sentences of a run."""
    failed = [r for r in records if "error" in r]
    compared = [t for t in timings(records) if t.equal is not None]
    wrong = sorted({t.implementation for t in compared if not t.equal})
    names = sorted({t.implementation for t in compared if t.equal} - set(wrong))
    equal = ", all equal to one device" if names and not wrong and not failed else ""
    runs = _count(len({r["case"] for r in records}), "run")
    found = [Verdict(not failed, f"{runs}, {len(failed)} failed{equal}.")]
    if wrong:
        found.append(Verdict(False, f"Different from one device: {', '.join(wrong)}."))
    if names:
        largest: dict[str, float] = {}
        for t in compared:
            if t.implementation in names:
                largest[t.dtype] = max(largest.get(t.dtype, 0.0), t.largest_difference or 0.0)
        by_type = ", ".join(
            f"{value:.1e} in {dtype}" for dtype, value in sorted(largest.items(), reverse=True)
        )
        implementations = _count(len(names), "implementation")
        said = f"Equal to one device: {implementations}; largest relative difference {by_type}."
        found.append(Verdict(True, said, ", ".join(names)))
    return found


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _about(records: Sequence[Record]) -> dict[str, str]:
    """Return place and date of the records; several values if a run was resumed elsewhere or later."""
    about: dict[str, dict[str, None]] = {}
    for record in records:
        for key, value in {
            "commit": record["commit"],
            "date": record["date"][:16],
            **record["machine"],
        }.items():
            about.setdefault(key, {})[value] = None
    about["date"] = dict.fromkeys([min(about["date"]), max(about["date"])]) if records else {}
    return {key: (" to " if key == "date" else "; ").join(values) for key, values in about.items()}
