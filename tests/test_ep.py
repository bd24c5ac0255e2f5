"""Expert parallelism in PyTorch: equal to one device at every world size; bytes, odd loads, bad options."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from beside_one_device import Case, assert_equal, equal_to_one_device, reference
from steps import Version, follow, training_step
from torch import Tensor

from common.comm import Group, Pending, sizes_of
from common.comm.mesh import Mesh
from common.comm.placement import Shard, placement, sum_gradients
from common.data.text import rank_slice
from common.errors import RankError, UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.comparison import Lesson
from common.lesson.equality import Followed
from common.lesson.training import Batches, make_model
from common.models.configs import CONFIGS, config, mixtral, switch
from common.models.moe import Experts
from common.models.transformer import Transformer

import ep_imbalance
import ep_moe
import ep_overlap
import ep_tensor_parallel
from ep_costs import RoutedBytes
from ep_imbalance import ImbalanceOptions
from ep_moe import ExpertExchange, expert_parallel, keep_own_experts, transposed, with_capacity
from ep_overlap import OverlapOptions
from ep_training import MoEOptions, drain, load, observed
from sp_sequence_parallel import sequence_parallel, split_sequence

# 9 experts divide over 3 ranks alone
CONFIGS["ep-mixtral"] = mixtral(
    layers=2, width=12, heads=2, kv_heads=1, mlp_width=7, sequence=10, experts=9, vocabulary=256
)
CONFIGS["ep-switch"] = replace(switch(layers=2, width=12, heads=2, sequence=10, experts=9), mlp_width=10)
CONFIGS["ep-deepseek"] = replace(
    CONFIGS["ep-mixtral"], router="sigmoid", shared_experts=2, experts_per_token=3, experts=8, dropout=0.2
)


def options(model: str, **more: Any) -> MoEOptions:
    return MoEOptions(model=model, batch=9, sequence=10, steps=2, **more)


CASES = {
    "dropless, mixtral": Case("dropless", options("ep-mixtral", micro_batches=2)),
    "dropless, switch": Case("dropless", options("ep-switch", micro_batches=1)),
    "dropless, deepseek": Case("dropless", options("ep-deepseek", micro_batches=3)),
    "capacity, mixtral": Case("capacity", options("ep-mixtral", micro_batches=3, capacity_factor=0.8)),
    "capacity, switch": Case("capacity", options("ep-switch", micro_batches=2, capacity_factor=1.0)),
    "capacity, deepseek": Case("capacity", options("ep-deepseek", micro_batches=1, capacity_factor=2.0)),
}
# all on 2 ranks; with more ranks than cores, what depends on their number
NAMES = {
    1: ["dropless, mixtral", "capacity, mixtral"],
    2: list(CASES),
    3: ["dropless, switch", "capacity, switch"],
    4: ["dropless, mixtral", "capacity, switch"],
    8: ["capacity, mixtral", "capacity, switch"],
}


def lesson_of(case: Case) -> Lesson:
    return ep_moe.lesson({case.version: ep_moe.train}, RoutedBytes())


@pytest.mark.parametrize("world", NAMES)
def test_equal_to_one_device(world: int) -> None:
    cases = {name: CASES[name] for name in NAMES[world]}
    if world >= 4:  # one micro-batch: 8 ranks have little more than a sample each
        cases = {n: Case(c.version, replace(c.options, micro_batches=1)) for n, c in cases.items()}
    equal_to_one_device(world, lesson_of, cases)


def beside(rt: Runtime, case: tuple[str, MoEOptions], optimizer: str) -> Followed:
    """Train with ep=2 beside another axis of 2 that splits tokens: along it, expert gradients are summed."""
    axis, o = case
    mesh, model = Mesh(rt.world, ep=2, **{axis: 2}), make_model(o, rt.device)
    expert_parallel(model, mesh.group("ep"))
    version = Version(model, finish=partial(sum_gradients, list(model.parameters()), mesh))
    if axis == "sp":
        sequence_parallel(model, mesh.group("sp"), "ulysses")
        version.split = partial(split_sequence, group=mesh.group("sp"), order="contiguous")
    step = training_step(version, Batches(o, mesh.group("dp", "ep"), rt.device), rt.world)
    return follow(model, optimizer, o.steps, step, mesh)


@pytest.mark.parametrize("axis", ["dp", "sp"])
def test_beside_another_axis(axis: str) -> None:
    case = CASES["dropless, mixtral"]
    expected = reference(case, lesson_of(case), "sgd")
    assert_equal(4, beside, {axis: (axis, case.options)}, {(axis, "sgd"): expected})


def odd_loads(rt: Runtime) -> None:
    """Check uneven loads against plain experts: all rows on one expert, none on or from a rank."""
    c, n, group = config("ep-switch"), rt.world_size, Mesh(rt.world, ep=rt.world_size).group("ep")
    for per_rank in ([[4] + [0] * 8] * n, [[0] * 8 + [3]] * n, [[0] * 9] + [[1, 0, 2] * 3] * (n - 1)):
        torch.manual_seed(5)
        experts = Experts(c).double()
        for p in experts.parameters():
            torch.nn.init.normal_(p)
        rows = [torch.randn(sum(counts), c.width, dtype=torch.float64) for counts in per_rank]
        expected, gradients = [], []
        for x, counts in zip(rows, per_rank, strict=True):
            x_one = x.clone().requires_grad_()
            y = experts(x_one, torch.tensor(counts))
            y.square().sum().backward()
            expected.append(y.detach())
            gradients.append(x_one.grad)
        whole = {name: p.grad for name, p in experts.named_parameters()}
        mine = Experts(c).double()
        mine.load_state_dict(experts.state_dict())
        keep_own_experts(mine, group)
        x = rows[rt.rank].clone().requires_grad_()
        y = ExpertExchange(mine, group, c.experts)(x, torch.tensor(per_rank[rt.rank]))
        y.square().sum().backward()
        torch.testing.assert_close(y, expected[rt.rank], rtol=0, atol=1e-12)
        torch.testing.assert_close(x.grad, gradients[rt.rank], rtol=0, atol=1e-12)
        begin, e = sum(sizes_of(9, n)[: rt.rank]), sizes_of(9, n)[rt.rank]
        for name, p in mine.named_parameters():
            torch.testing.assert_close(p.grad, whole[name][begin : begin + e], rtol=1e-12, atol=1e-12)
            assert placement(p) == {"ep": Shard(0, tuple(sizes_of(9, n)))}


def test_odd_loads() -> None:
    spawn(odd_loads, 3)


def rows_of_one_device(rt: Runtime) -> tuple[int, int]:
    """Return the rows sent to other ranks in a step's first layer: as exchanged, and by the plain model."""
    o, (n, r) = options("ep-mixtral", micro_batches=1), (rt.world_size, rt.rank)
    plain, model = make_model(o, rt.device), make_model(o, rt.device)
    seen = observed(plain)
    ((tokens_BS, _),) = Batches(o, Group.alone(), rt.device).parts(0)
    lo, hi = rank_slice(o.batch, r, n)
    plain(tokens_BS[lo:hi])
    exchanges = expert_parallel(model, Mesh(rt.world, ep=n).group("ep"))
    model(tokens_BS[lo:hi])
    (routing,) = next(drain(seen))
    by_rank = load(routing.experts_BSK, 9).split(sizes_of(9, n))
    return exchanges[0].rows_sent[0], int(sum(x.sum() for i, x in enumerate(by_rank) if i != r))


