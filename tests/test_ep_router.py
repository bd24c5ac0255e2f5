"""The router's lesson: each router by hand, equal to the model's, the same on every mesh."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from beside_one_device import assert_equal, here
from torch.nn import functional as F

from common.comm import Group
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import OPTIMIZERS, Followed, watch
from common.lesson.job import Job
from common.lesson.training import make_model
from common.models.configs import CONFIGS, config, switch
from common.models.transformer import make_mlp

import ep_loads
import ep_switch_router
from ep_switch_router import RouterOptions, expert_choice, jittered, top_k, train, with_capacity, z_loss_sum

CONFIGS["ep-router"] = switch(layers=1, width=8, heads=2, sequence=12, experts=4)
SMALL = RouterOptions(model="ep-router", batch=5, sequence=12, steps=3, capacity_factor=1.0)


def test_routers_by_hand() -> None:
    p = torch.tensor([[[0.7, 0.2, 0.1], [0.6, 0.1, 0.3], [0.5, 0.4, 0.1], [0.1, 0.8, 0.1]]])
    one, two = top_k(p, 1), top_k(p, 2)
    expected = torch.tensor([[0.7, 0, 0], [0.6, 0, 0], [0.5, 0, 0], [0, 0.8, 0]])
    assert torch.equal(one[0], expected)
    assert two[0].count_nonzero(-1).tolist() == [2, 2, 2, 2]
    assert two[0, 1].tolist() == pytest.approx([0.6, 0.0, 0.3])
    torch.testing.assert_close(top_k(p, 2, normalised=True).sum(-1), torch.ones(1, 4))
    assert with_capacity(one, 2)[0].count_nonzero(0).tolist() == [2, 1, 0]
    assert with_capacity(one, 2)[0, 2].abs().sum() == 0  # the third in the queue
    chosen = expert_choice(p, 2)[0]
    assert chosen.count_nonzero(0).tolist() == [2, 2, 2]
    assert chosen[:, 0].tolist() == pytest.approx([0.7, 0.6, 0.0, 0.0])
    assert z_loss_sum(torch.zeros(2, 3, 4)).item() == pytest.approx(6 * torch.tensor(4.0).log().item() ** 2)


def trained(rt: Runtime, case: tuple[str, RouterOptions], optimizer: str) -> Followed:
    """Train on all ranks of `rt`."""
    (name, o), mesh, make = case, Mesh(rt.world, dp=rt.world_size), OPTIMIZERS[optimizer]
    job = Job(rt, o, name, make_model(o, rt.device), mesh, "dp", make, o.steps)
    return watch(train(job, []), job, mesh)


def test_training_equals_one_device() -> None:
    cases = {name: (name, SMALL) for name in ep_switch_router.VERSIONS}
    references = {(name, "sgd"): trained(here(), case, "sgd") for name, case in cases.items()}
    assert_equal(2, trained, cases, references)


def test_the_gates_are_the_models() -> None:
    c = replace(config("ep-router"), capacity_factor=0.8, experts_per_token=1)
    moe = make_mlp(c).double()
    torch.manual_seed(0)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter)
    x_BSD = torch.randn(3, 12, 8, dtype=torch.float64)
    gates_BSE = with_capacity(top_k((x_BSD @ moe.router.weight.T).softmax(-1), 1), 3)  # 0.8 * 12 / 4 = 2.4
    outer = torch.stack(
        [
            F.gelu(x_BSD @ up.T + b, approximate="tanh") @ down.T + d
            for up, b, down, d in zip(
                moe.experts.up_proj.weight, moe.experts.up_proj.bias,
                moe.experts.down_proj.weight, moe.experts.down_proj.bias, strict=True,
            )
        ], -1,
    )  # fmt: skip
    torch.testing.assert_close(moe(x_BSD), (outer * gates_BSE[:, :, None]).sum(-1), rtol=0, atol=1e-11)


def test_jitter_is_the_same_for_a_part_of_the_batch() -> None:
    x_BSD = torch.randn(4, 3, 5)
    whole = jittered(x_BSD, 0.1, 7, 0)
    assert torch.equal(jittered(x_BSD[2:], 0.1, 7, 2), whole[2:])
    ratio = whole / x_BSD
    assert ratio.min() >= 0.9 - 1e-6
    assert ratio.max() <= 1.1 + 1e-6
    assert ratio.std() > 0.03


def lesson(rt: Runtime) -> bool:
    return ep_switch_router.main(rt, SMALL)


@pytest.mark.parametrize("world", [1, 3])
def test_loads_are_those_of_one_device(world: int) -> None:
    assert all(spawn(lesson, world))


def weights_of_a_rank(rt: Runtime) -> bool:
    """Run the lesson with weights scaled differently on each rank; return its verdict."""
    plain = ep_loads.statistics

    def statistics(*gates: torch.Tensor) -> torch.Tensor:
        numbers = plain(*gates)
        numbers[-1] *= 1 + 1e-9 * rt.rank
        return numbers

    with patch.object(ep_loads, "statistics", statistics):
        return lesson(rt)


def test_weights_are_those_of_one_device() -> None:
    assert not any(spawn(weights_of_a_rank, 2))


def test_jitter_by_rank_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ep_switch_router, "jittered", lambda x, *more: jittered(x, 0.9, rank_seed[0], 0))
    rank_seed = [0]
    rt, plain = here(), ep_switch_router.route

    def route(*given):
        rank_seed[0] += 1
        return plain(*given)

    monkeypatch.setattr(ep_switch_router, "route", route)
    assert not ep_switch_router.main(rt, SMALL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "gpt2-tiny"}, "--model gpt2-tiny has no experts; mixtral-tiny and switch-tiny have 8"),
        ({"versions": ("x",)}, "--versions 'x' is unknown; choose from plain, z-loss"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    rt = Runtime(0, 1, 0, 1, "none", torch.device("cpu"), "gloo", 60.0, Group.alone("world"))
    with pytest.raises(UsageError, match=message):
        ep_switch_router.main(rt, replace(SMALL, **options))
