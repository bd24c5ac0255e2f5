"""C = A B split in four ways: the shards give numpy's C, dA and dB; bytes, memory, and refused options."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from beside_one_device import here
from mpi.launch import ROOT, refusal
from torch import Tensor

from common.comm import sizes_of
from common.comm.ledger import Ledger
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.matrices import Product, benchmark

from dp_costs import product_bytes
from dp_matrices import SPLITS, MatrixOptions
from dp_matrix_multiply import gather_on_rank_0, main, multiply, prepared, products
from dp_matrix_peers import dtensor

LESSON = ROOT / "01-data-parallelism/pytorch/dp_matrix_multiply.py"
# uneven on 2, 3, 4 and 8 ranks; even on all; less than 8 rows, columns, or both, and than 3; one number
SHAPES = [(13, 7, 11), (8, 16, 24), (3, 5, 9), (1, 2, 1), (9, 2, 2), (1, 1, 1)]


def random(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mine(x: Tensor, dim: int | None, rt: Runtime) -> Tensor:
    return x if dim is None else x.split(sizes_of(x.shape[dim], rt.world_size), dim)[rt.rank].clone()


def pieces(rt: Runtime, panels: int) -> list[dict[str, Any]]:
    """Return this rank's shard of every result, for each shape and split, and the bytes sent."""
    found = []
    for (m, k, j), (name, lies) in ((shape, split) for shape in SHAPES for split in SPLITS.items()):
        a = mine(random((m, k), 1), lies.a, rt).requires_grad_()
        b = mine(random((k, j), 2), lies.b, rt).requires_grad_()
        with Ledger() as forward:
            c = multiply(name, a, b, rt.world)
        with Ledger() as backward:
            c.backward(mine(random((m, j), 3), lies.c, rt))
        call = prepared(name, a.detach(), b.detach(), rt.world, panels)
        first = call()
        place, first = first.data_ptr(), first.clone()
        second = call()
        assert second.data_ptr() == place
        assert torch.equal(first, second)
        with Ledger() as again:
            call()
        with Ledger() as gathering:
            whole = gather_on_rank_0(c.detach(), lies.c, sizes_of((m, j)[lies.c], rt.world_size), rt.world)
        sent = [ledger.bytes() for ledger in (forward, backward, again, gathering)]
        found.append(
            dict(c=c.detach(), prepared=second.clone(), dA=a.grad, dB=b.grad, whole=whole, sent=sent)
        )
    return found


def joined(parts: list[Tensor], dim: int | None) -> Tensor:
    if dim is not None:
        return torch.cat(parts, dim)
    assert all(torch.equal(parts[0], p) for p in parts)  # replicated: the same to the last bit
    return parts[0]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_pieces_put_together_are_the_whole(world: int) -> None:
    by_rank = spawn(pieces, world, {1: 1, 2: 2, 3: 1, 4: 3, 8: 2}[world])
    cases = [(shape, name) for shape in SHAPES for name in SPLITS]
    for i, ((m, k, j), name) in enumerate(cases):
        ranks, lies = [found[i] for found in by_rank], SPLITS[name]
        a, b, dc = (random(s, seed).numpy() for seed, s in enumerate([(m, k), (k, j), (m, j)], 1))
        wanted = [("c", a @ b, lies.c), ("prepared", a @ b, lies.c)]
        wanted += [("dA", dc @ b.T, lies.a), ("dB", a.T @ dc, lies.b)]
        for what, expected, dim in wanted:
            got = joined([r[what] for r in ranks], dim).numpy()
            np.testing.assert_allclose(
                got, expected, rtol=1e-11, atol=1e-12, err_msg=f"{name} {what} {m, k, j}"
            )
        np.testing.assert_allclose(ranks[0]["whole"].numpy(), a @ b, rtol=1e-11, atol=1e-12)
        assert all(r["whole"] is None for r in ranks[1:])
        formula = product_bytes(name, MatrixOptions(shape=(m, k, j)), world)
        for rank, r in enumerate(ranks):
            assert r["sent"][:3] == [*formula, formula[0]], (name, m, k, j)
            assert r["sent"][3] == (rank > 0) * r["c"].numel() * 8


def test_formula_by_hand() -> None:
    o = MatrixOptions(shape=(8, 6, 10), dtype="float32")
    assert product_bytes("rows", o, 4) == (0, Fraction(3, 2) * 60 * 4)  # 2(n-1)/n of dB
    assert product_bytes("columns", o, 4) == (0, Fraction(3, 2) * 48 * 4)  # of dA
    assert product_bytes("inner", o, 4) == (240, 240)  # (n-1)/n of C, 320 bytes
    assert product_bytes("gathered", o, 4) == (240, 240)  # 6 rows in pieces of 2: as if B had 8
    assert product_bytes("inner", o, 1) == (0, 0)


def checks_itself(rt: Runtime) -> list[float]:
    """Return the lesson's own difference for a right shard and for three wrong ones."""
    o = MatrixOptions(shape=(7, 4, 5))
    product, places = Product(o, rt.device), SPLITS["rows"].places(o.shape, rt.world)
    c = product.tensor("A", *places["A"]) @ product.tensor("B", *places["B"])
    wrong, broken = c.clone(), c.clone()
    if rt.rank == 1:  # one rank alone
        wrong[-1, -1] += 1e-3
        broken[0, 0] = math.nan
    return [product.apart("C", x, places["C"], rt.world) for x in (c, wrong, broken, c[:, :-1])]


def test_the_comparison_sees_one_wrong_number() -> None:
    for right, wrong, broken, short in spawn(checks_itself, 3):
        assert right < 1e-14
        assert 1e-5 < wrong < 1e-2
        assert broken == short == math.inf


def by_the_library(rt: Runtime) -> list[float]:
    """Return the largest difference between DTensor's shard and ours, for each split."""
    found = []
    for name, lies in SPLITS.items():
        a, b = mine(random((8, 12), 1), lies.a, rt), mine(random((12, 4), 2), lies.b, rt)
        call = dtensor(name, a, b, rt)
        assert call is not None
        found.append((call() - multiply(name, a, b, rt.world)).abs().max().item())
    return found


def test_dtensor_has_the_same_pieces() -> None:
    for found in spawn(by_the_library, 2):
        assert max(found) < 1e-13


def timed(rt: Runtime) -> list[dict[str, Any]]:
    o = MatrixOptions(shape=(64, 32, 48), dtype="float32", steps=3, panels=2, benchmark=True)
    return [record.as_json() for record in benchmark(rt, o, products(rt, o))]


def test_benchmark_records_what_it_timed() -> None:
    for records in spawn(timed, 2):
        assert [r["implementation"] for r in records] == [f"matrix product, {name}" for name in SPLITS]
        for r in records:
            assert (r["ranks"], r["steps"], r["equal"]) == (2, 3, True)
            assert r["flop_per_step"] == 2 * 64 * 32 * 48
            assert r["bytes_counted"] == r["bytes_formula"]
            assert 0 < r["largest_difference"] < 1e-5


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (("diagonal",), "--splits 'diagonal' is unknown; choose from rows, columns, inner, gather"),
        ((), "--splits is empty; choose from rows"),
    ],
)
def test_what_cannot_run_is_refused(splits: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError) as error:
        main(here(), MatrixOptions(splits=splits))
    assert str(error.value).startswith(message)


def test_bad_input_is_one_line_from_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(main, MatrixOptions, capsys, "--nproc", "2", "--panels", "0")
    assert line.startswith("error: --panels 0: give a number from 1")
