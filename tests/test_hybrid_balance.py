"""Balance losses, z-losses, biases on meshes: equal to one device with the same micro-batches; to transformers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from beside_one_device import here
from small_models import ours, tokens
from test_huggingface import in_double, in_memory, load, theirs
from torch import Tensor
from training_runs import options as train_options

from common.comm import Group
from common.comm.mesh import Mesh
from common.data.text import rank_slice
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import OPTIMIZERS, Followed, compare, watch
from common.lesson.job import Job
from common.lesson.training import make_model, shape_of
from common.models.configs import CONFIGS, mixtral, switch
from common.models.huggingface import to_huggingface
from common.models.transformer import cross_entropy_sum

from ep_load_balance import balance_loss, move_bias
from ep_switch_router import z_loss_sum
from ep_training import drain, mixtures, observed
from ep_training import load as count
from hybrid_balance import Balance, Balancing
from hybrid_bytes import StepBytes
from hybrid_layout import HybridOptions, Layout
from hybrid_log import records_of
from hybrid_model import Hybrid
from hybrid_trainer import start
from hybrid_training import HybridJob

SIZES: dict[str, Any] = dict(layers=4, width=12, heads=2, sequence=24, experts=5)
CONFIGS["balanced"] = replace(mixtral(**SIZES, kv_heads=2, mlp_width=7), vocabulary=257)
CONFIGS["balanced-capacity"] = replace(switch(**SIZES), mlp_width=9, experts_per_token=2, capacity_factor=0.6)
CONFIGS["balanced-sigmoid"] = replace(CONFIGS["balanced"], router="sigmoid", shared_experts=1)


@dataclass
class Options(Balancing, HybridOptions):
    """Options of a lesson, and the balance."""


def case(balance: Any = "switch", **given: Any) -> Options:
    small = dict(model="balanced", batch=9, sequence=16, steps=2, micro_batches=3)
    strengths = dict(balance_coefficient=0.3, z_coefficient=0.02, balance_rate=0.03)
    return Options(balance=balance, **(small | strengths | given))


FEW = [
    case(pp=2, tp=2, schedule="interleaved", sequence_parallel=True, sequence=15, checkpointing=True),
    case("gshard", pp=2, ep=2, schedule="zb-v", micro_batches=4),
    case(dp=2, ep=2, zero=3, checkpointing=True, micro_batches=2),
    case("bias", sp=2, tp=2, model="balanced-sigmoid", attention="ring"),
]
MORE = [
    case(pp=2, dp=2, zero=1),
    case(pp=2, sp=2, schedule="zb-h1"),
    case(pp=2, ep=2, schedule="gpipe", checkpointing=True, clip=0.3),
    case("gshard", dp=2, tp=2, zero=2),
    case(sp=2, tp=2, sequence_parallel=True),
    case("gshard", dp=2, ep=2, model="balanced-capacity", micro_batches=2),
    case("bias", ep=2, tp=2, model="balanced-sigmoid"),
    case("bias", pp=2, dp=2, checkpointing=True),
    case("none", dp=2, tp=2, micro_batches=1),
]
MOST = [
    case(pp=2, dp=2, tp=2, sequence_parallel=True),
    case(pp=2, ep=2, sp=2, schedule="zb-v", zero=1),
    case("bias", dp=2, ep=2, tp=2, micro_batches=2),
]


def micro_batches(o: Options) -> Iterator[list[int]]:
    """Yield the samples of each micro-batch of a global batch: a part of each place's along dp and ep."""
    places = (o.dp or 1) * o.ep
    for m in range(o.micro_batches):
        bounds = [rank_slice(o.batch, place, places) for place in range(places)]
        parts = [(lo, rank_slice(hi - lo, m, o.micro_batches)) for lo, hi in bounds]
        yield [lo + i for lo, part in parts for i in range(*part)]


