"""Ranks fork from a server that has already imported what test modules and torch's lazy corners import."""

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; ranks and their baseline alike
# mpirun reads this where the set-up wrote it; a program that starts alone does not, and sleeps for a second
os.environ.setdefault("OMPI_MCA_btl", "^ofi")

import grammar
import pytest
from mpi.launch import on_mpi

from common.launch import spawn
from common.lesson.runner import LessonOptions

FOLDERS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if (here := str(Path(__file__).parent)) not in FOLDERS:  # the server has another sys.path than pytest
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, *FOLDERS]))
spawn.PRELOAD += ["preloaded"]

# about a minute to half a minute each on two cores; handed out first, so that none is waited for at the end
LONGEST = (
    "hybrid mpi_backend launch_files runtime hybrid_faults pp dp_zero hybrid_trainer lessons tp dp_mixed_precision "
    "dp_languages ep_libtorch mpi_groups tp_summa museum_hybrid notebooks debug"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="seed of the text and of the lessons")
    parser.addoption("--steps", type=int, default=5, help="steps of each lesson in portability.py")


def pytest_configure(config: pytest.Config) -> None:
    """Give this process, its ranks and its programs a text of our own; options that name no seed take this one."""
    seed = config.getoption("--seed")
    os.environ.setdefault("FIVED_TEXT", str(grammar.file(seed)))
    LessonOptions.__dataclass_fields__["seed"].default = seed  # each lesson's options inherit the field


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; the others as they came."""
    places = {f"test_{name}": place for place, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="module")
def found_on_mpi(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Return what the worker of a test_X_libtorch.py finds under mpirun: {number of ranks: each rank's outcomes}."""
    return on_mpi(request.path.stem.removeprefix("test_"), tmp_path_factory)
