"""Notebooks run from top to bottom on ranks of their own cells, and are stored without outputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from markdown_it import MarkdownIt
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook
from test_docs import ROOT, anchors

NOTEBOOKS = sorted(ROOT.glob("0*/notebooks/*.ipynb"))
IDS = [notebook.stem for notebook in NOTEBOOKS]


@pytest.fixture(scope="module")
def kernel() -> Iterator[KernelManager]:
    """Start one kernel for all notebooks: importing torch and starting the ranks' server takes 5 s of CPU."""
    manager = KernelManager()
    manager.start_kernel()
    yield manager
    manager.shutdown_kernel(now=True)


def execute(kernel: KernelManager, *cells: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Run the cells in a kernel without names of other notebooks."""
    notebook = new_notebook(cells=[new_code_cell("%reset_selective -f ."), *cells])
    return NotebookClient(notebook, km=kernel, timeout=240).execute()


def read(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_notebooks_run(path: Path, kernel: KernelManager) -> None:
    done = execute(kernel, *read(path).cells)
    shown = [output.data for cell in done.cells for output in cell.get("outputs", ()) if "data" in output]
    assert sum("image/png" in data for data in shown) >= 2  # pictures
    assert any("rank" in data.get("text/html", "") for data in shown)  # a table of the ranks' tensors


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_notebooks_are_stored_without_outputs(path: Path) -> None:
    notebook = read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not [cell.id for cell in code if cell.outputs or cell.execution_count]
    assert not [cell.id for cell in notebook.cells if cell.metadata]
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert code[0].source.startswith("%matplotlib inline\n")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_notebooks_link_pages_that_exist(path: Path) -> None:
    texts = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    assert sum("**Change it:**" in text for text in texts) >= 2
    tokens = [t for text in texts for token in MarkdownIt().parse(text) for t in token.children or ()]
    links = [str(token.attrGet("href")) for token in tokens if token.type == "link_open"]
    assert links
    for link in links:
        page, _, anchor = link.partition("#")
        assert (path.parent / page).exists(), link
        assert not anchor or anchor in anchors((path.parent / page).resolve()), link


FAILS = """
from common.launch.spawn import spawn

def divide(rt):
    return 1 / rt.rank  # not on rank 0

spawn(divide, 2)
"""


def test_a_failing_cell_shows_the_rank_and_its_line(kernel: KernelManager) -> None:
    with pytest.raises(CellExecutionError) as error:
        execute(kernel, new_code_cell(FAILS))
    report = str(error.value).partition("RankError")[2]
    assert "rank 0 failed" in report
    assert "return 1 / rt.rank  # not on rank 0\n" in report.partition("rank 0 failed")[2]
    assert "ZeroDivisionError" in report
