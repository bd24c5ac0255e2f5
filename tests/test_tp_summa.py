"""C = A B on a grid: the blocks give numpy's C, dA and dB; bytes, costs, broken versions, refused options."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi.launch import ROOT, mpirun, python, run
from torch import Tensor

from common.comm import Group
from common.comm.ledger import Ledger
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.matrices import benchmark

from tp_cannon import Cannon, finish, move
from tp_grid import ALGORITHMS, Blocks, Grid, GridOptions, make_grid, most_square, panels
from tp_grid_costs import best_layers, cannon, summa
from tp_grid_product import Method, bytes_by_formula, multiply, prepared
from tp_summa import Summa, make_method, products
from tp_summa_peers import dtensor

LESSON = ROOT / "03-tensor-parallelism/pytorch/tp_summa.py"
# uneven on all grids; even on all; less rows, inner or columns than ranks in a line; one number
SHAPES = [(13, 11, 7), (24, 16, 8), (3, 5, 9), (9, 2, 2), (1, 1, 1)]
GRIDS = {
    1: [(1, 1, 1)],
    2: [(1, 2, 1), (2, 1, 1), (1, 1, 2)],
    3: [(1, 3, 1), (3, 1, 1), (1, 1, 3)],
    4: [(2, 2, 1), (1, 4, 1), (1, 2, 2)],
    8: [(2, 4, 1), (4, 2, 1), (2, 2, 2), (1, 2, 4)],
    9: [(3, 3, 1)],
}


def random(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mine(x: Tensor, name: str, blocks: Blocks) -> Tensor:
    return x[blocks.place(name)].clone()


def factors(m: int, k: int, j: int) -> tuple[Tensor, Tensor, Tensor]:
    return random((m, k), 1), random((k, j), 2), random((m, j), 3)


def options(algorithm: str, shape: tuple[int, int, int]) -> GridOptions:
    """Return options with panels and overlap that vary with the shape."""
    return GridOptions(panels=1 + shape[0] % 3, overlap=shape[0] % 2 == 1, algorithms=(algorithm,))


def results(a: Tensor, b: Tensor, dc: Tensor, method: Method) -> dict[str, Any]:
    """Return this rank's block of every result, its place, and the bytes sent and by formula."""
    blocks = method.blocks
    a, b = mine(a, "A", blocks).requires_grad_(), mine(b, "B", blocks).requires_grad_()
    with Ledger() as forward:
        c = multiply(a, b, method)
    with Ledger() as backward:
        c.backward(mine(dc, "C", blocks))
    call = prepared(a.detach(), b.detach(), method)
    call()
    with Ledger() as again:
        c_again = call().clone()
    return dict(
        found={"C": c.detach(), "again": c_again, "dA": a.grad, "dB": b.grad},
        places={"C": blocks.place("C"), "dA": blocks.place("A"), "dB": blocks.place("B")},
        sent=(forward.bytes(), backward.bytes()),
        again=again.bytes(),
        formula=bytes_by_formula(method, 8),
    )


def pieces(rt: Runtime) -> list[dict[str, Any]]:
    """Return the results for each grid, shape and algorithm that fits the grid."""
    found = []
    for rows, columns, layers in GRIDS[rt.world_size]:
        grid = make_grid(rt.world, rows, columns, layers)
        for shape in SHAPES:
            for algorithm in ALGORITHMS if rows == columns else ALGORITHMS[:1]:
                a, b, dc = factors(*shape)
                method = make_method(algorithm, Blocks(shape, grid), a, options(algorithm, shape))
                what = f"{algorithm}, {rows} x {columns} x {layers}, {shape}"
                found.append(dict(what=what, shape=shape, **results(a, b, dc, method)))
    return found


def joined(
    ranks: list[dict[str, Any]], name: str, place: str, shape: tuple[int, int]
) -> np.ndarray[Any, Any]:
    """Assemble the blocks of all ranks; each entry must come from exactly one rank."""
    whole, times = np.zeros(shape), np.zeros(shape)
    for r in ranks:
        whole[r["places"][place]] += r["found"][name].numpy()
        times[r["places"][place]] += 1
    assert (times == 1).all()
    return whole


def check_whole(ranks: list[dict[str, Any]]) -> None:
    """Check all that `results` returned on the ranks of one grid."""
    (m, k, j), what = ranks[0]["shape"], ranks[0]["what"]
    a, b, dc = (x.numpy() for x in factors(m, k, j))
    for name, place, expected in (
        ("C", "C", a @ b),
        ("again", "C", a @ b),
        ("dA", "dA", dc @ b.T),
        ("dB", "dB", a.T @ dc),
    ):
        got = joined(ranks, name, place, expected.shape)
        assert abs(got - expected).max() <= 1e-12 * abs(expected).max(), (what, name)
    for r in ranks:
        assert r["sent"] == r["formula"], what
        assert r["again"] == r["formula"][0], what


@pytest.mark.parametrize("world", GRIDS)
def test_blocks_put_together_are_the_whole(world: int) -> None:
    by_rank = spawn(pieces, world)
    for ranks in zip(*by_rank, strict=True):
        check_whole(list(ranks))


