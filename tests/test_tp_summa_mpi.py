"""tp_summa_mpi on grids of 1 to 6 ranks against numpy; the binary's proof, bytes, record and exit codes."""

import itertools
import json
import re

import pytest
from mpi.launch import mpirun, need_binary, need_module, refused_by, run_worker

# uneven on all grids; even on all; less rows, inner or columns than ranks in a line; one number
SHAPES = [(13, 7, 11), (24, 12, 36), (2, 5, 9), (9, 2, 2), (1, 1, 1)]
GRIDS = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 4: [(2, 2), (1, 4)], 6: [(2, 3), (3, 2)]}
HOW = [
    (1, "float64", "mpi", True),
    (3, "float64", "mpi", False),
    (3, "float64", "host", True),
    (2, "float32", "host", False),
]


def cases(ranks):
    return [[shape, grid, *how] for shape, grid, how in itertools.product(SHAPES, GRIDS[ranks], HOW)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run one mpirun for all numbers of ranks; return {ranks: the worker's results}."""
    need_module("tp_summa_mpi")
    given = json.dumps({ranks: cases(ranks) for ranks in GRIDS})
    return run_worker(max(GRIDS), "tp_summa_mpi_worker.py", tmp_path_factory.mktemp("tp_summa_mpi"), given)


@pytest.fixture(params=GRIDS, ids="{0} ranks".format)
def results(request, found):
    """Return (ranks, the worker's results)."""
    return request.param, found[str(request.param)]


def test_blocks_put_together_are_numpys(results):
    ranks, found = results
    for case, apart in zip(cases(ranks), found["apart"], strict=True):
        assert max(apart) < (1e-13 if "float64" in case else 1e-5), (case, apart)


def test_blocks_that_do_not_fit_are_refused(results):
    ranks, found = results
    unknown, grid, odd, vector, whole_numbers = found["refused"]
    assert unknown == "ValueError: carrier is pigeon; it is mpi or host"
    assert grid == f"ValueError: a grid of {ranks} x 2 is not one of {ranks} ranks"
    assert odd == f"ValueError: this rank's block of B is [{4 * ranks}, 4]; given is [5, 4]"
    assert vector == "ValueError: a matrix has 2 dimensions; given 1"
    assert re.match("TypeError: .*incompatible function arguments", whole_numbers)


def lesson(ranks, *arguments):
    return mpirun(ranks, need_binary("tp_summa_mpi"), "--steps", "1", *arguments)


@pytest.mark.parametrize(
    ("ranks", "arguments", "grid"),
    [
        (3, ["--rows", "40", "--inner", "31", "--columns", "37", "--panels", "5"], "1 x 3"),
        (4, ["--rows", "3", "--inner", "2", "--columns", "1", "--grid", "4x1"], "4 x 1"),  # fewer than ranks
        (8, ["--rows", "9", "--inner", "17", "--columns", "5"], "2 x 4"),
        (4, ["--rows", "64", "--inner", "64", "--columns", "64", "--dtype", "float32"], "2 x 2"),
    ],
)
def test_binary_proves_itself(ranks, arguments, grid):
    done = lesson(ranks, *arguments)
    assert done.returncode == 0, done.stderr
    assert f"{grid} ranks" in done.stdout
    assert f"proved: C, dA and dB on {ranks} rank(s) equal the serial ones" in done.stdout


def test_bytes_by_hand_and_record(tmp_path):
    record = tmp_path / "record.json"
    sizes = ["--rows", "10", "--inner", "8", "--columns", "6", "--grid", "2x3", "--json", record]
    done = lesson(6, *sizes)
    assert done.returncode == 0, done.stderr
    comparison = done.stdout.split("rounds in turn")[0]
    forward = ((3 - 1) * 10 * 8 + (2 - 1) * 8 * 6) * 8  # all ranks together: (C-1) |A| + (R-1) |B|
    names = ["mpi", "mpi overlapped", "host", "host overlapped"]
    for name in names:
        row = next(line for line in comparison.splitlines() if line.startswith(f"{name} ".ljust(17)))
        assert row.split()[-4:] == [str(forward)] * 2 + [str(2 * forward)] * 2
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["implementation"] for line in lines] == [f"tp_summa_mpi, {name}" for name in names]
    for line in lines:
        assert (line["strategy"], line["ranks"], line["equal"]) == ("tp", 6, True)
        assert line["flop_per_step"] == 2 * 10 * 8 * 6
        assert line["bytes_counted"] == line["bytes_formula"]
        assert len(line["step_seconds"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "--rows 0: give a number from 1 to 1000000000"),
        (["--dtype", "int8"], "--dtype int8: choose one of float64, float32"),
        (["--grid", "2by2"], "--grid is 2by2; it is rows x columns of ranks, such as 1x1"),
        (["--grid", "0x1"], "--grid is 0x1; it is rows x columns of ranks, such as 1x1"),
        (["--grid", "2x3"], "--grid 2x3 needs 6 ranks, here are 1; --grid 1x1 would fit"),
        (["--json", "/no/such/folder/record.json"], "cannot write to /no/such/folder/record.json"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    assert refused_by("tp_summa_mpi", *arguments) == message
