"""Local SGD and DiLoCo: with H = 1 and SGD equal to data parallelism, else to one device with n replicas."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from beside_one_device import alone
from mpi.launch import refused
from torch import nn

from common import comm
from common.comm import Group
from common.comm.mesh import Mesh
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import KINDS, OPTIMIZERS, Followed, compare, largest
from common.lesson.job import Job
from common.lesson.training import make_model, shape_of

import dp_basic
from dp_local_sgd import VERSIONS, LocalSGD, local_step, main
from dp_local_sgd_proof import bytes_formula
from dp_replicas import LocalOptions, mean_of_replicas, simulated
from dp_training import joined, on_ranks

# 7 samples do not divide by 2, 3 or 4, nor 5 steps by H = 2 or 3
OPTIONS = LocalOptions(model="gpt2-nano", batch=7, sequence=12, micro_batches=2, steps=5)
ALONE = Group.alone()


def one_device(rt: Runtime, o: LocalOptions) -> Followed:
    """Train with plain SGD on the whole batch."""
    return alone(rt, o, dp_basic.LESSON, "naive", "sgd")[0]


def trained(
    rt: Runtime, o: LocalOptions, name: str, optimizer: str
) -> tuple[Followed, Job[LocalOptions], Fraction]:
    """Train this rank's replica; return (its record, its job, the bytes it sent)."""
    return on_ranks(rt, o, VERSIONS[name], name, optimizer, ("torch",), replicas=True)


# steps between two meetings, version, optimizer
CASES = {
    "DiLoCo of 2 steps, AdamW": (2, "diloco", "adamw"),
    "each step": (1, "local-sgd", "sgd"),
    "2 steps, AdamW": (2, "local-sgd", "adamw"),
    "DiLoCo of 3 steps": (3, "diloco", "sgd"),
    "the whole run": (5, "local-sgd", "sgd"),
}
ON_MANY = ("DiLoCo of 2 steps, AdamW", "each step")  # with more ranks than cores


def world_of(rt: Runtime) -> None:
    more = dict(model="llama-nano", batch=9, steps=3) if rt.world_size > 4 else {}
    o = replace(OPTIONS, **more)
    plain = replace(o, every=1)
    seen, job, _ = trained(rt, plain, "local-sgd", "sgd")
    mean = mean_of_replicas(seen, job)
    if rt.rank == 0:
        found = compare(one_device(rt, plain), mean)
        assert max(found[kind].value for kind in KINDS) <= 1e-12, found
    for case in ON_MANY if rt.world_size > 4 else CASES:
        every, name, optimizer = CASES[case]
        given = replace(o, every=every)
        seen, job, sent = trained(rt, given, name, optimizer)
        found = compare(simulated(name, optimizer, rt, given), seen)
        for kind in KINDS:
            assert found[kind].value <= 1e-12, (case, kind, found[kind])
        assert sent == bytes_formula(shape_of(o), rt.world, given)
        # the ranks have just met, or have parted since
        low, high = joined(job.model.parameters()), joined(job.model.parameters())
        comm.all_reduce(low, rt.world, "min")
        comm.all_reduce(high, rt.world, "max")
        assert torch.equal(low, high) == (o.steps % every == 0 or rt.world_size == 1)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_equal_to_replicas_on_one_device(world: int) -> None:
    spawn(world_of, world)


def beside_torch(rt: Runtime) -> None:
    """Compare with torch's averager on equal shards without padding, since it does not weight the average."""
    for every in (2, 3):
        o = replace(OPTIONS, batch=2 * rt.world_size, every=every, sequence=3)
        for optimizer in OPTIMIZERS:
            theirs, *_ = trained(rt, o, "torch", optimizer)
            ours, *_ = trained(rt, o, "local-sgd", optimizer)
            found = compare(ours, theirs)
            assert max(found[kind].value for kind in KINDS) <= 1e-12, (every, optimizer, found)
    theirs, *_ = trained(rt, OPTIONS, "torch", "sgd")  # 3 and 4 samples
    ours, *_ = trained(rt, OPTIONS, "local-sgd", "sgd")
    assert compare(ours, theirs)["weights"].value > 1e-4


@pytest.mark.parametrize("world", [2, 4])
def test_beside_torchs_averager(world: int) -> None:
    spawn(beside_torch, world)


def unweighted(rt: Runtime) -> tuple[float, float]:
    """Return the weights' difference from one device, weighted and unweighted: SGD, H = 1, uneven shards."""
    o = replace(OPTIONS, every=1)
    found = []
    for weigh in (True, False):
        mesh, model = Mesh(rt.world, dp=rt.world_size), make_model(o, rt.device)
        job = Job(rt, o, "local-sgd", model, mesh, "dp", OPTIMIZERS["sgd"], o.steps)
        local, optimizer = LocalSGD(model, rt.world, 1), job.optimizer(model)
        for batch in job.batches():
            _, targets = local_step(model, batch, optimizer)
            local.step(targets if weigh else 1)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        found.append(largest(one_device(rt, o).weights, weights).value)
    return found[0], found[1]


def test_an_average_that_does_not_weigh_is_caught() -> None:
    weighed, not_weighed = spawn(unweighted, 2)[0]
    assert weighed <= 1e-12
    assert not_weighed > 1e-3


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_outer_step_is_torchs_nesterov(momentum: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.float64)
    outer = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    theirs = torch.optim.SGD(outer, lr=0.7, momentum=momentum, nesterov=momentum > 0)
    local = LocalSGD(model, ALONE, every=2, rate=0.7, momentum=momentum)
    for t in range(6):
        for p in model.parameters():
            p.data += torch.randn_like(p)
        if t % 2:
            for p, q in zip(outer, model.parameters(), strict=True):
                p.grad = p.detach() - q.detach()
            theirs.step()
        local.step(5)
        if t % 2:
            for p, q in zip(outer, model.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-13, atol=1e-13)


def by_hand(rt: Runtime) -> list[float]:
    """Return the weight after each of two rounds; the ranks' shares of the targets differ between rounds."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model.weight.data.fill_(2.0 + rt.rank)  # all start at rank 0's 2
    local, seen = LocalSGD(model, rt.world, every=2), []
    for targets in ([3, 1], [1, 7]), ([0, 5], [1, 2]):
        for count in targets[rt.rank]:
            model.weight.data += 1.0 + rt.rank
            local.step(count)
        seen.append(model.weight.item())
    return seen


def test_each_round_weighs_its_own_targets() -> None:
    first = 2 + (4 * 2 + 8 * 4) / 12
    second = first + (5 * 2 + 3 * 4) / 8
    for seen in spawn(by_hand, 2):
        assert seen == pytest.approx([first, second], rel=1e-12)


def test_h_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="every 0 steps"):
        LocalSGD(nn.Linear(2, 2), ALONE, every=0)


@pytest.mark.parametrize(("n", "batch"), [(2, 4), (3, 7)])
def test_lesson(n: int, batch: int) -> None:
    assert all(spawn(main, n, LocalOptions(model="gpt2-nano", batch=batch, sequence=8, steps=3)))


@pytest.mark.parametrize(
    ("o", "message"),
    [
        (LocalOptions(every=6, steps=5), "--every 6: the run ends after 5 steps"),
        (LocalOptions(plot=Path("x.png"), periods=(4, 400)), "--periods 400: the run ends after 192 steps"),
        (LocalOptions(versions=("remote",)), "'remote' is unknown"),
    ],
)
def test_bad_input_is_one_line(o: LocalOptions, message: str) -> None:
    assert re.search(message, refused(main, 2, o))