def plain(job: Job[Options], o: Options) -> Iterator[Tensor]:
    """Train the plain model on one device, on the micro-batches of the mesh of `o`, with the losses of chapter 05."""
    model, E = job.model, job.model.config.experts
    seen, optimizer = observed(model), job.optimizer(job.model)
    for moe in mixtures(model) if o.balance == "bias" else ():
        moe.router.choice_bias = torch.zeros_like(moe.router.weight[:, 0])
    for batch in job.batches():
        tokens_BS, targets_BS = batch.whole()
        counts, total = (
            [torch.zeros(E, dtype=torch.long) for _ in seen],
            tokens_BS.new_zeros((), dtype=torch.float64),
        )
        optimizer.zero_grad()
        for samples in micro_batches(o):
            loss, _ = cross_entropy_sum(model(tokens_BS[samples]), targets_BS[samples])
            loss = loss / batch.count_targets()
            for layer, (routing,) in enumerate(drain(seen)):
                chosen_BSK = routing.experts_BSK[..., :1] if o.balance == "gshard" else routing.experts_BSK
                counts[layer] += count(chosen_BSK, E)
                if o.balance in ("switch", "gshard"):
                    loss = (
                        loss
                        + o.balance_coefficient * balance_loss([routing], counts[layer]) / tokens_BS.numel()
                    )
                loss = loss + o.z_coefficient * z_loss_sum(routing.logits_BSE) / tokens_BS.numel()
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if o.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        optimizer.step()
        for moe, load_E in zip(mixtures(model), counts, strict=True) if o.balance == "bias" else ():
            move_bias(cast(Tensor, moe.router.choice_bias), load_E, o.balance_rate)
        yield total


def one_device(o: Options, optimizer: str) -> Followed:
    rt, model = here(), make_model(o, torch.device("cpu"))
    whole = replace(o, micro_batches=1)
    job = Job(rt, whole, "plain", model, Mesh(Group.alone()), "dp", OPTIMIZERS[optimizer], o.steps)
    return watch(plain(job, o), job)


class BalancedJob(HybridJob):
    """Training run that counts the bytes of the balance."""

    def formula(self) -> StepBytes:
        o = cast(Options, self.options)
        return StepBytes(self.model, cast(Any, self.owner), self.mesh, o, o.clip > 0, o.balances)


Change = Callable[[Balance], None]


def train(job: BalancedJob, change: Change = lambda balance: None) -> Iterator[Tensor]:
    """Train on the mesh; yield the sum of the losses. change: adds a fault."""
    o = cast(Options, job.options)
    hybrid = Hybrid(o.model_config(), job.mesh, o, job.rt.device, torch.float64, o.seed, balancing=o)
    change(hybrid.balance)
    job.model = hybrid.model
    optimizer = job.optimizer(hybrid.zero)
    for batch in job.batches():
        optimizer.zero_grad()
        loss = hybrid.step(*batch.whole())
        if o.clip:
            hybrid.clip(o.clip)
        optimizer.step()
        hybrid.balance.step()
        yield loss + hybrid.balance.numbers["balance_loss"] + hybrid.balance.numbers["z_loss"]


Compared = tuple[dict[str, float], bool]


def compared(rt: Runtime, cases: list[tuple[Options, str, Followed, Change | None]]) -> list[Compared]:
    """Return, per case: the largest differences from one device, and True if the bytes agree."""
    found = []
    for o, optimizer, reference, change in cases:
        mesh = o.mesh(rt)
        job = BalancedJob(rt, o, "balanced", shape_of(o), mesh, "dp", OPTIMIZERS[optimizer], o.steps)
        followed = watch(job.count(train(job, change) if change else train(job)), job, mesh)
        worst = {kind: d.value for kind, d in compare(reference, followed).items()}
        found.append((worst, job.agree))
        mesh.close()
    return found


@pytest.mark.parametrize(("world", "cases"), [(4, FEW), (4, MORE), (8, MOST)], ids=["few", "more", "8"])
def test_equal_to_one_device(world: int, cases: list[Options]) -> None:
    turns = itertools.cycle([*OPTIMIZERS])  # gradients are compared with both
    todo = [(o, name, one_device(o, name), None) for o, name in zip(cases, turns, strict=False)]
    for rank in spawn(compared, world, todo):
        for o, (worst, agree) in zip(cases, rank, strict=True):
            assert max(worst.values()) <= 1e-12, (o, worst)
            assert agree, o


def of_each_rank(balance: Balance) -> None:
    """Broken: each rank balances its own tokens."""
    balance.tokens = Group.alone("dp+ep+sp")