def in_a_mesh(rt: Runtime) -> dict[str, Any]:
    """Multiply on one of two replicas of a 2 x 2 grid; both make their groups at the same time."""
    mesh = Mesh(rt.world, dp=2, tp=4)
    shape = (13, 11, 7)
    a, b, dc = factors(*shape)
    method = Summa(Blocks(shape, make_grid(mesh.group("tp"), 2, 2)), a)
    return dict(what="in a mesh", shape=shape, **results(a, b, dc, method))


def test_a_grid_of_each_group_of_a_mesh() -> None:
    ranks = spawn(in_a_mesh, 8)
    check_whole(ranks[:4])
    check_whole(ranks[4:])


class ForgetsTheSum(Summa):
    """Broken: multiplies panels in backward as in forward, without the sum over the row or column."""

    def gradients(self, a: Tensor, b: Tensor, dc: Tensor, da: Tensor, db: Tensor) -> None:
        def add(p: Any, a_mk: Tensor, b_kj: Tensor) -> None:
            own_da, own_db = self.mine(p, da, db)
            if self.grid.row.rank == p.column:
                own_da.copy_(dc @ b_kj.T)
            if self.grid.column.rank == p.row:
                own_db.copy_(a_mk.T @ dc)

        self.each_panel(a, b, add)


class SkewsNothing(Cannon):
    """Broken: blocks start to rotate unskewed, so that an A and a B of different k meet."""

    def turns(self, a: Tensor, b: Tensor, use: Callable[[int, Tensor, Tensor], object]) -> None:
        for step in range(self.q):
            use(self.at(step), a, b)
            a, moving_a = move(a, torch.empty_like(a), self.grid.row, 1)
            b, moving_b = move(b, torch.empty_like(b), self.grid.column, 1)
            finish(moving_a + moving_b)


def visit(rt: Runtime) -> dict[str, dict[str, float]]:
    """Return differences of this rank's blocks for right and broken versions, for sizes that divide."""
    shape = (8, 8, 8)
    a, b, dc = factors(*shape)
    blocks = Blocks(shape, make_grid(rt.world, 2, 2))
    expected = {"C": a @ b, "dA": dc @ b.T, "dB": a.T @ dc}
    found = {}
    for version in (Summa, ForgetsTheSum, Cannon, SkewsNothing):
        method = version(blocks, a)
        x = results(a, b, dc, method)["found"]
        found[version.__name__] = {
            name: (x[name] - whole[blocks.place(name)]).abs().max().item() for name, whole in expected.items()
        }
    return found


def test_what_breaks_is_caught() -> None:
    by_rank = spawn(visit, 4)
    for version in by_rank[0]:
        worst = {name: max(found[version][name] for found in by_rank) for name in ("C", "dA", "dB")}
        print(f"\n{version}: " + "  ".join(f"{name} {value:.1e}" for name, value in worst.items()), end="")
    for found in by_rank:
        assert found["ForgetsTheSum"].pop("C") < 1e-13  # C shows nothing
        assert min(found["ForgetsTheSum"].values()) > 0.1
        assert max(*found["Summa"].values(), *found["Cannon"].values()) < 1e-13
    for name in ("C", "dA", "dB"):
        assert max(found["SkewsNothing"][name] for found in by_rank) > 0.1


def test_panels_have_one_owner_each_and_cover_all() -> None:
    grid: Any = type("G", (), dict(rows=2, columns=3))
    found = panels(slice(3, 14), grid)  # A's columns end at 7, 11, 14, B's rows at 9, 14
    assert [(p.begin, p.end, p.column, p.row) for p in found] == [
        (3, 7, 0, 0),
        (7, 9, 1, 0),
        (9, 11, 1, 1),
        (11, 14, 2, 1),
    ]
    assert [(p.begin, p.end) for p in panels(slice(0, 2), grid, each=5)] == [(0, 1), (1, 2)]


def test_most_square_grid() -> None:
    assert [most_square(n) for n in (1, 2, 6, 7, 12, 16, 24)] == [
        (1, 1), (1, 2), (2, 3), (1, 7), (3, 4), (4, 4), (4, 6),
    ]  # fmt: skip


def test_costs_by_hand() -> None:
    square = (8, 8, 8)  # 64 numbers each
    assert summa(square, 4, 1) == (48, 96)  # (n-1)/n of B; B again and dB
    assert summa(square, 2, 2) == (32, 64)  # half of two blocks of 16 of A, and of B
    assert summa(square, 1, 1, 4) == (
        48,
        48,
    )  # the inner split of chapter 01: C by reduce-scatter, dC by all-gather
    assert summa(square, 1, 2, 2) == (32, 48)
    assert cannon(square, 2) == (48, 96)  # a block of 16 of A and of B, and half of that to skew them
    assert cannon(square, 1, 4) == (48, 48)
    assert summa((8, 4, 2), 1, 2) == (16, 32)  # A moves: 32 numbers
    assert summa((4096,) * 3, 32, 32)[0] / 4096**2 == Fraction(2 * 31, 1024)
    assert best_layers((4096,) * 3, 1) == 1
    assert best_layers((4096, 4096, 1), 4) == 4  # a C of one column costs little to sum


