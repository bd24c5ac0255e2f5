"""einsum and tensordot: random networks in any layout, along any path, in slices, against torch on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import tensor_cases as cases
import torch
from hypothesis import strategies as st
from torch import Tensor

import common.tensors as dt
from common.comm import Group
from common.comm.ledger import Ledger
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.tensors import Grid, Replicate, Shard
from common.tensors.contraction import (
    compare_optimization_strategies,
    einsum,
    expression,
    print_path_info,
    tensordot,
)
from common.tensors.cost import ways_of

WORLDS = (1, 2, 3, 4, 5)
SINGLE = ("ii->", "ii->i", "ij->ji", "ijk->j")
KNOWN = (*SINGLE, "ij,jk->ik", "bij,bjk->bik", "i,j->ij", "iji,jk->k", "ij,jk,kl,lm->im", ",ij->j")


def network(grid: Grid, data: Any) -> None:
    """Compare a contraction of random labels with torch's: result and gradients."""
    letters = "abcdef"
    lengths = {x: data.draw(st.integers(1, 4)) for x in letters}
    if data.draw(st.booleans()):
        equation = data.draw(st.sampled_from(KNOWN))
        lengths |= {x: data.draw(st.integers(0, 4)) for x in "ijklm"}
    else:
        inputs = data.draw(st.lists(st.text(letters, min_size=0, max_size=3), min_size=1, max_size=4))
        known = sorted(set("".join(inputs)))
        kept = data.draw(st.lists(st.sampled_from(known), unique=True)) if known else []
        output = "".join(data.draw(st.permutations(kept)))
        equation = f"{','.join(inputs)}->{output}"
    lengths |= {x: lengths.get(x, 2) for x in equation if x.isalpha()}
    given = equation.split("->")[0].split(",")
    dtype = data.draw(st.sampled_from(cases.NUMBERS))
    wholes = [
        cases.numbers([lengths[x] for x in of], dtype, i).requires_grad_() for i, of in enumerate(given)
    ]
    tensors = [
        cases.spread(w.detach(), grid, data.draw(cases.placements(grid, w.shape))).requires_grad_()
        for w in wholes
    ]
    optimize = data.draw(st.sampled_from(["auto", "optimal", "dp", "greedy", False]))
    memory = data.draw(st.sampled_from([None, None, 64.0]))
    found = einsum(equation, *tensors, optimize=optimize, memory=memory)
    cases.sampled_gradient(found, torch.einsum(equation, *wholes), data)
    cases.assert_gradients(tensors, wholes)


@pytest.mark.parametrize("n", WORLDS)
def test_networks(n: int) -> None:
    cases.on_grids(n, network)


def dots(grid: Grid, data: Any) -> None:
    """Compare tensordot with torch's."""
    a, b = cases.numbers((2, 3, 4)).requires_grad_(), cases.numbers((3, 4, 2), seed=1).requires_grad_()
    dims = data.draw(st.sampled_from([0, 2, ([1, 2], [0, 1]), ([0, -1], [2, 1])]))
    x, y = (
        cases.spread(t.detach(), grid, data.draw(cases.placements(grid, t.shape))).requires_grad_()
        for t in (a, b)
    )
    cases.sampled_gradient(tensordot(x, y, dims), torch.tensordot(a, b, dims), data)
    cases.assert_gradients([x, y], [a, b])


@pytest.mark.parametrize("n", [1, 3, 4])
def test_tensordot(n: int) -> None:
    cases.on_grids(n, dots, 6)


def pairs(rt: Runtime) -> None:
    """Check the bytes of every way of a pair, slices against the limit, and gradients by differences."""
    grid = Grid(rt.world)
    whole = cases.numbers((2, 6, 4)), cases.numbers((2, 4, 8), seed=1)
    for placed in (
        (Shard(0), Shard(0)),
        (Shard(1), Replicate()),
        (Shard(2), Shard(1)),
        (Replicate(), Shard(2)),
    ):
        a, b = (cases.spread(w, grid, [p]) for w, p in zip(whole, placed, strict=True))
        for way in ways_of(einsum, "bij,bjk->bik", a, b):
            with Ledger() as ledger:
                found = way.run()
            assert ledger.bytes() == way.cost.sent, way.name
            cases.assert_close(found.full(), torch.einsum("bij,bjk->bik", *whole))
    shapes = [(8, 9), (9, 10), (10, 7)]
    f = expression("ij,jk,kl->il", *shapes, memory=8 * 20)
    tensors = [cases.numbers(s, seed=i) for i, s in enumerate(shapes)]
    assert f.sliced(8 * 20, 8, rt.world_size)  # type: ignore[attr-defined]
    split = [dt.from_full(t, grid, Shard(0)) for t in tensors]
    cases.assert_close(f(*split).full(), torch.einsum("ij,jk,kl->il", *tensors))
    outer = expression("ia,ja,ka->ijk", (5, 2), (6, 2), (7, 2), memory=8 * 10)  # in slices along the result
    assert set(outer.sliced(8 * 10, 8, rt.world_size)) & set("ijk")  # type: ignore[attr-defined]
    three = [cases.numbers((n, 2), seed=n) for n in (5, 6, 7)]
    found = outer(*(dt.from_full(t, grid, Shard(0)) for t in three))
    cases.assert_close(found.full(), torch.einsum("ia,ja,ka->ijk", *three))
    with pytest.raises(UsageError, match="the path is for"):
        f(*reversed(split))

    def chain(*t: Tensor) -> Tensor:
        return einsum("ij,jk,ki->k", *(dt.from_full(x, grid, Shard(1)) for x in t)).full()

    some = [cases.numbers(s, seed=i).requires_grad_() for i, s in enumerate([(2, 3), (3, 4), (4, 2)])]
    assert torch.autograd.gradcheck(chain, some)


def test_pairs() -> None:
    spawn(pairs, 2)


def test_paths_and_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = [(5, 6), (6, 7), (7, 8)]
    print_path_info("ij,jk,kl->il", *shapes)
    found = compare_optimization_strategies("ij,jk,kl->il", *shapes)
    printed = capsys.readouterr().out
    assert "Complete contraction" in printed
    assert "greedy" in printed
    assert found["optimal"]["flops"] <= found["greedy"]["flops"]
    grid = Grid(Group.alone())
    x = dt.full((2, 3), 1.0, grid, Replicate())
    for call, words in (
        (lambda: einsum("ij,jk->ik", x, x), "has lengths 3 and 2"),
        (lambda: einsum("ijk->i", x), "dimensions"),
        (lambda: einsum("ij,jk->ik", x), "einsum 'ij,jk->ik' of"),
        (lambda: tensordot(x, x, 1), "differ"),
        (lambda: tensordot(x, x, 3), "over 3 dimensions"),
        (lambda: einsum("ij,kj->ik", x, x, optimize="best"), "best"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match=words):
            call()
    cases.assert_close(einsum("...j,...j->...", x, x).full(), torch.full((2,), 3.0))
