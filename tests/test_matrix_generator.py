"""Generated matrices have the property in their name, and any split gives the same bits."""

import subprocess
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi.launch import python

from common.data.text import rank_slice
from common.errors import UsageError
from common.utils import matrix_generator
from common.utils.matrix_generator import KINDS, Matrix

SEEDS = [0, 1, 2**64 - 1]


def matrix(kind: str, rows: int, columns: int, seed: int = 0) -> Matrix:
    return Matrix(kind, rows, rows if kind == "spd" else columns, seed, rank=min(3, rows, columns))


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(list(KINDS)),
    shape=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    seed=st.integers(0, 2**64 - 1),
    grid=st.tuples(st.integers(1, 7), st.integers(1, 7)),
)
def test_every_grid_of_ranks_makes_the_same_bits(kind, shape, seed, grid):
    a = matrix(kind, *shape, seed)
    blocks = [
        [
            a.block(slice(*rank_slice(a.rows, p, grid[0])), slice(*rank_slice(a.columns, q, grid[1])))
            for q in range(grid[1])
        ]
        for p in range(grid[0])
    ]
    whole = a.block()
    assert whole.shape == (a.rows, a.columns)
    assert np.block(blocks).tobytes() == whole.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_large_blocks_too(kind):
    """Large blocks are equal bit for bit, too: BLAS products round differently only from some size on."""
    a = matrix(kind, 517, 389, seed=4)
    whole = a.block()
    for rows, columns in [
        (slice(0, 1), slice(None)),
        (slice(100, 391), slice(7, 9)),
        (slice(None), slice(200, 201)),
    ]:
        assert a.block(rows, columns).tobytes() == whole[rows, columns].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_seed_and_kind_choose_the_numbers(kind):
    a = matrix(kind, 30, 20)
    assert np.array_equal(a.block(), replace(a).block())
    assert not np.array_equal(a.block(), replace(a, seed=1).block())


def test_random_is_uniform():
    x = Matrix("random", 300, 200).block()
    assert x.min() >= -1
    assert x.max() < 1
    assert abs(x.mean()) < 0.01
    assert abs(x.var() - 1 / 3) < 0.01
    assert np.linalg.matrix_rank(x) == 200


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [(200, 200), (200, 70), (70, 200), (1, 1), (3, 2)])
def test_orthogonal(shape, seed):
    q = Matrix("orthogonal", *shape, seed).block()
    tall = q if shape[0] >= shape[1] else q.T
    assert abs(tall.T @ tall - np.eye(min(shape))).max() < 1e-12
    if min(shape) > 1:
        assert abs(q - np.eye(*shape)).max() > 0.1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rank", [1, 5, 40])
def test_low_rank(rank, seed):
    singular = np.linalg.svd(Matrix("low-rank", 60, 40, seed, rank=rank).block(), compute_uv=False)
    assert singular[rank - 1] > 1e-3
    assert (singular[rank:] < 1e-12).all()


@pytest.mark.parametrize("bandwidth", [0, 3, 100])
def test_banded(bandwidth):
    x = Matrix("banded", 50, 40, bandwidth=bandwidth).block()
    i, j = np.indices(x.shape)
    assert (x[abs(i - j) > bandwidth] == 0).all()
    assert (x[abs(i - j) <= bandwidth] != 0).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("condition", [1.0, 7.0, 1e6, 1e10])
def test_spd(condition, seed):
    x = Matrix("spd", 150, 150, seed, condition=condition).block()
    assert np.array_equal(x, x.T)
    eigenvalues = np.linalg.eigvalsh(x)
    assert eigenvalues[0] > 0
    assert eigenvalues[-1] == pytest.approx(1, abs=1e-12)
    assert eigenvalues[-1] / eigenvalues[0] == pytest.approx(condition, rel=1e-13 * max(10, condition))
    assert np.allclose(np.diff(np.log(eigenvalues)), np.log(condition) / 149, atol=1e-13 * condition)
    if condition > 1:
        assert abs(x - np.diag(np.diag(x))).max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_never_holds_the_whole(kind):
    a = matrix(kind, 20_000, 20_000)  # 3.2 GB
    tracemalloc.start()
    a.block(slice(5, 8), slice(19_000, 20_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "magic"}, "kind 'magic' is unknown; choose one of random, orthogonal"),
        ({"kind": "low-rank", "rows": 3, "rank": 4}, "rank 4 does not fit 3 x 64; at most 3 does"),
        ({"kind": "spd", "rows": 3}, "square, not 3 x 64; 3 x 3 or 64 x 64 would be"),
        ({"kind": "spd", "condition": 0.5}, "--condition 0.5: give a number from 1 to 1e.12"),
    ],
)
def test_bad_fields_get_one_line(fields, message):
    with pytest.raises(UsageError, match=message):
        Matrix(**fields)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python(), matrix_generator.__file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_command_line():
    good = run("--kind", "spd", "--rows", "20", "--columns", "20", "--condition", "50")
    assert good.returncode == 0
    for said in ("20 x 20", "│ 50", "symmetric", "equal to the whole"):
        assert said in good.stdout
    bad = run("--kind", "low-rank", "--rank", "99")
    assert bad.returncode == 2
    assert bad.stderr == "error: rank 99 does not fit 64 x 64; at most 64 does\n"