def test_rows_are_those_of_the_plain_models_choices() -> None:
    for exchanged, chosen in spawn(rows_of_one_device, 2):
        assert exchanged == chosen > 0


def test_transposition_is_undone_by_itself() -> None:
    rows_ab = torch.tensor([[2, 0, 1], [1, 3, 0]])
    x = torch.arange(14.0).view(7, 2)
    y = transposed(x, rows_ab)
    assert y[:, 0].tolist() == [0, 2, 6, 8, 10, 12, 4]
    assert torch.equal(transposed(y, rows_ab.T), x)


def logits(rt: Runtime) -> Tensor:
    """Return the largest difference from the plain model's logits in evaluation, on this rank's tokens."""
    o = options("ep-switch")
    plain, model = make_model(o, rt.device), make_model(o, rt.device)
    for m in (plain, model):
        with_capacity("dropless", m, o)
    expert_parallel(model, rt.world)
    tokens = torch.arange(20).view(2, 10) + rt.rank
    return (model.eval()(tokens) - plain.eval()(tokens)).abs().max()


def test_logits_in_evaluation() -> None:
    assert max(spawn(logits, 2)) <= 1e-13


def refused(rt: Runtime, o: MoEOptions) -> None:
    ep_moe.main(rt, o)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch": 5}, "gives a rank 1 samples, too few for 2 micro-batches; give at least --batch 6"),
        ({"model": "gpt2-tiny"}, "--model gpt2-tiny has no experts; mixtral-tiny and switch-tiny have 8"),
        ({"versions": ("fast",)}, "--versions 'fast' is unknown; choose from dropless, capacity"),
        ({"model": "ep-two"}, "3 ranks along ep are more than the 2 experts; at most 2 would do"),
    ],
)
def test_bad_input_is_one_line(given: dict[str, Any], says: str) -> None:
    CONFIGS["ep-two"] = switch(layers=1, width=8, heads=2, sequence=8, experts=2)
    world = Group("world", 0, 3, (0, 1, 2))
    rt = Runtime(0, 3, 0, 3, "none", torch.device("cpu"), "gloo", 60.0, world)
    with pytest.raises(UsageError, match=says) as error:
        ep_moe.main(rt, MoEOptions(**{"batch": 12, "versions": ep_moe.VERSIONS, **given}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch": 8}, "--batch 8 does not divide over 3 ranks with 2 micro-batches; 6 would do"),
        ({"model": "switch-tiny"}, "experts without biases and shared ones: mixtral-tiny"),
    ],
)
def test_slices_refuse_in_one_line(given: dict[str, Any], says: str) -> None:
    world = Group("world", 0, 3, (0, 1, 2))
    rt = Runtime(0, 3, 0, 3, "none", torch.device("cpu"), "gloo", 60.0, world)
    with pytest.raises(UsageError, match=says):
        ep_tensor_parallel.main(rt, MoEOptions(**{"batch": 12, "versions": ("tensor",), **given}))


