"""Extras of a practical step, one by one and together, equal to one device; and each one's own figures."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from beside_one_device import Case, alone, equal_to_one_device, here
from mpi.launch import refused
from steps import Version, training_step
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from common.comm import Group
from common.comm.mesh import Mesh
from common.comm.placement import clip_gradients
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.comparison import Lesson
from common.lesson.equality import OPTIMIZERS, Followed, compare
from common.lesson.training import make_model

from dp_accumulation import (
    LESSON,
    LOWEST,
    RECIPES,
    EpochBatches,
    StepOptions,
    epoch_of,
    main,
    rate_factor,
    scheduled,
    scheduled_by_torch,
    step_bytes,
)
from dp_basic import DataParallel
from dp_checkpointing import checkpoint_layers

OPTIONS = StepOptions(
    model="gpt2-nano", batch=9, samples=13, sequence=8, steps=4, micro_batches=3, clip=0.5, warm_up=2
)


def one_device(name: str, optimizer: str, o: StepOptions) -> Followed:
    """Train the lesson's reference for a version on one device."""
    return alone(here(), o, LESSON, name, optimizer)[0]


def lesson_of(case: Case) -> Lesson:
    return LESSON


# 9 samples on 4 ranks in 3 micro-batches: parts of 2, 2, 2 and 3; on 8 most micro-batches are empty
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_equal_to_one_device(world: int) -> None:
    names = RECIPES if world in (2, 4) else ("sync", "all")
    equal_to_one_device(world, lesson_of, {name: Case(name, OPTIONS) for name in names})


def test_padding_leaves_the_tokens() -> None:
    """Padding keeps the tokens, also in a micro-batch of one sample, where targets overlap the tokens."""
    o = replace(OPTIONS, batch=2, micro_batches=2)
    (tokens_BS, targets_BS), (_, other_BS) = EpochBatches(o, Group.alone(), torch.device("cpu")).parts(1)
    assert tokens_BS.min() >= 0
    assert targets_BS.tolist()[0][:6] == tokens_BS.tolist()[0][1:7]
    assert targets_BS.tolist()[0][6:] == [-100] * 2
    assert other_BS.min() >= 0


def test_another_model() -> None:
    o = replace(OPTIONS, model="llama-tiny", steps=3)
    equal_to_one_device(2, lesson_of, {"all, llama": Case("all", o)})


def test_clipping_and_the_schedule_change_something() -> None:
    """Clipping and the schedule change the weights: equality of versions without effect proves nothing."""
    plain, clipped, scheduled = (one_device(name, "sgd", OPTIONS) for name in ("sync", "clip", "schedule"))
    assert plain.norms[0] > 1.5 * OPTIONS.clip
    assert clipped.norms[0] == pytest.approx(OPTIONS.clip, rel=1e-5)
    assert compare(plain, clipped)["weights"].value > 1e-3
    assert compare(plain, scheduled)["weights"].value > 1e-3


def test_bytes_do_not_grow_with_micro_batches_unless_each_is_summed() -> None:
    group = Group("world", 0, 4, (0, 1, 2, 3))
    model = nn.Linear(10, 10, bias=False, dtype=torch.float64)
    sent = {
        m: {name: step_bytes(name, model, group, replace(OPTIONS, micro_batches=m)) for name in RECIPES}
        for m in (1, 8)
    }
    assert sent[1]["no_sync"] == sent[8]["no_sync"] == 1.5 * ((100 + 1 + 1) * 8 + 8)
    assert sent[8]["sync"] - sent[1]["sync"] == 7 * 1.5 * (100 + 1) * 8
    assert sent[8]["clip"] - sent[8]["no_sync"] == 1.5 * 8