def of_every_tp_rank(balance: Balance) -> None:
    """Broken: each of the ranks along tp, whose gradients are summed, adds the whole loss."""
    balance.mesh = Mesh(balance.mesh.world, **(balance.mesh.shape | {"tp": 1, "dp": balance.mesh.world.size}))


def of_each_micro_batch(balance: Balance) -> None:
    """Broken: balances each micro-batch alone."""
    right = balance.factors
    balance.factors = lambda passes, m, ranks=1: right(passes[m : m + 1], 0, ranks)  # type: ignore[method-assign]


BROKEN: list[tuple[Options, Change]] = [
    (case(ep=2, steps=1), of_each_rank),
    (case(sp=2, steps=1), of_each_rank),
    (case(tp=2, steps=1), of_every_tp_rank),
    (case(pp=2, steps=1), of_each_micro_batch),
]


def test_losses_that_are_wrong_are_caught() -> None:
    todo = [(o, "sgd", one_device(o, "sgd"), change) for o, change in BROKEN]
    for (_, change), (worst, _) in zip(BROKEN, spawn(compared, 2, todo)[0], strict=True):
        assert worst["gradients"] > 1e-3, (change.__doc__, worst)


@pytest.mark.usefixtures(in_double.__name__)
def test_the_loss_is_that_of_mixtral_in_transformers() -> None:
    """Theirs is the same in a model of one layer, apart from their shares of choices, which add up to k."""
    c = replace(CONFIGS["balanced"], layers=1)
    model = ours(c)
    hf = theirs(c)
    load(hf, model)
    hf.config.output_router_logits, hf.router_aux_loss_coef = True, 0.3 / c.experts_per_token
    whole = dict(model.named_parameters())
    layout, balancing = Layout(micro_batches=1), Balancing(balance="switch", balance_coefficient=0.3)
    mesh, cpu = Mesh(Group.alone("world")), torch.device("cpu")
    hybrid = Hybrid(c, mesh, layout, cpu, torch.float64, 0, lambda name, shape: whole[name], balancing)
    tokens_BS = tokens(c)
    targets_BS = tokens_BS.roll(-1, 1)
    expected = hf(input_ids=tokens_BS, labels=targets_BS, shift_labels=targets_BS)
    expected.loss.backward()
    loss = hybrid.step(tokens_BS, targets_BS) + hybrid.balance.numbers["balance_loss"]
    torch.testing.assert_close(loss, expected.loss.detach(), rtol=0, atol=1e-12)
    gradients = {name: p.grad for name, p in hybrid.named_parameters()}
    found = in_memory(c, to_huggingface(c, cast(Any, gradients)))
    for name, p in hf.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=0, atol=1e-10)


def test_the_log_has_the_losses_and_the_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = dict(model="nano-mixtral", steps=2, log_every=1, balance="switch", z_coefficient=0.5)
    assert start(here(), train_options(json=tmp_path / "run.jsonl", **given)).run()
    header, *lines = capsys.readouterr().out.splitlines()[-3:]
    assert header.endswith("   balance loss   z-loss   largest load / mean")
    steps = [record for record in records_of(tmp_path / "run.jsonl") if record["kind"] == "step"]
    for line, found in zip(lines, steps, strict=True):
        shown = [f"{found[key]:.4f}" for key in ("balance_loss", "z_loss")]
        assert line.split()[-3:] == [*shown, f"{found['load']:.2f}"]
        # 4 layers and 4 experts, whose scores are nearly even at first
        assert found["balance_loss"] == pytest.approx(4 * 0.01, rel=0.1)
        assert found["z_loss"] == pytest.approx(4 * 0.5 * math.log(4) ** 2, rel=0.1)
        assert 1 < found["load"] <= 2


def test_what_cannot_be_balanced_is_refused() -> None:
    for given, message in (
        ({"balance": "switch"}, "--balance switch .* nano-llama has no experts to balance"),
        ({"z_coefficient": 0.1}, "--z-coefficient 0.1: nano-llama has no experts"),
        ({"balance": "bias", "model": "nano-mixtral", "export": "x"}, "--export: the format has no biases"),
    ):
        with pytest.raises(UsageError, match=message):
            train_options(**given).validate()
