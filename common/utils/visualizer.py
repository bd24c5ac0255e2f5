"""The course's plots: throughput, scaling, communication, bandwidth, loss, timelines.

`figure` makes axes in the course's style and saves them; each other function draws into one of them.

    with figure(Path("data-parallel.png"), columns=2) as (left, right):
        throughput_bars(left, {"ddp": {1: 900.0, 2: 1700.0}}, unit="tokens/s")
        scaling_lines(right, {"ddp": {1: 1.0, 2: 1.9}})

The colour of a series is that of its place in its mapping.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Later:
    """Module that loads on its first use: matplotlib takes 0.3 s per rank, and most runs draw nothing."""

    module: str

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.module), name)


mpl, ticker = Later("matplotlib"), Later("matplotlib.ticker")

# Okabe and Ito's colours, which colour-blind readers tell apart; yellow is too pale for lines.
INK, FAINT = "#333333", "#8C8C8C"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#666666")
MARKERS = "osD^vPX"
PARTS = 4  # first colour of parts of a whole, so that they do not look like implementations
STYLE: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "grid.color": FAINT,
    "grid.alpha": 0.25,
    **dict.fromkeys(
        ("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color"),
        INK,
    ),
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.hashsalt": "5d-parallel",  # the same picture gives the same file
    "svg.fonttype": "none",  # text stays text
}
# In an SVG, what stands on the page's colour follows the reader's theme; what stands inside a coloured box does not.
DARK = f"""
@media (prefers-color-scheme: dark) {{
  #patch_1 path {{ fill: #0d1117 !important }}
  [style*="fill: {INK}"] {{ fill: #e6edf3 !important }}
  [style*="stroke: {INK}"] {{ stroke: #e6edf3 !important }}
}}
"""


@contextmanager
def figure(
    *paths: Path, columns: int = 1, rows: int = 1, width: float = 6.4, height: float = 3.4
) -> Iterator[tuple[Axes, ...]]:
    """Yield axes, row by row; at the end save them to each path (.png, .svg, .pdf). Sizes in inches.

    Raises UsageError when a path cannot be written.
    """
    with mpl.rc_context():
        mpl.rcdefaults()  # the user's matplotlibrc does not reach the course's pictures
        mpl.rcParams.update(STYLE)
        drawn = Later("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
        Later("matplotlib.backends.backend_agg").FigureCanvasAgg(drawn)
        yield tuple(drawn.subplots(rows, columns, squeeze=False).flat)
        for path in paths:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                drawn.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
                if path.suffix == ".svg":
                    text = path.read_text(encoding="utf-8")
                    path.write_text(text.replace("</style>", f"{DARK}</style>", 1), encoding="utf-8")
            except OSError as error:
                raise UsageError(f"the picture {path} cannot be written: {error.strerror}") from None


def colour(place: int) -> str:
    """Return the colour of the series at this place; after seven the colours begin again."""
    return COLOURS[place % len(COLOURS)]


def _line(place: int) -> dict[str, Any]:
    turn, marker = divmod(place, len(MARKERS))
    return {"color": colour(place), "marker": MARKERS[marker], "linestyle": ("-", ":", "-.")[turn % 3]}


def _lines(axes: Axes, series: Mapping[str, Mapping[int, float]]) -> None:
    """Draw a line with markers per series: name -> x -> y."""
    for place, (name, points) in enumerate(series.items()):
        axes.plot(*zip(*sorted(points.items()), strict=True), **_line(place), label=name)


def _shade_shared_cores(axes: Axes, cores: int, most: int) -> None:
    """Shade the rank counts above `cores`, up to `most`."""
    if cores < most:
        axes.axvspan(cores, most * 1.1, color=FAINT, alpha=0.12, linewidth=0)
        where = axes.get_xaxis_transform()
        axes.text(most * 1.08, 0.03, "ranks share cores", ha="right", fontsize=8, transform=where)


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """Name rows 0, 1, ... from the top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def _losses(axes: Axes, title: str = "") -> None:
    """Name the axes of losses over steps."""
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.grid(axis="y")


def throughput_bars(
    axes: Axes, rates: Mapping[str, Mapping[int, float]], *, unit: str, title: str = ""
) -> None:
    """Draw one bar per rank count, in a block per implementation: name -> ranks -> rate in `unit`."""
    ticks: dict[float, str] = {}
    largest = max((rate for by_ranks in rates.values() for rate in by_ranks.values()), default=1.0)
    row = 0.0
    for place, (name, by_ranks) in enumerate(rates.items()):
        axes.text(largest / 100, row, name, va="center", fontweight="bold", fontsize=9)
        for ranks, rate in sorted(by_ranks.items()):
            row += 1
            ticks[row] = f"{ranks} rank" + "s" * (ranks > 1)
            axes.barh(row, rate, height=0.8, color=colour(place))
            axes.text(rate + largest / 60, row, si_text(rate), va="center", fontsize=9)
        row += 1.4
    axes.set(xlim=(0, largest * 1.15), ylim=(row - 0.6, -0.6), xlabel=unit, title=title)
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5))


def scaling_lines(
    axes: Axes,
    speed_ups: Mapping[str, Mapping[int, float]],
    *,
    cores: int | None = None,
    title: str = "",
) -> None:
    """Draw speed-up over one rank: name -> ranks -> times faster; ideal is one per rank, up to `cores`."""
    most = max((ranks for by_ranks in speed_ups.values() for ranks in by_ranks), default=1)
    counts = sorted({ranks for by_ranks in speed_ups.values() for ranks in by_ranks} | {1, most})
    cores = min(cores or most, most)
    axes.plot([1, cores, most], [1, cores, cores], "--", color=FAINT, linewidth=1.5, label="ideal")
    _lines(axes, speed_ups)
    _shade_shared_cores(axes, cores, most)
    values = [1.0, cores, *(value for by_ranks in speed_ups.values() for value in by_ranks.values())]
    low, high = min(values) * 0.85, max(values) * 1.15
    ticks = [m * 2.0**power for power in range(-10, 20) for m in (1, 1.5)]
    for axis, places in (axes.xaxis, counts), (axes.yaxis, ticks):
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        axis.set_major_locator(ticker.FixedLocator(places))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_locator(ticker.NullLocator())
    axes.set(xlim=(0.93, most * 1.1), ylim=(low, high))
    axes.set(xlabel="ranks", ylabel="speed-up over one rank", title=title)
    axes.grid(axis="y")
    _legend(axes)


def throughput_lines(
    axes: Axes,
    rates: Mapping[str, Mapping[int, float]],
    *,
    unit: str,
    cores: int | None = None,
    title: str = "",
    legend: bool = True,
) -> None:
    """Draw throughput over ranks: name -> ranks -> rate in `unit`; ideal is a rank's mean rate times the ranks."""
    most = max((ranks for by_ranks in rates.values() for ranks in by_ranks), default=1)
    counts = sorted({ranks for by_ranks in rates.values() for ranks in by_ranks} | {1, most})
    cores = min(cores or most, most)
    alone = [by_ranks[1] for by_ranks in rates.values() if 1 in by_ranks]
    if alone:
        rate = sum(alone) / len(alone)
        ideal = [rate, rate * cores, rate * cores]
        axes.plot([1, cores, most], ideal, "--", color=FAINT, linewidth=1.5, label="ideal")
    _lines(axes, rates)
    _shade_shared_cores(axes, cores, most)
    axes.set(xscale="log", xlim=(0.93, most * 1.1), xlabel="ranks", ylabel=unit, title=title)
    axes.set_ylim(0, axes.get_ylim()[1])
    axes.xaxis.set_major_locator(ticker.FixedLocator(counts))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter(ticker.EngFormatter(sep=""))
    axes.grid(axis="y")
    if legend:
        _legend(axes)


def share_bars(
    axes: Axes,
    parts: Mapping[str, Mapping[str, float]],
    *,
    unit: str,
    title: str = "",
    of: str = "share of the step's time",
) -> None:
    """Draw times as shares of each row's sum, which is written after its bar: row -> part -> time."""
    kinds = list(dict.fromkeys(kind for row in parts.values() for kind in row))
    for y, row in enumerate(parts.values()):
        total, left = sum(row.values()), 0.0
        for kind, value in row.items():
            share = value / total
            place = PARTS + kinds.index(kind)
            axes.barh(y, share, left=left, height=0.7, color=colour(place))
            if share > 0.07:
                _inside(axes, left + share / 2, y, f"{share:.0%}", colour(place))
            left += share
        digits = f"{total:,.0f}" if total >= 1000 else f"{total:.3g}"
        axes.text(1.01, y, f"{digits} {unit}", va="center", fontsize=9)
    _rows(axes, list(parts))
    axes.set(xlim=(0, 1), xlabel=of)
    axes.xaxis.set_major_formatter(ticker.PercentFormatter(1))
    axes.spines["left"].set_visible(False)
    _legend_above(axes, kinds, title, PARTS)


def bandwidth_lines(
    axes: Axes,
    bandwidths: Mapping[str, Mapping[int, float]],
    *,
    limit: tuple[str, Mapping[int, float]] | None = None,
    title: str = "",
) -> None:
    """Draw bus bandwidth over message size: name -> bytes -> GB/s (10^9), and a limit by size to compare with."""
    _lines(axes, bandwidths)
    sizes = sorted({size for by_size in bandwidths.values() for size in by_size})
    if limit:
        points = zip(*sorted(limit[1].items()), strict=True)
        axes.plot(*points, "--", color=FAINT, linewidth=1.5, label=limit[0])
    axes.set_xscale("log", base=2)
    if len(sizes) <= 8:
        axes.xaxis.set_major_locator(ticker.FixedLocator(sizes))
    axes.xaxis.set_major_formatter(lambda size, _: bytes_text(size))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set(xlabel="message size", ylabel="bus bandwidth (GB/s)", title=title)
    values = [value for by_size in bandwidths.values() for value in by_size.values()]
    axes.set_ylim(0, 1.15 * max([*values, *(limit[1].values() if limit else ())], default=1))
    axes.grid(axis="y")
    _legend(axes)


def memory_lines(
    axes: Axes, sizes: Mapping[str, Mapping[int, float]], *, against: str, title: str = ""
) -> None:
    """Draw bytes over a length, on logarithmic axes: name -> length -> bytes; `against` names the length."""
    _lines(axes, sizes)
    lengths = sorted({length for by_length in sizes.values() for length in by_length})
    axes.set(xscale="log", xlabel=against, title=title)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(ticker.LogLocator(base=2, numticks=20))
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda size, _: bytes_text(size))
    _legend(axes)


def loss_curves(axes: Axes, losses: Mapping[str, Sequence[float]], *, title: str = "", mean: int = 0) -> None:
    """Draw loss over steps: name -> loss of each step. Coinciding curves stay visible as dashes over lines.

    mean: for curves that differ, plain lines of the mean over so many steps.
    """
    for place, (name, values) in enumerate(losses.items()):
        if mean:
            means = [sum(values[i - mean : i]) / mean for i in range(mean, len(values) + 1)]
            steps = range(mean - 1, len(values))
            axes.plot(steps, means, linewidth=1.6, color=colour(place), label=name)
            continue
        dashes = "-" if place == 0 else (place * 3, (3, 3 * (len(losses) - 1) or 3))
        width = 4.0 if place == 0 and len(losses) > 1 else 2.0
        axes.plot(values, linestyle=dashes, linewidth=width, color=colour(place), label=name)
    _losses(axes, title)
    axes.legend(loc="best", handlelength=3.5)


def run_curves(
    axes: Axes,
    losses: Mapping[str, Mapping[int, float]],
    evaluated: Mapping[str, Mapping[int, float]],
    limits: Mapping[str, float],
) -> None:
    """Draw runs that continue one another: name -> step -> loss. Rings: `evaluated`; lines across: limits."""
    for place, (name, of_step) in enumerate(losses.items()):
        axes.plot(list(of_step), list(of_step.values()), linewidth=1.2, color=colour(place), label=name)
        rings = evaluated.get(name, {})
        style: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": colour(place), "zorder": 3}
        axes.plot(list(rings), list(rings.values()), "o", **style)
    axes.plot([], [], "o", markerfacecolor="white", markeredgecolor=INK, label="on validation text")
    for name, value in limits.items():
        axes.axhline(value, color=FAINT, linestyle="--", linewidth=1.5)
        axes.text(
            0.99, value, name, va="bottom", ha="right", fontsize=9, transform=axes.get_yaxis_transform()
        )
    _losses(axes)
    axes.legend(loc="upper right")


def load_map(
    axes: Axes,
    loads: Mapping[str, Sequence[float]],
    *,
    title: str = "",
    most: float | None = None,
    bar: str = "",
) -> None:
    """Draw each expert's load: row -> loads, darker for more, up to `most`. Few rows also get numbers.

    bar: label of a colour bar; "" draws none.
    """
    most = most or max((value for row in loads.values() for value in row), default=1.0) or 1.0
    image = axes.imshow(list(loads.values()), cmap="Blues", vmin=0, vmax=most, aspect="auto")
    if bar:
        axes.figure.colorbar(image, ax=axes, label=bar, extend="max")
    if len(loads) <= 16:
        for y, row in enumerate(loads.values()):
            for x, value in enumerate(row):
                ink = "white" if value > 0.6 * most else "black"
                axes.text(x, y, f"{value:g}", ha="center", va="center", fontsize=8, color=ink)
    axes.set_yticks(range(len(loads)), list(loads))
    axes.set_xticks(range(max(map(len, loads.values()), default=0)))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set(xlabel="expert", title=title)


@dataclass(frozen=True)
class Interval:
    """Work of a rank from `start` to `end` (seconds); the label, such as a micro-batch, stands inside."""

    start: float
    end: float
    kind: str
    label: str = ""


def timeline(
    axes: Axes, rows: Mapping[str, Sequence[Interval]], *, kinds: Sequence[str] = (), title: str = ""
) -> None:
    """Draw one row per rank, coloured by kind: row -> intervals.

    `kinds` fixes the order of the colours, so that two timelines agree; blank time is idle.
    """
    kinds = list(dict.fromkeys([*kinds, *(i.kind for row in rows.values() for i in row)]))
    end = max((i.end for row in rows.values() for i in row), default=1.0) * 1e3
    for y, row in enumerate(rows.values()):
        axes.barh(y, end, height=0.8, color=FAINT, alpha=0.12)
        for item in row:
            start, length = item.start * 1e3, (item.end - item.start) * 1e3
            fill = colour(kinds.index(item.kind))
            axes.barh(y, length, left=start, height=0.8, color=fill, edgecolor="white", linewidth=0.5)
            if item.label and length > 0.012 * len(item.label) * end:
                _inside(axes, start + length / 2, y, item.label, fill)
    _rows(axes, list(rows))
    axes.set(xlim=(0, end), xlabel="time (ms)")
    axes.spines["left"].set_visible(False)
    _legend_above(axes, kinds, title)


def timelines(
    axes: Sequence[Axes], lines: Mapping[str, Mapping[str, Sequence[Interval]]], *, kinds: Sequence[str] = ()
) -> None:
    """Draw several timelines in the same colours: title -> row -> intervals. Unused `kinds` are left out."""
    occur = {i.kind for rows in lines.values() for row in rows.values() for i in row}
    for one, (title, rows) in zip(axes, lines.items(), strict=True):
        used = [kind for kind in kinds if kind in occur]
        timeline(one, rows, kinds=used, title=title)


def bytes_text(size: float) -> str:
    """Format a size in binary units, as short as possible: 4 KiB."""
    power = min(4, int(math.log2(size) // 10)) if size >= 1 else 0
    return f"{size / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def si_text(value: float) -> str:
    """Format a number with three digits and a prefix: 5.15k."""
    power = min(4, max(0, int(math.log10(abs(value)) // 3))) if value else 0
    return f"{value / 1000**power:.3g}{('', 'k', 'M', 'G', 'T')[power]}"


def _legend(axes: Axes) -> None:
    """Add a legend that hides nothing: beside the plot if there are many names."""
    many = len(axes.get_legend_handles_labels()[1]) > 6
    axes.legend(**{"loc": "upper left", "bbox_to_anchor": (1, 1)} if many else {"loc": "best"})


def _inside(axes: Axes, x: float, y: float, text: str, fill: str) -> None:
    """Write text on a coloured bar, white if the colour is dark."""
    r, g, b = mpl.colors.to_rgb(fill)
    dark = 0.299 * r + 0.587 * g + 0.114 * b < 0.5
    ink = "white" if dark else "black"
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color=ink, clip_on=True)


def _legend_above(axes: Axes, kinds: Sequence[str], title: str, first: int = 0) -> None:
    """Add colours and their names in one line over the plot, and the title over them."""
    patch = Later("matplotlib.patches").Patch
    handles = [patch(color=colour(place), label=kind) for place, kind in enumerate(kinds, first)]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(-0.01, 0.99), ncols=len(kinds) or 1, handlelength=1
    )
    axes.set_title(title, pad=22)


if __name__ == "__main__":
    print(f"{__doc__}\nTo draw what a benchmark measured: python scripts/visualize_results.py --help")
