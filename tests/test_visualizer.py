"""The plots show the given numbers, with units, in colours that colour-blind readers can tell apart."""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from common.utils import visualizer
from common.utils.visualizer import Interval

RATES = {"naive": {1: 5200.0, 2: 9000.0}, "ddp": {1: 5150.0, 2: 9900.0}}


def new_axes() -> Axes:
    return Figure().subplots()


def bars(axes: Axes) -> list[tuple[float, float, float]]:
    """Return (left, width, y of the middle) of every bar, in drawing order."""
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return [(b.get_x(), b.get_width(), b.get_y() + b.get_height() / 2) for b in boxes]


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_throughput_has_a_bar_for_every_number() -> None:
    axes = new_axes()
    visualizer.throughput_bars(axes, RATES, unit="tokens/s")
    assert [width for _, width, _ in bars(axes)] == [5200, 9000, 5150, 9900]
    assert texts(axes) == ["naive", "5.2k", "9k", "ddp", "5.15k", "9.9k"]
    assert axes.get_xlabel() == "tokens/s"
    assert len({y for *_, y in bars(axes)}) == 4
    assert axes.get_xlim()[0] == 0  # a bar must begin at 0


def test_scaling_draws_the_ideal_up_to_the_cores() -> None:
    axes = new_axes()
    visualizer.scaling_lines(axes, {"ddp": {1: 1.0, 2: 1.9, 4: 1.8}}, cores=2)
    ideal, ddp = axes.lines
    assert ideal.get_xydata().tolist() == [[1, 1], [2, 2], [4, 2]]
    assert ddp.get_xydata().tolist() == [[1, 1], [2, 1.9], [4, 1.8]]
    assert "ranks share cores" in texts(axes)
    alone = new_axes()
    visualizer.scaling_lines(alone, {"ddp": {1: 1.0, 2: 1.9}}, cores=8)
    assert "ranks share cores" not in texts(alone)


def test_throughput_lines_begin_at_0_and_draw_the_ideal_up_to_the_cores() -> None:
    axes = new_axes()
    rates = {"naive": {1: 900.0, 2: 1500.0, 4: 1400.0}, "ddp": {1: 1100.0, 2: 2000.0, 4: 1900.0}}
    visualizer.throughput_lines(axes, rates, unit="tokens per second", cores=2)
    ideal, *lines = axes.lines
    assert ideal.get_xydata().tolist() == [[1, 1000], [2, 2000], [4, 2000]]
    assert [dict(line.get_xydata().tolist()) for line in lines] == list(rates.values())
    assert (axes.get_ylim()[0], axes.get_xlabel(), axes.get_ylabel()) == (0, "ranks", "tokens per second")
    assert "ranks share cores" in texts(axes)


def test_shares_add_up_and_name_the_sum() -> None:
    axes = new_axes()
    visualizer.share_bars(axes, {"ddp, 2 ranks": {"compute": 90.0, "communication": 30.0}}, unit="ms")
    assert [(left, width) for left, width, _ in bars(axes)] == [(0, 0.75), (0.75, 0.25)]
    assert texts(axes) == ["75%", "25%", "120 ms"]


def test_bandwidth_over_size_with_its_limit() -> None:
    axes = new_axes()
    bandwidths, copy = {"all_reduce": {2**20: 1.0, 2**22: 2.0}}, {2**22: 3.0, 2**20: 4.0}
    visualizer.bandwidth_lines(axes, bandwidths, limit=("memory copy", copy))
    ours, limit = axes.lines
    assert ours.get_xydata().tolist() == [[2**20, 1], [2**22, 2]]
    assert limit.get_xydata().tolist() == [[2**20, 4], [2**22, 3]]
    assert (limit.get_linestyle(), limit.get_label()) == ("--", "memory copy")
    assert axes.get_ylim()[1] > 4
    assert axes.get_ylabel() == "bus bandwidth (GB/s)"
    assert [visualizer.bytes_text(2.0**n) for n in (0, 10, 22)] == ["1 B", "1 KiB", "4 MiB"]


def test_equal_loss_curves_all_stay_visible() -> None:
    axes = new_axes()
    visualizer.loss_curves(axes, {"one device": [3.0, 2.0], "ZeRO-1": [3.0, 2.0]})
    first, second = axes.lines
    assert first.get_linewidth() > second.get_linewidth()
    assert (first.get_linestyle(), second.get_linestyle()) == ("-", "--")
    assert axes.get_ylabel() == "loss (nats a token)"


def test_curves_that_differ_are_means_of_steps() -> None:
    axes = new_axes()
    visualizer.loss_curves(axes, {"every step": [4.0, 2.0, 3.0], "local": [4.0, 3.0, 3.0]}, mean=2)
    assert [list(line.get_data()[0]) for line in axes.lines] == [[1, 2], [1, 2]]
    assert [list(line.get_data()[1]) for line in axes.lines] == [[3.0, 2.5], [3.5, 3.0]]


def test_timeline_places_intervals_in_the_order_of_kinds() -> None:
    axes = new_axes()
    rows = {"rank 0": [Interval(0, 1, "forward", "0")], "rank 1": [Interval(2, 4, "backward", "0")]}
    visualizer.timeline(axes, rows, kinds=("backward", "forward"))
    drawn = [bar for bar in bars(axes) if bar[1] < 4000]  # without the idle background
    assert drawn == [(0, 1000, 0), (2000, 2000, 1)]
    colours = {patch.get_facecolor() for patch in axes.patches if patch.get_alpha() is None}
    assert colours == {mpl.colors.to_rgba(visualizer.colour(i)) for i in (0, 1)}
    assert mpl.colors.to_rgba(visualizer.colour(1)) in {p.get_facecolor() for p in axes.patches[:2]}
    assert axes.get_xlabel() == "time (ms)"


def test_loads_are_written_into_the_map() -> None:
    axes = new_axes()
    visualizer.load_map(axes, {"top-1": [9, 0, 3], "expert choice": [4, 4, 4]})
    assert texts(axes) == ["9", "0", "3", "4", "4", "4"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["top-1", "expert choice"]
    assert axes.images[0].get_array().tolist() == [[9, 0, 3], [4, 4, 4]]
    assert [text.get_color() for text in axes.texts][:2] == ["white", "black"]


def test_figure_saves_every_format_and_leaves_no_style_behind(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    paths = [tmp_path / "new" / f"plot.{kind}" for kind in ("png", "svg", "pdf")]
    with visualizer.figure(*paths, columns=2) as (left, right):
        visualizer.throughput_bars(left, RATES, unit="tokens/s", title="Throughput")
        visualizer.scaling_lines(right, {"ddp": {1: 1.0, 2: 1.9}})
    assert all(path.stat().st_size > 1000 for path in paths)
    assert dict(mpl.rcParams) == before


def test_the_same_picture_is_the_same_file(tmp_path: Path) -> None:
    for name in "ab":
        with visualizer.figure(tmp_path / f"{name}.svg") as (axes,):
            visualizer.throughput_bars(axes, RATES, unit="tokens/s")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


# Machado, Oliveira, Fernandes 2009: what a person sees who lacks one kind of cone, in linear RGB.
LACKS = {
    "none": np.eye(3),
    "red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "blue": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.mark.parametrize("lacks", LACKS)
def test_colours_are_told_apart(lacks: str) -> None:
    seen = [LACKS[lacks] @ np.array(mpl.colors.to_rgb(c)) ** 2.2 for c in visualizer.COLOURS[:6]]
    shown = [np.clip(one, 0, 1) ** (1 / 2.2) for one in seen]
    closest = min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(shown, 2))
    assert closest > 0.1
