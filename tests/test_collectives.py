"""Every collective's adjoint, its bytes, and uneven shards, against plain arithmetic on one rank.

A linear map A and its adjoint satisfy sum over ranks <A x, y> = <x, A^T y>. With the tensors of all ranks on
one rank, each side is one dot product.
"""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from common import comm
from common.comm import Group, collectives, sizes_of, travel
from common.comm.ledger import Ledger, record, uncounted
from common.launch.runtime import Runtime
from common.launch.spawn import spawn


def shard_rows(rank: int, n: int, total: int) -> int:
    return sizes_of(total, n)[rank]


def apply(rt: Runtime, name: str, kwargs: dict[str, Any], rows: int) -> dict[str, Any]:
    """Compute y = A x and dx = A^T dy on every rank; return them with the bytes of both directions."""
    torch.manual_seed(100 + rt.rank)
    x = torch.randn(
        rows if name != "gather" else shard_rows(rt.rank, rt.world_size, rows), 3, dtype=torch.float64
    )
    if name in ("copy", "scatter"):  # replicated input: the same on every rank
        torch.manual_seed(7)
        x = torch.randn(rows, 3, dtype=torch.float64)
    x.requires_grad_()
    kwargs = dict(kwargs)
    if name == "gather":
        kwargs["sizes"] = sizes_of(rows, rt.world_size)
    with Ledger() as forward:
        y = getattr(collectives, name)(x, rt.world, **kwargs)
    torch.manual_seed(200 + rt.rank)
    dy = torch.randn_like(y)
    if name in ("reduce",) or (name == "gather" and kwargs.get("gradient") != "partial"):
        torch.manual_seed(9)
        dy = torch.randn_like(y)  # a replicated result has the same gradient on every rank
    with Ledger() as backward:
        y.backward(dy)
    assert x.grad is not None
    return dict(x=x.detach(), y=y.detach(), dy=dy, dx=x.grad, sent=(forward.bytes(), backward.bytes()))


def dot(parts: list[dict[str, Any]], a: str, b: str, replicated: bool) -> Tensor:
    """Return the global dot product: a replicated tensor counts once, shards and partial sums add up."""
    total = torch.stack([(p[a] * p[b]).sum() for p in parts])
    return total[0] if replicated else total.sum()


CASES = [
    # name, arguments, is (x, dx) replicated, is (y, dy) replicated
    ("copy", {}, True, False),
    ("reduce", {}, False, True),
    ("scatter", {"dim": 0}, True, False),
    ("gather", {"dim": 0}, False, True),
    ("gather", {"dim": 0, "gradient": "partial"}, False, False),
    ("reduce_scatter", {"dim": 0}, False, False),
    ("all_to_all", {}, False, False),
    ("shift", {"by": 1}, False, False),
    ("shift", {"by": -2}, False, False),
]


def apply_all(rt: Runtime) -> list[dict[str, Any]]:
    # 13 rows do not divide by 2, 3 or 4
    return [apply(rt, name, kwargs, 12 if name == "all_to_all" else 13) for name, kwargs, *_ in CASES]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_adjoints(world: int) -> None:
    ranks = spawn(apply_all, world)
    for i, (name, kwargs, x_replicated, y_replicated) in enumerate(CASES):
        parts = [of_rank[i] for of_rank in ranks]
        # x counts with every copy where it is replicated but its gradient is complete
        left = dot(parts, "y", "dy", y_replicated)
        right = dot(parts, "x", "dx", x_replicated)
        assert torch.isclose(left, right, rtol=1e-12), (name, kwargs, left, right)


