"""Data parallelism in PyTorch: equal to one device at every world size, and mistakes that break this."""

from __future__ import annotations

import pytest
import torch
from beside_one_device import Case, equal_to_one_device
from small_models import Branches
from torch import Tensor, nn

from common.comm import Group
from common.errors import RankError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.comparison import Lesson

from dp_basic import LESSON, DataParallel, all_reduce_gradients, broadcast_model
from dp_training import DataParallelOptions

ALONE = Group.alone()

# 7 and 5 samples do not divide by 2, 3 or 4; buckets of 10 kB make dozens, one of 100 MB holds all
SIZES = {
    "small buckets": dict(model="gpt2-tiny", batch=7, micro_batches=1, bucket_mb=0.01),
    "3 micro-batches": dict(model="gpt2-tiny", batch=7, micro_batches=3, bucket_mb=0.1),
    "llama, one bucket": dict(model="llama-tiny", batch=5, micro_batches=2, bucket_mb=100.0),
}
CASES = {
    f"{version}, {size}": Case(version, DataParallelOptions(**given, sequence=12, steps=2))
    for version in ("naive", "bucketed", "ddp")
    for size, given in SIZES.items()
    if (version, size) != ("ddp", "llama, one bucket")
}


def lesson_of(case: Case) -> Lesson:
    return LESSON


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equal_to_one_device(world: int) -> None:
    equal_to_one_device(world, lesson_of, CASES)


def branches(rt: Runtime, version: str, samples: list[float]) -> dict[str, Tensor | None]:
    """Return gradients after one accumulated step; this rank takes every n-th of the samples."""
    model = Branches()
    inputs = [torch.full((1, 3), s, dtype=torch.float64) for s in samples]
    mine = inputs[rt.rank :: rt.world_size]
    if version == "naive":
        for x in mine:
            model(x).backward()
        all_reduce_gradients(model, rt.world)
    else:
        dp = DataParallel(model, rt.world, bucket_mb=2e-5)
        for _ in range(2):  # the second step runs on the order of buckets that the first one settled
            for p in model.parameters():
                p.grad = None
            with dp.no_sync():
                for x in mine[:-1]:
                    model(x).backward()
            for x in mine[-1:]:
                model(x).backward()
            dp.finish()
            for index, p in enumerate(dp.parameters):  # in the buckets that the next step sends
                assert p.grad is None or p.grad.data_ptr() == dp.place[index].views[index].data_ptr()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("version", ["naive", "bucketed"])
@pytest.mark.parametrize(
    "samples",
    [
        [1.0, -2.0, 3.0, 4.0, 0.5],  # `rarely` on one rank only
        [-1.0, 1.0, 2.0, 1.5, 2.5],  # on rank 0 in an early micro-batch only: the last one does not see it
        [1.0, 2.0],  # rank 2 of 3 has nothing at all
    ],
)
def test_unused_and_shared_parameters(version: str, samples: list[float]) -> None:
    model = Branches()
    for s in samples:
        model(torch.full((1, 3), s, dtype=torch.float64)).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert expected["never.weight"] is None
    for found in spawn(branches, 3, version, samples):
        for name, gradient in expected.items():
            if gradient is None:
                assert found[name] is None, name
            else:
                assert torch.allclose(found[name], gradient, rtol=1e-12, atol=1e-13), name


