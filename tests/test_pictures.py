"""The pictures of docs/images are those that the script draws; pages show them; their numbers are the pages' own."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts" / "pictures"))

import common_pictures  # noqa: E402
import draw_pictures  # noqa: E402

import dp_pictures  # noqa: E402
import hybrid_pictures  # noqa: E402
import sp_pictures  # noqa: E402

IMAGES = ROOT / "docs" / "images"
NUMBER = re.compile(r"-?\d+\.\d+")


def test_pictures_are_drawn_as_they_are_in_docs(tmp_path: Path) -> None:
    """Equal files, but for the last digits of coordinates, in which processors may differ."""
    for name, draw in draw_pictures.PICTURES.items():
        draw(tmp_path / f"{name}.svg")
        drawn, kept = ((folder / f"{name}.svg").read_text() for folder in (tmp_path, IMAGES))
        assert NUMBER.sub("", drawn) == NUMBER.sub("", kept), f"{name}: run make pictures"
        ours, theirs = ([float(x) for x in NUMBER.findall(text)] for text in (drawn, kept))
        assert ours == pytest.approx(theirs, abs=1e-3), name


def test_every_picture_is_shown_once_and_follows_the_theme() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for name in draw_pictures.PICTURES:
        assert pages.count(f"](images/{name}.svg)") == 1, name
        text = (IMAGES / f"{name}.svg").read_text()
        assert "prefers-color-scheme: dark" in text
        assert any(element.tag.endswith("}text") for element in ET.fromstring(text).iter())  # text as text


def test_ring_ends_with_all_sums_everywhere() -> None:
    steps, n = common_pictures.ring(), common_pictures.RANKS
    assert len(steps) == 1 + 2 * (n - 1)
    assert steps[-1][1] == [[set(range(n))] * n] * n
    complete = [[len(of) == n for of in row] for row in steps[n - 1][1]]
    assert [row.count(True) for row in complete] == [1] * n  # after the reduce-scatter one piece on each rank


def test_numbers_in_pictures_are_those_of_the_pages() -> None:
    assert [sum(dp_pictures.kept(stage, 8).values()) for stage in range(4)] == [16, 9, 5.5, 2]
    text = (ROOT / "docs" / "06-hybrid-parallelism.md").read_text()
    for name, (tp, pp, dp, stage, again) in hybrid_pictures.MESHES.items():
        total = sum(hybrid_pictures.gigabytes(tp, pp, dp, stage, again).values())
        row = re.search(
            rf"^\| {tp} \| {pp} \| {dp} \| {'yes' if again else 'no'} \|[^|]*\|[^|]*\| (\d+) \|", text, re.M
        )
        assert row is None or int(row[1]) == round(total), name
        assert row or pp * tp in (1, 8), name
    pairs = [sp_pictures.owners(order) for order in sp_pictures.ORDERS]
    work = [
        [sum(q + 1 for q, of in enumerate(owners) if of == rank) for rank in range(4)] for owners in pairs
    ]
    assert work == [[10, 26, 42, 58], [34] * 4]
