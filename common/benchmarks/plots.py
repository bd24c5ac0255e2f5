"""The report's plots, made from records; each is stored as PNG and SVG, and the page holds the SVG."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from common.benchmarks.measures import Scaling, Timing, speed_up
from common.benchmarks.tables import names, work_name
from common.utils import visualizer
from common.utils.environment import cores as cores

Series = dict[str, dict[int, float]]


@dataclass(frozen=True)
class Plot:
    """A plot: name, caption, function that draws it, and layout; height in inches."""

    name: str
    caption: str
    draw: Callable[..., None]  # into its axes, row by row
    columns: int = 1
    height: float = 3.4
    rows: int = 1

    def save(self, folder: Path) -> str:
        """Draw it into `folder`, as PNG and as SVG; return the SVG for the page."""
        name = re.sub(r"[^\w-]+", "-", self.name)  # of the files, and prefix of identifiers in the page
        png, svg = folder / f"{name}.png", folder / f"{name}.svg"
        shape = {"columns": self.columns, "rows": self.rows}
        with visualizer.figure(png, svg, **shape, width=5.8 * self.columns, height=self.height) as axes:
            self.draw(*axes)
        return inline(svg.read_text(), name, self.caption)


def inline(svg: str, name: str, caption: str) -> str:
    """Return an SVG's drawing for a page: no background, the page's text colour, prefixed identifiers."""
    svg = re.sub(r"^.*?(?=<svg )|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="patch_1">.*?</g>', "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'(<svg [^>]*?)width="\S+" height="\S+"', r"\1", svg, count=1)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1)
    svg = svg.replace(visualizer.INK.lower(), "currentColor")
    return re.sub(r'(id="|url\(#|href="#)', rf"\1{name}-", svg)


def of_work(timings: Sequence[Timing], prefix: str) -> list[Plot]:
    """Return the plots of equal work: throughput, scaling and communication."""
    fixed = [t for t in timings if t.scaling == "strong"] or list(timings)
    work = work_name(timings[0])
    plots = []
    if rates := _series(fixed, lambda t: t.tokens_per_second):
        draw = partial(visualizer.throughput_bars, rates=rates, unit="tokens/s")
        caption = f"Throughput: {work}."
        plots.append(Plot(f"{prefix}-throughput", caption, draw, 1, _height(rates)))
    ups = {kind: _speed_ups(timings, kind) for kind in ("strong", "weak")}
    if ups := {kind: series for kind, series in ups.items() if series}:
        draw = partial(_scaling, ups, timings[0].cores)
        caption = f"{' and '.join(ups)} scaling: {work}.".capitalize()
        plots.append(Plot(f"{prefix}-scaling", caption, draw, len(ups), 4.2))
    if parts := _parts(fixed):
        draw = partial(visualizer.share_bars, parts=parts, unit="ms")
        caption, height = (
            f"Share of a step in which ranks only wait for messages: {work}.",
            1.2 + 0.33 * len(parts),
        )
        plots.append(Plot(f"{prefix}-communication", caption, draw, 1, height))
    return plots


def _height(rates: Series) -> float:
    return 0.8 + 0.22 * sum(len(by_ranks) + 1.4 for by_ranks in rates.values())


def _series(timings: Sequence[Timing], value: Callable[[Timing], float | None]) -> Series:
    """Return name -> ranks -> value, without values that were not measured."""
    called = names(timings)
    series: Series = {}
    for t in timings:
        if (number := value(t)) is not None:
            series.setdefault(called[t.who], {})[t.ranks] = number
    return series


def _speed_ups(timings: Sequence[Timing], kind: str) -> Series:
    """Return the speed-ups of the implementations that ran with more than one rank."""
    several = {t.who for t in timings if t.scaling == kind and t.ranks > 1}
    chosen = [t for t in timings if t.who in several and (t.scaling == kind or t.ranks == 1)]
    return {k: v for k, v in _series(chosen, lambda t: speed_up(t, timings)).items() if len(v) > 1}


def _parts(timings: Sequence[Timing]) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a step: exposed communication, and the rest."""
    called = names(timings)
    return {
        f"{called[t.who]}, {t.ranks} ranks": {
            "compute": 1e3 * max(0.0, t.seconds - t.communication_seconds),
            "exposed communication": 1e3 * t.communication_seconds,
        }
        for t in timings
        if t.communication_seconds is not None and t.ranks > 1
    }