def counted(rt: Runtime) -> list[tuple[Any, Any]]:
    """Return pairs of this rank's bytes by formula and the table's mean, for sizes that divide."""
    shape, found = (16, 8, 24), []
    for rows, columns, layers in GRIDS[rt.world_size]:
        blocks, like = Blocks(shape, make_grid(rt.world, rows, columns, layers)), random((1, 1), 0)
        found.append((bytes_by_formula(Summa(blocks, like), 1), summa(shape, rows, columns, layers)))
        if rows == columns:
            found.append((bytes_by_formula(Cannon(blocks, like), 1), cannon(shape, rows, layers)))
    return found


def test_the_table_is_the_mean_of_what_ranks_count() -> None:
    for ranks in zip(*spawn(counted, 8), strict=True):
        formula = ranks[0][1]
        assert tuple(sum(r[0][i] for r in ranks) / len(ranks) for i in (0, 1)) == formula


def by_the_library(rt: Runtime) -> list[float]:
    """Return the largest differences between DTensor's blocks and numpy's, for each of DTensor's ways."""
    a, b, _ = factors(8, 16, 24)
    found = []
    for rows, columns in ((2, 2), (1, 4), (4, 1)):
        blocks = Blocks((8, 16, 24), make_grid(rt.world, rows, columns))
        calls = dtensor(mine(a, "A", blocks), mine(b, "B", blocks), blocks)
        found += [(call() - (a @ b)[blocks.place("C")]).abs().max().item() for call in calls.values()]
    return found


def test_dtensor_has_the_same_blocks() -> None:
    for found in spawn(by_the_library, 4):
        assert len(found) == 6
        assert max(found) < 1e-13


def timed(rt: Runtime) -> list[dict[str, Any]]:
    o = GridOptions(shape=(32, 48, 64), dtype="float32", steps=3, panels=2, benchmark=True)
    return [r.as_json() for r in benchmark(rt, o, products(rt, o))]


def test_benchmark_records_what_it_timed() -> None:
    for records in spawn(timed, 4):
        assert [r["implementation"] for r in records] == [f"matrix product, {name}" for name in ALGORITHMS]
        for r in records:
            assert (r["strategy"], r["ranks"], r["steps"], r["equal"]) == ("tp", 4, 3, True)
            assert r["flop_per_step"] == 2 * 32 * 48 * 64
            assert r["bytes_counted"] == r["bytes_formula"]
            assert 0 < r["largest_difference"] < 1e-5


def test_lesson_under_mpirun_proves_and_writes_its_records(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    arguments = [
        "--shape",
        "29",
        "31",
        "37",
        "--panels",
        "2",
        "--layers",
        "2",
        "--steps",
        "1",
        "--json",
        file,
    ]
    done = mpirun(4, python(), LESSON, *arguments)
    assert done.returncode == 0, done.stderr
    assert "proved: C, dA and dB equal numpy's within 1e-12, bytes counted = formula" in done.stdout
    assert "29 x 31 x 37, float64, on 1 x 2 ranks in 2 layers" in done.stdout
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["ranks"], r["backend"], r["equal"]) for r in records] == [(4, "mpi", True)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shape": (4, 0, 4)}, "--shape 4 0 4: give a number from 1 to"),
        ({"grid": (2, 2)}, "--grid 2 2 --layers 1 needs 4 ranks, here are 6; --grid 2 3 would fit"),
        ({"layers": 4}, "--layers 4: 6 ranks divide into 1, 2, 3, 6 layers"),
        ({"algorithms": ("strassen",)}, "--algorithms 'strassen' is unknown; choose from summa, cannon"),
    ],
)
def test_what_cannot_run_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        GridOptions(**given).validate(6)
    assert str(error.value).startswith(message)


def test_cannon_on_a_grid_that_is_not_square_is_refused() -> None:
    row, column = (Group(name, 0, n, tuple(range(n)), None) for name, n in (("row", 3), ("column", 2)))
    with pytest.raises(UsageError) as error:
        Cannon(Blocks((4, 4, 4), Grid(row, column, Group.alone())), torch.empty(0))
    assert str(error.value) == (
        "--algorithms cannon needs a square grid, 2 x 3 is given: --grid 3 3 on 9 ranks would fit, "
        "and summa takes any grid"
    )


def test_defaults_take_what_the_grid_allows() -> None:
    for n, layers, grid, algorithms in (
        (4, 1, (2, 2), ALGORITHMS),
        (6, 1, (2, 3), ("summa",)),
        (8, 2, (2, 2), ALGORITHMS),
    ):
        o = GridOptions(layers=layers)
        o.validate(n)
        assert (o.grid, o.algorithms) == (grid, algorithms)


def test_bad_input_is_one_line() -> None:
    done = run([str(python()), str(LESSON), "--grid", "2", "2"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --grid 2 2 --layers 1 needs 4 ranks, here are 1; --grid 1 1 would fit\n"