class Strided(nn.Module):
    """Model whose parameters and buffer are not contiguous in memory."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.every_second = nn.Parameter(torch.randn(4, 8, generator=draw)[:, ::2])
        self.transposed = nn.Parameter(torch.randn(8, 4, generator=draw)[::2].t())
        self.register_buffer("shift", torch.randn(4, 8, generator=draw)[:, 1::2])

    def forward(self, x_BI: Tensor) -> Tensor:
        return (x_BI @ self.every_second @ self.transposed + self.shift).square().sum()


def strided(rt: Runtime, version: str) -> dict[str, Tensor]:
    """Return all tensors and summed gradients of a model that starts with different weights on every rank."""
    model = Strided(seed=rt.rank)
    x = torch.full((4, 4), rt.rank + 1.0)
    if version == "naive":
        broadcast_model(model, rt.world)
        model(x).backward()
        all_reduce_gradients(model, rt.world)
    else:
        dp = DataParallel(model, rt.world)
        model(x).backward()
        dp.finish()
    return {**model.state_dict(), **{f"d{name}": p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("version", ["naive", "bucketed"])
def test_tensors_with_gaps(version: str) -> None:
    model = Strided(seed=0)
    sum((model(torch.full((4, 4), rank + 1.0)) for rank in range(2)), start=torch.zeros(())).backward()
    expected = {**model.state_dict(), **{f"d{name}": p.grad for name, p in model.named_parameters()}}
    for found in spawn(strided, 2, version):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, msg=name)


def backward_twice(rt: Runtime) -> None:
    model = nn.Linear(2, 2)
    dp = DataParallel(model, rt.world)  # noqa: F841
    model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()


def test_backward_twice_is_refused() -> None:
    with pytest.raises(RankError, match=r"backward ran twice before finish\(\)"):
        spawn(backward_twice, 2)


def in_place_zeroing(rt: Runtime) -> list[Tensor]:
    """Return three steps' gradients with zero_grad(set_to_none=False), which keeps bucket views in p.grad."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    dp = DataParallel(model, rt.world, bucket_mb=1e-5)
    gradients = []
    for t in range(3):
        model.zero_grad(set_to_none=False)
        model(torch.full((1, 3), 1.0 + t + rt.rank, dtype=torch.float64)).sum().backward()
        dp.finish()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return gradients


def test_gradients_zeroed_in_place() -> None:
    alone = spawn(in_place_zeroing_alone, 1)[0]
    for found in spawn(in_place_zeroing, 2):
        for a, b in zip(alone, found, strict=True):
            assert torch.allclose(a, b, rtol=1e-13)


def in_place_zeroing_alone(rt: Runtime) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    gradients = []
    for t in range(3):
        model.zero_grad()
        x = torch.tensor([[1.0 + t + r] * 3 for r in range(2)], dtype=torch.float64)
        model(x).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return gradients


def broadcast(rt: Runtime) -> list[Tensor]:
    torch.manual_seed(rt.rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    broadcast_model(model, rt.world)
    return [t.clone() for t in model.state_dict().values()]


def test_all_start_with_the_model_of_rank_0() -> None:
    first, *others = spawn(broadcast, 3)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def mixed_types(rt: Runtime) -> tuple[int, list[Tensor]]:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2)])
    for p in model.parameters():
        p.data.fill_(0.5)
    dp = DataParallel(model, rt.world)
    x = torch.ones(1, 2)
    sum(layer(x.to(layer.weight.dtype)).sum().double() for layer in model).backward()
    buckets = len(dp.buckets)
    dp.finish()
    return buckets, [p.grad for p in model.parameters()]


def test_types_do_not_share_a_bucket() -> None:
    for buckets, gradients in spawn(mixed_types, 2):
        assert buckets == 3
        assert all(torch.all(g == 2) for g in gradients)


def changed_after_wrapping(rt: Runtime, how: str) -> list[Tensor]:
    """Change a wrapped model in one way; return the gradients of the following step."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
    for p in model.parameters():
        p.data.fill_(0.5)
    if how == "unfreeze":
        model[0].weight.requires_grad_(False)
    dp = DataParallel(model, rt.world)
    if how == "freeze":
        model[0].weight.requires_grad_(False)
    if how == "unfreeze":
        model[0].weight.requires_grad_(True)
    if how == "replace":
        model[0].weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    if how == "wrap again":
        dp = DataParallel(model, rt.world)
    with dp.no_sync():
        with dp.no_sync():
            pass
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward(create_graph=how == "create graph")
    dp.finish()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("how", ["freeze", "wrap again", "create graph"])
def test_what_may_change_after_wrapping(how: str) -> None:
    for alone, *others in [spawn(changed_after_wrapping, 1, how) + spawn(changed_after_wrapping, 2, how)]:
        assert len(alone) == 4 - (how == "freeze")
        for found in others:
            for a, b in zip(alone, found, strict=True):
                assert torch.equal(2 * a, b)  # two ranks with the same samples


@pytest.mark.parametrize("how", ["unfreeze", "replace"])
def test_new_parameters_are_refused(how: str) -> None:
    with pytest.raises(RankError, match="unfrozen or replaced: make a new DataParallel"):
        spawn(changed_after_wrapping, 2, how)


def nothing_to_train(rt: Runtime) -> None:
    DataParallel(nn.Linear(2, 2).requires_grad_(False), rt.world)


def test_a_frozen_model_is_refused() -> None:
    with pytest.raises(RankError, match="no parameter of the model requires a gradient"):
        spawn(nothing_to_train, 2)
