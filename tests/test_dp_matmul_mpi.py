"""dp_matmul_mpi on 1 to 4 ranks against numpy; the binary's proof, record and exit codes; the closed form."""

import itertools
import json
import re

import numpy as np
import pytest
from mpi.launch import mpirun, need_binary, need_module, refused_by, run_worker

from common.benchmarks.measures import problem

# uneven on 2, 3 and 4 ranks; even on all; less than 3 rows, columns, inner; one number
SHAPES = [(13, 7, 11), (24, 12, 36), (2, 5, 9), (9, 2, 2), (1, 1, 1)]
CASES = [
    [shape, split, panels, dtype]
    for shape, split, (panels, dtype) in itertools.product(
        SHAPES, ["rows", "columns", "inner"], [(1, "float64"), (3, "float64"), (2, "float32")]
    )
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run one mpirun for all numbers of ranks; return {ranks: the worker's results}."""
    need_module("dp_matmul_mpi")
    return run_worker(
        4, "dp_matmul_mpi_worker.py", tmp_path_factory.mktemp("dp_matmul_mpi"), json.dumps(CASES)
    )


@pytest.fixture(params=[1, 2, 3, 4], ids="{0} ranks".format)
def results(request, found):
    """Return (ranks, the worker's results)."""
    return request.param, found[str(request.param)]


def test_pieces_put_together_are_numpys(results):
    for (shape, split, panels, dtype), apart in zip(CASES, results[1]["apart"], strict=True):
        assert max(apart) < (1e-13 if dtype == "float64" else 1e-5), (shape, split, panels, dtype, apart)


def test_pieces_that_do_not_fit_are_refused(results):
    ranks, found = results
    unknown, odd, vector, whole_numbers = found["refused"]
    assert unknown == "ValueError: split is diagonal; it is rows, columns or inner"
    assert re.fullmatch(
        rf"ValueError: this rank's piece of B is \[4, 4\]; given is \[{3 * ranks + 2}, 4\]", odd
    )
    assert vector == "ValueError: a matrix has 2 dimensions; given 1"
    assert re.match("TypeError: .*incompatible function arguments", whole_numbers)


def lesson(ranks, *arguments):
    return mpirun(ranks, need_binary("dp_matmul_mpi"), "--steps", "1", "--most-panels", "4", *arguments)


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (3, ["--rows", "40", "--inner", "31", "--columns", "37", "--panels", "5"]),
        (4, ["--rows", "3", "--inner", "2", "--columns", "1", "--link", "0"]),  # fewer than ranks
        (8, ["--rows", "9", "--inner", "17", "--columns", "5"]),
        (2, ["--rows", "64", "--inner", "64", "--columns", "64", "--dtype", "float32"]),
    ],
)
def test_binary_proves_itself(ranks, arguments):
    done = lesson(ranks, *arguments)
    assert done.returncode == 0, done.stderr
    assert f"proved: C, dA and dB on {ranks} rank(s) equal the serial ones" in done.stdout


def test_bytes_by_hand_and_record(tmp_path):
    record = tmp_path / "record.json"
    sizes = ["--rows", "10", "--inner", "8", "--columns", "6", "--json", record]
    done = lesson(4, *sizes)
    assert done.returncode == 0, done.stderr
    comparison = done.stdout.split("rounds in turn")[0]
    rows = {line.split()[0]: line.split()[1:] for line in comparison.splitlines() if line}
    # all ranks together: an all-reduce sends 2(n-1) times the matrix, a turn of the ring (n-1) times
    assert rows["rows"][3:] == ["0", "0", *[str(2 * 3 * 8 * 6 * 8)] * 2]
    assert rows["columns"][3:] == ["0", "0", *[str(2 * 3 * 10 * 8 * 8)] * 2]
    assert rows["inner"][3:] == [str(3 * 10 * 6 * 8)] * 4
    assert rows["broadcast"][1:] == [str(3 * 8 * 6 * 8)] * 2
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert not any(map(problem, lines))
    assert [line["implementation"] for line in lines] == [
        f"dp_matmul_mpi, {name}" for name in ("rows", "columns", "inner")
    ]
    for line in lines:
        assert (line["ranks"], line["flop_per_step"], line["equal"]) == (4, 2 * 10 * 8 * 6, True)
        assert line["bytes_counted"] == line["bytes_formula"]
        assert len(line["step_seconds"]) == 1


def test_predicted_panels_follow_the_closed_form():
    done = lesson(2, "--rows", "200", "--inner", "100", "--columns", "100")
    found = re.findall(
        r"product ([\d.]+) ms, messages ([\d.]+), a panel more ([\d.]+)\n.*\n((?: +\d+.*\n)+)best n: predicted (\d+)",
        done.stdout,
    )
    assert len(found) == 2  # as MPI moves them, and on the pretended link
    for product, messages, overhead, table, best in found:
        tc, tm, o = float(product), float(messages), float(overhead)
        for line in table.splitlines():
            n, predicted = line.split()[:2]
            by_hand = max(tc, tm) + min(tc, tm) / int(n) + int(n) * o
            assert float(predicted) == pytest.approx(by_hand, abs=2e-3 + int(n) * 1e-4)
        if o > 2e-4:  # printed with four digits
            exact = np.clip(np.sqrt(min(tc, tm) / o), 1, 4)
            assert abs(int(best) - exact) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "--rows 0: give a number from 1 to 1000000000"),
        (["--dtype", "int8"], "--dtype int8: choose one of float64, float32"),
        (["--link", "-1"], "--link -1: give a number from 0 to 1e+09"),
        (["--json", "/no/such/folder/record.json"], "cannot write to /no/such/folder/record.json"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    assert refused_by("dp_matmul_mpi", *arguments) == message
