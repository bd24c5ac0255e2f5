"""The examples of the pages on distributed tensors run on one rank and on several."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from common import tensors
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.tensors import Grid, manager

DOCS = Path(__file__).resolve().parents[1] / "docs"


def examples(page: str) -> list[str]:
    """Return the page's blocks of Python."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


def run(rt: Runtime, page: str) -> int:
    """Run the blocks in order, in one namespace; return how many asserts they have."""
    names: dict[str, Any] = {"grid": Grid(rt.world)}
    blocks = examples(page)
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return sum(block.count("assert ") for block in blocks)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("page", ["distributed-tensors.md", "tensors-api.md"])
def test_examples_run(page: str, n: int) -> None:
    assert min(spawn(run, n, page)) > 10


def test_every_function_has_its_entry() -> None:
    text = (DOCS / "tensors-api.md").read_text()
    public = [*tensors.__all__, *(name for name in vars(manager) if name.startswith("distributed_"))]
    assert len(public) > 50
    missing = {name for name in public if not re.search(rf"\b{name}\b", text)}
    assert not missing - {"DistributedTensor", "Layout"}
