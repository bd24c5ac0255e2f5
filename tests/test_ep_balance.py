"""Load balance on the global batch: equal on every mesh and split, and to transformers' loss; biases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from beside_one_device import Case, alone, here, on_ranks
from mpi.launch import refusal
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from common.comm import Group
from common.comm.mesh import Mesh
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.comparison import Lesson
from common.lesson.equality import KINDS, OPTIMIZERS, compare
from common.lesson.job import Job
from common.lesson.training import Batches, make_model
from common.models.configs import CONFIGS, mixtral
from common.models.moe import MoE, Routing
from common.models.transformer import Transformer, cross_entropy_sum

import ep_layer
import ep_load_balance
import ep_moe
from ep_costs import BalancedBytes
from ep_layer import LayerOptions, make_layer
from ep_load_balance import Balance, BalanceOptions, balance_loss, train, train_plain
from ep_loads import history, imbalance
from ep_moe import ExpertExchange
from ep_training import drain, load, observed

CONFIGS["ep-balance"] = mixtral(
    layers=2, width=12, heads=2, kv_heads=1, mlp_width=7, sequence=10, experts=8, vocabulary=256
)
CONFIGS["ep-balance-sigmoid"] = replace(CONFIGS["ep-balance"], router="sigmoid")
SMALL = BalanceOptions(
    model="ep-balance", batch=8, sequence=10, steps=3, coefficient=0.3, rate=0.05, curve_steps=0
)


def case(version: str, **more: Any) -> Case:
    return Case(version, replace(SMALL, **more))


CASES = {
    "switch": case("switch", micro_batches=3),
    "gshard": case("gshard", micro_batches=2),
    "bias": case("bias", micro_batches=2),
    "switch, sigmoid": case("switch", micro_batches=1, model="ep-balance-sigmoid"),
    "bias, sigmoid": case("bias", micro_batches=3, model="ep-balance-sigmoid"),
    "gshard, 9 samples": case("gshard", micro_batches=2, batch=9),
    "bias, 9 samples": case("bias", micro_batches=2, batch=9),
}
NAMES = {
    2: ["switch", "gshard", "bias", "switch, sigmoid", "bias, sigmoid"],
    3: ["gshard, 9 samples", "bias, 9 samples"],
}


def biases(model: torch.nn.Module) -> list[Tensor]:
    return [b for name, b in model.named_buffers() if name.endswith("choice_bias")]


def lesson_of(name: str) -> Lesson:
    return replace(ep_moe.lesson({name: train}, BalancedBytes()), one_device=train_plain)


def against_one_device(rt: Runtime, cases: dict[str, Case]) -> dict[str, tuple[float, float]]:
    """Return the largest differences under SGD and of the biases; check the bytes against the formula."""
    results = {}
    for name, case in cases.items():
        o, version = case.options, case.version
        reference, plain = alone(rt, o, lesson_of(version), version, "sgd")
        followed, job = on_ranks(rt, o, lesson_of(version), version, "sgd")
        found = compare(reference, followed)
        pairs = list(zip(biases(plain.model), biases(job.model), strict=True))
        assert len(pairs) == 2 * (version == "bias" or o.model.endswith("sigmoid"))
        if version == "bias":
            assert all(a.abs().max() > 0 for a, _ in pairs)
        apart = max([(a - b).abs().max().item() for a, b in pairs], default=0.0)
        results[name] = (max(found[kind].value for kind in KINDS), apart)
    return results


@pytest.mark.parametrize("world", NAMES)
def test_equal_to_one_device(world: int) -> None:
    for found in spawn(against_one_device, world, {name: CASES[name] for name in NAMES[world]}):
        for name, (difference, apart) in found.items():
            assert difference <= 1e-12, name
            assert apart == 0, name


def test_the_loss_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    logits_BSE = torch.randn(3, 5, 4, requires_grad=True)
    K = 2
    experts_BSK = logits_BSE.topk(K, -1).indices
    routing = Routing(logits_BSE, logits_BSE.softmax(-1), experts_BSK, torch.ones(3, 5, K))
    ours = balance_loss([routing], load(experts_BSK, 4)) / 15
    theirs = load_balancing_loss_func((logits_BSE.flatten(0, 1),), 4, K) / K  # their f sums to K
    torch.testing.assert_close(ours, theirs)
    (gradient,) = torch.autograd.grad(ours, logits_BSE, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(theirs, logits_BSE)[0])
    even = Routing(logits_BSE, torch.full((3, 5, 4), 0.25), experts_BSK, torch.ones(3, 5, K))
    assert balance_loss([even], load(experts_BSK, 4)).item() / 15 == pytest.approx(1)


def test_first_choices_are_the_routers_best() -> None:
    model = Transformer(CONFIGS["ep-balance"])
    seen = observed(model)
    model(torch.arange(20).view(2, 10))
    for (routing,) in drain(seen):
        assert torch.equal(routing.experts_BSK[..., 0], routing.scores_BSE.argmax(-1))
    assert not any(drain(seen))


def test_a_bias_moves_the_choice_and_no_weight() -> None:
    model = Transformer(CONFIGS["ep-balance"], dtype=torch.float64)
    balance = Balance("bias", model, Group.alone(), replace(SMALL, rate=0.5))
    tokens_BS = torch.arange(20).view(2, 10)
    before, seen = model(tokens_BS), balance.seen
    list(drain(seen))
    balance.move_biases(torch.tensor([[40, 0, 0, 0, 0, 0, 0, 0]] * 2))
    assert biases(model)[0].tolist() == [-0.5, *[0.5] * 7]
    after = model(tokens_BS)
    assert not torch.equal(before, after)
    for (routing,) in drain(seen):
        assert (routing.experts_BSK != 0).all()
        torch.testing.assert_close(routing.weights_BSK.sum(-1), torch.ones(2, 10, dtype=torch.float64))
        chosen = routing.scores_BSE.gather(-1, routing.experts_BSK)
        torch.testing.assert_close(routing.weights_BSK, chosen / chosen.sum(-1, keepdim=True))


def test_it_balances() -> None:
    o = replace(SMALL, coefficient=0.1, rate=0.03, batch=8, dtype="float32", micro_batches=1)
    last = {}
    for name in ("none", "switch", "bias"):
        loads, losses = history(here(), o, name, train, 32)
        assert loads[0].sum(1).tolist() == [160, 160]
        assert losses[-1] < losses[0]
        # tokens of so small a model are alike and change their expert together: a bias balances over steps
        last[name] = imbalance(torch.stack(loads[-16:]).sum(0))
    assert max(last["switch"], last["bias"]) < 0.8 * last["none"], last


def lesson(rt: Runtime, folder: Path) -> bool:
    o = replace(SMALL, steps=1, curve_steps=3, versions=("switch", "bias"), plot=folder / "loads.png")
    return ep_load_balance.main(rt, o)


def test_the_lesson_proves_and_draws(tmp_path: Path) -> None:
    assert all(spawn(lesson, 2, tmp_path))
    assert (tmp_path / "loads.png").stat().st_size > 1000


@pytest.mark.parametrize("n", [1, 3])
def test_a_layer_with_even_load(n: int) -> None:
    """The lesson proves results and bytes, also for 3, 3, 2 experts on 3 ranks; each expert gets 12 rows."""
    o = LayerOptions(tokens=48, width=32, steps=1)
    assert all(spawn(ep_layer.main, n, o))
    layer, seen = make_layer(o, torch.device("cpu")), list[Tensor]()
    layer.compute = lambda rows_RD, counts_E: seen.append(counts_E) or rows_RD  # type: ignore[func-returns-value]
    layer(torch.randn(1, 48, 32, dtype=torch.float64))
    assert seen[0].tolist() == [12] * 8


def broken_layer(rt: Runtime, what: str) -> bool:
    """Run the lesson with one result of the last rank falsified; return the verdict.

    dx becomes NaN, an expert's gradient is doubled, or the router's gradient is missing.
    """
    right = ep_layer.named

    def falsified(layer: MoE, y: Tensor, dx: Tensor) -> dict[str, Tensor]:
        found = right(layer, y, dx)
        if rt.rank == rt.world_size - 1 and layer.compute.__class__ is ExpertExchange:
            found[what] = found[what] * (float("nan") if what == "dx" else 2)
            if what == "router.weight":
                del found[what]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ep_layer, "named", falsified)
        return ep_layer.main(rt, LayerOptions(tokens=32, width=32, steps=1))


@pytest.mark.parametrize("what", ["dx", "experts.up_proj.weight", "router.weight"])
def test_a_layer_that_is_wrong_is_not_proved(what: str) -> None:
    assert spawn(broken_layer, 2, what) == [False, False]


def test_a_load_that_cannot_be_even_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(ep_layer.main, LayerOptions, capsys, "--tokens", "50").endswith(": 48 would do")


def test_the_loss_is_added_once() -> None:
    """The loss of two micro-batches is mean cross-entropy + a times the sum over layers of E sum f P."""
    o = replace(SMALL, micro_batches=2)
    model = make_model(o, torch.device("cpu"))
    mesh, sgd = Mesh(Group.alone()), OPTIMIZERS["sgd"]
    found = next(train_plain(Job(here(), o, "switch", model, mesh, "ep", sgd)))
    plain = make_model(o, torch.device("cpu"))
    seen = observed(plain)
    ((tokens_BS, targets_BS),) = Batches(replace(o, micro_batches=1), mesh.world, torch.device("cpu")).parts(
        0
    )
    total, count = cross_entropy_sum(plain(tokens_BS), targets_BS)
    expected = total / count
    for (routing,) in drain(seen):
        f_E = load(routing.experts_BSK, 8).double() / routing.experts_BSK.numel()
        expected = expected + 0.3 * 8 * (f_E * routing.scores_BSE.mean((0, 1))).sum()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