def split_dense(rt: Runtime) -> None:
    expert_parallel(Transformer(config("gpt2-tiny")), rt.world)


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(
        RankError, match="expert parallelism needs a model with experts, such as mixtral-tiny"
    ):
        spawn(split_dense, 2)


def slices(rt: Runtime) -> bool:
    o = MoEOptions(model="ep-mixtral", batch=12, sequence=6, steps=2, versions=("naive", "tensor"))
    return ep_tensor_parallel.main(rt, replace(o, micro_batches=4 - rt.world_size))


@pytest.mark.parametrize("world", [2, 3])
def test_all_tokens_on_all_ranks_are_equal(world: int) -> None:
    assert all(spawn(slices, world))


def overlapped(rt: Runtime) -> bool:
    """Return True if the lesson passes with more chunks than some experts have rows, and with one chunk."""
    o = OverlapOptions(model="ep-mixtral", batch=7, sequence=6, steps=2, versions=("pieces",), pieces=3)
    return ep_overlap.main(rt, o) and ep_overlap.main(rt, replace(o, model="ep-switch", pieces=1))


@pytest.mark.parametrize("world", [1, 3])
def test_in_pieces_it_is_equal(world: int) -> None:
    assert all(spawn(overlapped, world))


def test_journeys_leave_before_what_hides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two all-to-alls start before the first wait, and experts compute in between, also in backward."""
    events: list[str] = []
    leave, wait = ep_overlap.Journey.leave, Pending.wait
    monkeypatch.setattr(ep_overlap.Journey, "leave", lambda *given: events.append("leave") or leave(*given))
    monkeypatch.setattr(Pending, "wait", lambda *given: events.append("wait") or wait(*given))
    c = config("ep-switch")
    experts = Experts(c).double()
    for p in experts.parameters():
        torch.nn.init.normal_(p)
    whole = ExpertExchange(experts, Group.alone("ep"), 9)
    x = torch.randn(20, c.width, dtype=torch.float64, requires_grad=True)
    monkeypatch.setattr(
        experts, "forward", lambda *given: events.append("experts") or Experts.forward(experts, *given)
    )
    y = ep_overlap.OverlappedExchange(whole, 2)(x, torch.tensor([4, 0, 1, 5, 2, 2, 2, 2, 2]))
    leaves = ["leave", "leave", "wait", "leave", "wait", "leave", "wait", "wait"]
    assert [e for e in events if e != "experts"] == leaves
    assert events[:5] == ["leave", "leave", "wait", "experts", "leave"]
    torch.testing.assert_close(y, Experts.forward(experts, x, torch.tensor([4, 0, 1, 5, 2, 2, 2, 2, 2])))
    events.clear()
    y.sum().backward()
    assert events == leaves


def imbalance(rt: Runtime) -> bool:
    o = ImbalanceOptions(model="ep-switch", rows=150, width=8, steps=1)
    mixtral = ImbalanceOptions(model="ep-mixtral", rows=145, width=12, steps=1)
    return ep_imbalance.main(rt, o) and ep_imbalance.main(rt, mixtral)


@pytest.mark.parametrize("world", [1, 2])
def test_uneven_load_is_timed_and_equal(world: int) -> None:
    assert all(spawn(imbalance, world))
    assert ep_imbalance.counts_for(0.5, 13, 9, 2).tolist() == [2, 1, 1, 1, 1, 2, 2, 2, 1]
    assert ep_imbalance.counts_for(1.0, 4, 3, 3).tolist() == [4, 0, 0]


def lesson(rt: Runtime) -> bool:
    return ep_moe.main(
        rt, MoEOptions(model="ep-mixtral", batch=5, sequence=6, steps=1, versions=ep_moe.VERSIONS)
    )


def test_the_lesson_proves() -> None:
    assert all(spawn(lesson, 2))
