"""The pictures of docs/images are those that the script draws; pages show them; their numbers are the pages' own."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts" / "pictures"))

import common_pictures  # noqa: E402
import draw_pictures  # noqa: E402

import dp_pictures  # noqa: E402
import hybrid_pictures  # noqa: E402
import sp_pictures  # noqa: E402
import tp_pictures  # noqa: E402
from plan_job import Job  # noqa: E402
from plan_layout import CODES, Plan  # noqa: E402
from plan_machine import read_machine  # noqa: E402
from plan_memory import memory  # noqa: E402
from plan_models import model  # noqa: E402

IMAGES = ROOT / "docs" / "images"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
ID = re.compile(r"\b[pmC][0-9a-f]{10}\b")  # a hash of coordinates


def test_pictures_are_drawn_as_they_are_in_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal files, but for the last digits of coordinates, in which processors may differ."""
    monkeypatch.setitem(mpl.rcParams, "font.family", ["serif"])  # as a user's matplotlibrc may ask for
    for name, draw in draw_pictures.PICTURES.items():
        draw(tmp_path / f"{name}.svg")
        drawn, kept = (ID.sub("id", (folder / f"{name}.svg").read_text()) for folder in (tmp_path, IMAGES))
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
    pages = {n: next((ROOT / "docs").glob(f"{n}-*.md")).read_text() for n in ("01", "03")}
    code = replace(CODES["megatron-core"], gradient_bytes=2)
    job = Job(model("llama3-70b"), code, read_machine("h100"), 512, 8192)
    assert hybrid_pictures.ROOM == 80
    for name, (tp, pp, dp, stage, again) in hybrid_pictures.MESHES.items():
        parts = hybrid_pictures.gigabytes(tp, pp, dp, stage, again)
        state = sum(parts.values()) - parts["activations"]
        named = {axis: int(n) for axis, n in re.findall(r"(tp|pp|dp) (\d+)", name)} or {"pp": 8, "dp": 8}
        assert {"tp": 1, "pp": 1, "dp": 1} | named == {"tp": tp, "pp": pp, "dp": dp}, name
        assert stage == int((re.findall(r"ZeRO-(\d)", name) or ["1" if "same" in name else "0"])[0]), name
        if tp * pp == 1:
            gigabytes = round(state, -1) if stage == 0 else state
            assert re.search(rf"^\| {stage} \| [\d.+ =]*{gigabytes:.0f} \| \d+ GB", pages["01"], re.M), name
        planned = memory(
            job,
            Plan(pp, dp, tp=tp, zero=stage, kept="inputs" if again else "all", sequence_parallel=tp > 1),
        )
        for what, found in parts.items():
            counted = getattr(planned, "states" if what == "AdamW's state" else what) / 1e9
            assert found == pytest.approx(counted, rel=0.25, abs=0.1), (name, what)
    for ranks in (8, 16):
        assert f"{sum(tp_pictures.seconds(ranks)):.2f} s" in pages["03"]
    pairs = [sp_pictures.owners(order) for order in sp_pictures.ORDERS]
    work = [
        [sum(q + 1 for q, of in enumerate(owners) if of == rank) for rank in range(4)] for owners in pairs
    ]
    assert work == [[10, 26, 42, 58], [34] * 4]