class Norms(nn.Module):
    """Model with two parameters whose gradients are known, and one parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = (nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (3, 2, 1))
        self.a.grad = torch.tensor([3.0, 0, 0], dtype=torch.float64)
        self.b.grad = torch.tensor([0, 4.0], dtype=torch.float64)


def clip_both(rt: Runtime, limit: float) -> tuple[float, float]:
    ours, theirs = Norms(), Norms()
    norm = clip_gradients(ours.parameters(), Mesh(rt.world, dp=rt.world_size), limit)
    expected = nn.utils.clip_grad_norm_(theirs.parameters(), limit)
    assert norm.item() == expected.item() == 5
    assert ours.unused.grad is None
    for p, q in ((ours.a, theirs.a), (ours.b, theirs.b)):
        assert torch.allclose(p.grad, q.grad, rtol=1e-13, atol=0)
    return ours.a.grad[0].item(), ours.b.grad[1].item()


def test_clipping_is_the_librarys() -> None:
    for limit in (0.5, 5.0, 7.0):
        for a, b in spawn(clip_both, 2, limit):
            factor = min(1.0, limit / (5 + 1e-6))
            assert (a, b) == pytest.approx((3 * factor, 4 * factor), rel=1e-12)


def rates(make: Callable[..., torch.optim.Optimizer], warm_up: int, steps: int) -> list[float]:
    o = StepOptions(warm_up=warm_up, steps=steps)
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = make(lambda tensors: torch.optim.SGD(tensors, lr=0.3), [parameter], o=o)
    moved = [0.0]
    for _ in range(steps):
        optimizer.step()
        moved.append(-parameter.item())
    return [b - a for a, b in pairwise(moved)]


@pytest.mark.parametrize(("warm_up", "steps"), [(1, 2), (1, 9), (4, 20), (19, 20)])
def test_the_schedule_is_the_librarys(warm_up: int, steps: int) -> None:
    ours, theirs = rates(scheduled, warm_up, steps), rates(scheduled_by_torch, warm_up, steps)
    assert ours == pytest.approx(theirs, rel=1e-4)  # differences of float32 weights
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    torchs = LambdaLR(optimizer, lambda t: rate_factor(t, warm_up, steps))
    for rate in ours:
        assert torchs.get_last_lr()[0] == pytest.approx(rate, rel=1e-4)
        optimizer.step()
        torchs.step()


def test_the_shape_of_the_schedule() -> None:
    factors = [rate_factor(t, 4, 20) for t in range(20)]
    assert factors[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert all(a > b > LOWEST for a, b in pairwise(factors[4:]))
    assert rate_factor(20, 4, 20) == pytest.approx(LOWEST)
    assert rate_factor(0, 0, 5) == 1


def train(rt: Runtime, first: int, last: int, state: dict[str, object] | None) -> dict[str, object]:
    """Train steps [first, last) of version `all` from a checkpoint; return the next checkpoint."""
    model = make_model(replace(OPTIONS, seed=OPTIONS.seed + rt.rank), rt.device)
    optimizer = scheduled(OPTIMIZERS["adamw"], list(model.parameters()), OPTIONS, first)
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    checkpoint_layers(model)
    dp = DataParallel(model, rt.world)

    def finish() -> None:
        dp.finish()
        clip_gradients(model.parameters(), Mesh(rt.world, dp=rt.world_size), OPTIONS.clip)

    version = Version(model, dp.no_sync, finish)
    step = training_step(version, EpochBatches(OPTIONS, rt.world, rt.device), rt.world)
    for t in range(first, last):
        optimizer.zero_grad()
        step(t)
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def test_a_run_resumes_at_the_next_batch_on_another_number_of_ranks() -> None:
    through = spawn(train, 2, 0, 4, None)[0]["model"]
    half = spawn(train, 3, 0, 2, None)[0]
    for found in spawn(train, 1, 2, 4, half) + spawn(train, 2, 2, 4, half):
        for name, w in through.items():
            # weights are about 0.1; a bias without a gradient holds roundings alone
            assert (found["model"][name] - w).abs().max() <= 1e-12, name
    wrong = spawn(train, 1, 1, 3, half)[0]["model"]  # the same data again is seen
    assert max((wrong[name] - w).abs().max() for name, w in through.items()) > 1e-4


def test_torchs_sampler_repeats_or_drops() -> None:
    for ranks in (1, 2, 3, 4, 8):
        seen = epoch_of(23, ranks, seed=3)
        assert sorted(seen["ours"].tolist()) == list(range(23))
        padded, dropped = seen["DistributedSampler"], seen["DistributedSampler, drop_last"]
        assert len(padded) == math.ceil(23 / ranks) * ranks
        assert set(padded.tolist()) == set(range(23))
        assert len(dropped) == 23 // ranks * ranks
        assert len(set(dropped.tolist())) == len(dropped)


def empty_batch(rt: Runtime) -> list[Tensor]:
    """Return the gradients of a model on a batch of no samples."""
    model = make_model(OPTIONS, rt.device)
    nothing = torch.empty(0, 8, dtype=torch.int64)
    model(nothing).sum().backward()
    return [p.grad for p in model.parameters()]


def test_no_samples_give_gradients_of_zero() -> None:
    assert all(torch.all(g == 0) for g in spawn(empty_batch, 1)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 10**9}, r"--samples 1000000000: .* has 1 to \d+ samples of --sequence 8"),
        ({"warm_up": 4}, "--warm-up 4 --steps 4: .* --warm-up 1 --steps 4 would do"),
        ({"batch": 1}, "--batch 1 is too small for 2 ranks"),
        ({"versions": ("all", "none")}, "--versions 'none' is unknown"),
    ],
)
def test_bad_input_is_one_line(options: dict[str, object], message: str) -> None:
    assert re.search(message, refused(main, 2, replace(OPTIONS, **options)))
