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
spawn.START = "forkserver"  # also where pytest itself has one thread
spawn.TIMEOUT = 240.0  # a shared host can stand still for minutes

# about a minute to half a minute each on two cores; handed out first, so that none is waited for at the end
LONGEST = (
    "hybrid mpi_backend launch_files runtime hybrid_faults pp dp_zero hybrid_trainer lessons tp dp_mixed_precision "
    "dp_languages ep_libtorch mpi_groups tp_summa museum_hybrid notebooks debug"
)

# Each takes 3 to 60 s of CPU, and what it tests is also tested on fewer ranks, on other meshes or with another start:
# `make test` leaves them out, `make test-slow` runs them.
SLOW = """
checked::right_lessons_are_silent
dp::equal_to_one_device[4]
dp_accumulation::equal_to_one_device[4]
dp_accumulation::equal_to_one_device[8]
dp_checkpointing::equal_to_one_device[8]
dp_compression::ranks_equal_one_device[4]
dp_compression::ranks_equal_one_device[8]
dp_data_parallel::equal_to_one_device_and_bytes_by_rank[8-9]
dp_libtorch::gpt2_trains_as_in_python[4]
dp_local_sgd::equal_to_replicas_on_one_device[4]
dp_local_sgd::equal_to_replicas_on_one_device[8]
dp_local_sgd::lesson[3-7]
dp_mixed_precision::loss_scaling[4]
dp_mixed_precision::loss_scaling[8]
dp_zero::lesson[3-options2]
dp_zero::lesson[8-options4]
dp_zero::the_library_beside_it
ep::equal_to_one_device[8]
equality::the_margin_between_rounding_and_the_smallest_mistake
exercises::exercise_in_cpp[01/6]
exercises::exercise_in_cpp[01/7]
exercises::exercise_in_cpp[02/6]
exercises::exercise_in_cpp[04/6]
hybrid::rows_of_the_proof_table[12-15]
hybrid::rows_of_the_proof_table[8-36]
hybrid::torch_s_parts_compose_to_the_same
hybrid_balance::equal_to_one_device[8]
hybrid_balance::equal_to_one_device[more]
hybrid_overlap::equal_to_sums_afterwards[8]
hybrid_overlap::equal_to_sums_afterwards[more]
hybrid_languages::eight_ranks_agree[gpt2]
hybrid_languages::eight_ranks_agree[gpt2-moe]
hybrid_languages::eight_ranks_agree[mixtral]
hybrid_languages::rows_of_the_proof_table
hybrid_faults::a_checkpoint_that_never_comes_is_named_too
hybrid_faults::a_weight_or_a_token_that_is_not_a_number_is_refused
hybrid_trainer::evaluation_and_text_are_the_same_on_every_mesh
hybrid_trainer::explain_trains_nothing
hybrid_libtorch::the_module_equals_one_device_and_python[8-4]
launch_files::two_hosts_give_the_numbers_of_one[hybrid_5d]
hybrid_whole::200_steps_are_those_of_python
launch_files::mpirun_with_hosts_on_its_command_line
launch_files::torchrun_with_a_rank_for_each_node
inference::200_requests_that_join_leave_and_are_cancelled[1-1]
inference::200_requests_that_join_leave_and_are_cancelled[2-1]
inference::a_shared_expert_is_summed_once_over_tp[4-2]
inference::text_is_that_of_transformers_and_of_one_device[1-6]
inference::text_is_that_of_transformers_and_of_one_device[2-3]
inference::text_is_that_of_transformers_and_of_one_device[3-1]
inference::text_is_that_of_transformers_and_of_one_device[3-2]
inference::text_is_that_of_transformers_and_of_one_device[5-1]
planner::the_search_finds_what_brute_force_finds[gpt3-175b-64-16]
planner::the_search_finds_what_brute_force_finds[llama-7b-16-32]
pp::equal_to_one_device[8]
sp::equal_to_one_device[4]
sp::equal_to_one_device[8]
sp::peak_of_the_ring_falls_with_ranks_and_does_not_grow_with_them
tp::equal_to_one_device[4]
tp::equal_to_one_device[8]
tp_libtorch::gpt2_trains_as_in_python[8-8]
visualize_results::the_benchmark_over_a_file_of_hosts
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="seed of the text and of the lessons")
    parser.addoption("--steps", type=int, default=5, help="steps of each lesson in portability.py")


def pytest_configure(config: pytest.Config) -> None:
    """Give this process, its ranks and its programs a text of our own; options that name no seed take this one."""
    seed = config.getoption("--seed")
    os.environ.setdefault("FIVED_TEXT", str(grammar.file(seed)))
    LessonOptions.__dataclass_fields__["seed"].default = seed  # each lesson's options inherit the field


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests. The longest files come first, the others as they came."""
    slow = {"tests/test_" + "::test_".join(line.split("::")) for line in SLOW.split()}
    slow = {line.replace("::", ".py::", 1) for line in slow}
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")
    places = {f"test_{name}": place for place, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="module")
def found_on_mpi(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Return what the worker of a test_X_libtorch.py finds under mpirun: {number of ranks: each rank's outcomes}."""
    return on_mpi(request.path.stem.removeprefix("test_"), tmp_path_factory)