def forward_only(rt: Runtime) -> dict[str, Tensor]:
    n, r = rt.world_size, rt.rank
    x = torch.arange(5.0) + 10 * r
    return {
        "reduce": collectives.reduce(x, rt.world),
        "gather": collectives.gather(x[: 2 + (r == 0)], rt.world, 0, sizes=[3] + [2] * (n - 1)),
        "scatter": collectives.scatter(torch.arange(7.0), rt.world, 0),
        "shift": collectives.shift(x, rt.world),
        "all_to_all": collectives.all_to_all(
            torch.full((n * (n + 1) // 2,), float(r)), rt.world, list(range(1, n + 1)), [r + 1] * n
        ),
    }


def test_values() -> None:
    n = 3
    out = spawn(forward_only, n)
    for r in range(n):
        assert out[r]["reduce"].tolist() == [30 + 3 * i for i in range(5)]
        assert out[r]["gather"].tolist() == [0, 1, 2, 10, 11, 20, 21]
        assert out[r]["scatter"].tolist() == [[0, 1, 2], [3, 4], [5, 6]][r]
        assert out[r]["shift"].tolist() == [10 * ((r - 1) % n) + i for i in range(5)]
        assert out[r]["all_to_all"].tolist() == [float(s) for s in range(n) for _ in range(r + 1)]


def test_bytes_are_the_formulas() -> None:
    n, rows = 4, 12
    size = Fraction(rows * 3 * 8)
    ring = size * (n - 1) / n
    expected = {
        "copy": (0, 2 * ring),
        "reduce": (2 * ring, 0),
        "scatter": (0, ring),
        "reduce_scatter": (ring, ring),
        "all_to_all": (ring, ring),
        "shift": (size, size),
    }
    for name, sent in expected.items():
        kwargs = {"dim": 0} if name in ("scatter", "reduce_scatter") else {}
        for part in spawn(apply, n, name, kwargs, rows):
            assert part["sent"] == sent, name
    for gradient, back in (("replicated", 0), ("partial", ring)):
        for part in spawn(apply, n, "gather", {"dim": 0, "gradient": gradient}, rows):
            assert part["sent"] == (ring, back)


def exchange_views(rt: Runtime) -> None:
    """Exchange columns of matrices: gaps, conjugates, uneven sizes; gradients stay out; wrong places are refused."""
    n, r = rt.world_size, rt.rank

    def columns(rank: int, to: int) -> Tensor:
        whole = torch.arange(8.0 * 40).view(8, 40) + 1000 * rank
        return (whole + 1j * to)[: 1 + to, rank : 20 + rank].conj()

    pieces = [columns(r, to).requires_grad_() for to in range(n)]
    whole = torch.zeros(1 + r, n, 25, dtype=torch.complex64)
    places = [whole[:, source, 2:22] for source in range(n)]
    for later in (False, True):
        whole.zero_()
        with Ledger() as ledger:
            pending = comm.all_to_all_views(places, pieces, rt.world, async_op=later)
            pending.wait()
        assert ledger.bytes() == sum(20 * (1 + to) * 8 for to in range(n) if to != r)
        assert not whole.requires_grad
        for source, place in enumerate(places):
            assert torch.equal(place, columns(source, r)), (source, r)
        assert whole[..., :2].count_nonzero() + whole[..., 22:].count_nonzero() == 0
    for dtype in (torch.float32, torch.float64, torch.complex128):  # bands of 64 rows, column by column
        numbers = torch.arange(128 * 30 * n).view(2, 64, 30 * n)
        rows = [(numbers + 100_000 * s).to(dtype) for s in range(n)]
        turned = torch.zeros(30, 2, 64 * n, dtype=dtype)
        comm.all_to_all_views(
            [turned[..., 64 * s : 64 * (s + 1)].transpose(0, 1) for s in range(n)],
            [rows[r][..., 30 * to : 30 * (to + 1)].transpose(1, 2) for to in range(n)],
            rt.world,
        )
        expected = torch.cat([whole[..., 30 * r : 30 * (r + 1)] for whole in rows], 1)
        assert torch.equal(turned, expected.permute(2, 0, 1)), dtype
    with pytest.raises(
        ValueError, match=rf"a place of \[20, {1 + r}\] torch.complex64 for a piece of \[{1 + r}, 20\]"
    ):
        comm.all_to_all_views([place.transpose(0, 1) for place in places], pieces, rt.world)
    with pytest.raises(ValueError, match=r"torch\.float32 for a piece"):
        comm.all_to_all_views([place.real for place in places], pieces, rt.world)
    with pytest.raises(ValueError, match="conjugate"):
        comm.all_to_all_views([place.conj() for place in places], pieces, rt.world)
    with pytest.raises(ValueError, match=f"{n} pieces and {n - 1} places for {n} ranks"):
        comm.all_to_all_views(places[1:], pieces, rt.world)


def negative(rt: Runtime) -> None:
    """Sum numbers that torch has marked as negative without changing them in memory."""
    x = torch.tensor([complex(rt.rank, 2 + rt.rank)]).conj().imag
    assert x.is_neg()
    comm.all_reduce(x, rt.world)
    assert x.item() == -sum(2 + r for r in range(rt.world_size))


def test_marks_of_views_are_resolved() -> None:
    spawn(negative, 2)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_views_with_gaps(n: int) -> None:
    spawn(exchange_views, n)


def uneven_all_to_all(rt: Runtime) -> None:
    comm.all_to_all(torch.ones(5), rt.world)


def test_all_to_all_refuses_what_does_not_divide() -> None:
    with pytest.raises(RuntimeError, match="length 5 does not divide into 2 equal pieces"):
        spawn(uneven_all_to_all, 2)


def into(rt: Runtime) -> tuple[list[float], list[float], list[float], list[float], Fraction, list[str]]:
    """Return the results, bytes and errors of all_gather_into and reduce_scatter_into, in place and not."""
    n, r, said = rt.world_size, rt.rank, []
    mine = torch.tensor([r + 1.0, 10.0 * r])
    apart, joined = torch.empty(2 * n), torch.zeros(2 * n)
    joined[2 * r : 2 * r + 2] = mine
    parts = torch.arange(2.0 * n) + r
    summed, own = parts.clone(), torch.empty(2)
    with Ledger() as ledger:
        comm.all_gather_into(apart, mine, rt.world)
        comm.all_gather_into(joined, joined[2 * r : 2 * r + 2], rt.world, async_op=True).wait()
        comm.reduce_scatter_into(own, parts, rt.world)
        comm.reduce_scatter_into(summed[2 * r : 2 * r + 2], summed, rt.world)
    for wrong in (torch.empty(2 * n + 1), torch.empty(2 * n, dtype=torch.int64), torch.empty(4 * n)[::2]):
        for call in (comm.all_gather_into, lambda out, x, g: comm.reduce_scatter_into(x, out, g)):
            with pytest.raises(ValueError, match=r"do not fill|gaps in memory") as error:
                call(wrong, mine, rt.world)
            said.append(str(error.value))
    here = summed[2 * r : 2 * r + 2].tolist()
    return apart.tolist(), joined.tolist(), own.tolist(), here, ledger.bytes(), said


@pytest.mark.parametrize("n", [1, 3])
def test_into(n: int) -> None:
    gathered = [value for r in range(n) for value in (r + 1.0, 10.0 * r)]
    for r, (apart, joined, own, here, sent, said) in enumerate(spawn(into, n)):
        assert apart == joined == gathered
        assert own == here == [n * (2.0 * r + i) + n * (n - 1) / 2 for i in range(2)]
        assert sent == 4 * Fraction(n - 1, n) * 2 * n * 4
        assert len(said) == 6


def every_call(rt: Runtime) -> list[Tensor]:
    """Return the results of comm's functions on this rank, also for tensors that are not contiguous."""
    n, r, g = rt.world_size, rt.rank, rt.world
    after, before = (r + 1) % n, (r - 1) % n
    x, gaps = torch.arange(6.0).view(2, 3) + 10 * r, torch.arange(12.0)[::2] + r
    summed, shown, reduced = x.clone(), gaps.clone(), x.clone()
    comm.all_reduce(gaps, g)
    comm.all_reduce(summed, g, async_op=True).wait()
    comm.broadcast(shown, g, 1)
    comm.reduce(reduced, g, 1)
    came, other = torch.empty(2, 3), torch.zeros(2, 6)[:, ::2]
    if r == 0:
        comm.send(x.T, g, 1)
    elif r == 1:
        comm.recv(came.T, g, 0)
    comm.exchange(x, other, g, after, before)
    return [
        *(gaps, summed, shown, other, *into(rt)[:4], *forward_only(rt).values()),
        *([reduced, came] if r == 1 else []),
    ]


def by_way_of_the_host(rt: Runtime) -> bool:
    """Return True if copies over the host give the same results: gloo needs them if ranks share a GPU."""
    straight = every_call(rt)
    with patch.object(travel, "staged_on", lambda x, group: x.device if group.size > 1 else None):
        copied = every_call(rt)
    return all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(straight, copied, strict=True)
    )


def test_what_travels_by_way_of_the_host() -> None:
    assert all(spawn(by_way_of_the_host, 3))


@pytest.mark.parametrize(
    ("backend", "on_gpu", "device"),
    [
        ("nccl", True, None),
        ("nccl", False, "cuda"),
        ("gloo", True, "cpu"),
        ("fived", True, "cpu"),
        ("gloo", False, None),
    ],
)
def test_nccl_carries_the_memory_of_gpus_only(backend: str, on_gpu: bool, device: str | None) -> None:
    x, pair = cast(Tensor, SimpleNamespace(is_cuda=on_gpu)), cast(Any, object())
    with patch.object(torch.distributed, "get_backend", lambda pg: backend):
        found = travel.staged_on(x, Group("world", 0, 2, (0, 1), pair))
        assert (found.type if found else None) == device
        assert travel.staged_on(x, Group.alone()) is None


def gathering(rt: Runtime) -> dict[str, object]:
    """Return this rank's entry in `blocked_in` while it gathers everyone's objects."""
    seen: dict[str, object] = {}
    plain = torch.distributed.all_gather_object

    def gather(*given: Any, **more: Any) -> None:
        seen.update(comm.blocked_in)
        plain(*given, **more)

    with patch.object(torch.distributed, "all_gather_object", gather):
        assert comm.everyones(rt.rank, rt.world) == [0, 1]
    assert not comm.blocked_in
    return seen


def test_who_waits_for_objects_is_seen() -> None:
    for seen in spawn(gathering, 2):
        assert (seen["op"], seen["axis"]) == ("everyones", "world")


def test_ledgers_inside_one_another() -> None:
    with Ledger() as outer:
        with Ledger() as inner:
            record("send", "tp", 3, 0.0)
        record("send", "tp", 4, 0.0)
        with uncounted():
            record("send", "tp", 5, 0.0)
    record("send", "tp", 6, 0.0)
    assert (inner.bytes(), outer.bytes()) == (3, 7)