def _scaling(ups: Mapping[str, Series], cores: int | None, *axes: Axes) -> None:
    for one, (kind, series) in zip(axes, ups.items(), strict=True):
        visualizer.scaling_lines(one, series, cores=cores, title=f"{kind} scaling".capitalize())
    low, high = zip(*(one.get_ylim() for one in axes), strict=True)
    for one in axes:
        one.set_ylim(min(low), max(high))


def of_bandwidth(records: Sequence[Mapping[str, Any]], prefix: str) -> list[Plot]:
    """Return plots of bus bandwidth over message size, one per backend and rank count.

    A primitive named with its implementation ("all-reduce, gloo") has its own plot, with a line per
    implementation; "copy" is the limit, in bytes copied per second.
    """
    groups: dict[tuple[str, str, int], Series] = {}
    limits: dict[tuple[str, str, int], tuple[str, dict[int, float]]] = {}
    for r in records:
        primitive, _, who = r["primitive"].partition(", ")
        key = (primitive if who else "collectives", r["backend"], r["ranks"])
        if who == "copy":
            limits.setdefault(key, ("memory copy", {}))[1][r["bytes"]] = r["algorithm_bandwidth"] / 1e9
        else:
            series = groups.setdefault(key, {})
            series.setdefault(who or primitive, {})[r["bytes"]] = r["bus_bandwidth"] / 1e9
    return [
        Plot(
            f"{prefix}-bandwidth-{primitive}-{backend}-{ranks}",
            f"Bus bandwidth of {primitive}: {backend}, {ranks} ranks.",
            partial(
                visualizer.bandwidth_lines, bandwidths=series, limit=limits.get((primitive, backend, ranks))
            ),
        )
        for (primitive, backend, ranks), series in groups.items()
    ]


def of_schedules(records: Sequence[Mapping[str, Any]], prefix: str) -> list[Plot]:
    """Return the simulated and the measured timeline of each pipeline schedule, one above the other."""
    plots = []
    for place, r in enumerate(records, 1):
        lines = {
            title: {rank: [visualizer.Interval(*item) for item in row] for rank, row in rows.items()}
            for title, rows in r["timelines"].items()
        }
        plots.append(
            Plot(
                f"{prefix}-timeline-{place}-{r['schedule']}",
                f"A step of {r['schedule']}: {r['ranks']} ranks, {r['micro_batches']} micro-batches, {r['model']}.",
                partial(_timelines, lines),
                height=len(lines) * (1.0 + 0.25 * r["ranks"]),
                rows=len(lines),
            )
        )
    return plots


def _timelines(lines: Mapping[str, Mapping[str, Sequence[visualizer.Interval]]], *axes: Axes) -> None:
    visualizer.timelines(axes, lines, kinds=("F", "B", "I", "W"))


def picture(timings: Sequence[Timing], path: Path) -> None:
    """Draw the figure of the README: throughput over ranks of the work that most languages did, a panel per scaling."""
    works = {t.work: {u.language for u in timings if u.work == t.work} for t in timings}
    work = max(works, key=lambda key: len(works[key]))
    same = [t for t in timings if t.work == work and t.purpose == "time" and t.tokens_per_second is not None]
    kinds: tuple[Scaling, ...] = ("strong", "weak")
    shown = [kind for kind in kinds if _speed_ups(same, kind)] or list(kinds[:1])
    with visualizer.figure(path, columns=len(shown), width=5.2 * len(shown) + 1.4, height=4.6) as axes:
        for one, kind in zip(axes, shown, strict=True):
            chosen = [t for t in same if t.scaling == kind or t.ranks == 1]
            rates = _series(chosen, lambda t: t.tokens_per_second)
            title = f"{kind.capitalize()} scaling:\n{_tokens(replace(same[0], scaling=kind))}"
            visualizer.throughput_lines(
                one, rates, unit="tokens per second", cores=same[0].cores, title=title, legend=one is axes[-1]
            )
        top = max(one.get_ylim()[1] for one in axes)
        for one in axes:
            one.set_ylim(0, top)  # one scale: heights of the panels can be compared


def _tokens(timing: Timing) -> str:
    """Describe the work that stays the same when ranks are added."""
    tokens = timing.one_rank_tokens
    amount = f"{tokens:,.0f} tokens" if tokens else "the same work"
    return (
        f"{amount} per step, divided among the ranks"
        if timing.scaling == "strong"
        else f"{amount} per rank and step"
    )
