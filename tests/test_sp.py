"""Sequence parallelism in PyTorch: equal to one device at every world size by every attention; bad input."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, partial

import pytest
import torch
from beside_one_device import assert_equal
from mpi.launch import refused
from steps import Version, follow, training_step
from torch import Tensor

from common import comm
from common.comm import Group
from common.comm.ledger import Ledger
from common.comm.mesh import Mesh
from common.comm.placement import sum_gradients
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.comparison import Lesson
from common.lesson.equality import OPTIMIZERS, TOLERANCE, Followed, watch
from common.lesson.job import Job
from common.lesson.training import Batches, make_model
from common.models import configs
from common.models.transformer import attend

import sp_hybrid
import sp_library
import sp_ring_attention
import sp_sequence_parallel
from sp_attention_benchmark import AttentionCase
from sp_block import KERNELS, merge_
from sp_costs import allgather_bytes, copies, ring_bytes, step_bytes, ulysses_bytes
from sp_memory import MemoryOptions, activation_bytes, attention_peak, model_peak, saved
from sp_ring_attention import ring_attention, work
from sp_sequence_parallel import ORDERS, sequence_parallel
from sp_split import Order, places, split_sequence
from sp_training import SequenceOptions, sp_group

ALONE = Group.alone()
# 8 heads divide over 1, 2, 4 and 8 ranks, 6 over 3; 2 and 3 key-value heads over few of them
configs.CONFIGS |= {
    "sp-gpt2-8": configs.gpt2(layers=2, width=16, heads=8, sequence=48),
    "sp-gpt2-6": configs.gpt2(layers=2, width=12, heads=6, sequence=48),
    "sp-llama-8": configs.llama(layers=2, width=16, heads=8, kv_heads=2, mlp_width=24, sequence=48),
    "sp-llama-6": configs.llama(layers=2, width=12, heads=6, kv_heads=2, mlp_width=20, sequence=48),
}
configs.CONFIGS["sp-dropout"] = replace(configs.CONFIGS["sp-gpt2-8"], dropout=0.2)
ATTENTIONS = tuple(ORDERS)


def options(model: str, micro_batches: int = 1) -> SequenceOptions:
    return SequenceOptions(
        seed=0,  # the same in ranks, which know no --seed
        model=model,
        batch=3,
        micro_batches=micro_batches,
        sequence=48,
        steps=2,
        versions=("",),
    )


@dataclass
class Padded(Batches):
    """Batches whose samples end with ignored targets: the last ranks have fewer targets, or none."""

    def parts(self, step: int) -> list[tuple[Tensor, ...]]:
        parts = super().parts(step)
        return [(x_BS, y_BS.index_fill(1, torch.arange(35, 48), -100)) for x_BS, y_BS in parts]


def batches(o: SequenceOptions, device: torch.device) -> Batches:
    return Padded(o, ALONE, device)


@cache
def one_device(model: str, optimizer: str) -> Followed:
    """Train the reference, once for all world sizes."""
    o = options(model)
    plain = Version(without_dropped_weights(make_model(o, torch.device("cpu"))))
    step = training_step(plain, batches(replace(o, micro_batches=1), torch.device("cpu")), ALONE)
    return follow(plain.model, optimizer, o.steps, step)


def without_dropped_weights(model: torch.nn.Module) -> torch.nn.Module:
    for layer in model.layers:
        layer.attention.weights_dropout.p = 0.0
    return model


BYTES = {"allgather": allgather_bytes, "ulysses": ulysses_bytes, "ring": ring_bytes, "zigzag": ring_bytes}
LESSONS = {attention: Lesson("sp", {}, step_bytes(formula)) for attention, formula in BYTES.items()}


Case = tuple[str, str, str]  # model, attention, kernel


def train(rt: Runtime, case: Case, optimizer: str) -> Followed:
    """Train on a split sequence; check the ledger's bytes."""
    (name, attention, kernel), mesh = case, Mesh(rt.world, sp=rt.world_size)
    o, group = options(name, micro_batches=2 if rt.world_size < 4 else 1), mesh.group("sp")
    model = without_dropped_weights(make_model(o, rt.device))
    sequence_parallel(model, group, attention, kernel)
    split = partial(split_sequence, group=group, order=ORDERS[attention])
    finish = partial(sum_gradients, list(model.parameters()), mesh)
    step = training_step(Version(model, finish=finish, split=split), batches(o, rt.device), group)
    with Ledger() as ledger:
        parallel = follow(model, optimizer, o.steps, step, mesh)
    assert ledger.bytes() == LESSONS[attention].bytes_of_run(attention, model, group, o), attention
    return parallel


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_equal_to_one_device(world: int) -> None:
    cases: dict[str, Case] = {}
    references = {}

    def add(model: str, optimizer: str, kernel: str, attentions: Iterable[str]) -> None:
        for attention in attentions:
            name = f"{model}, {attention}, {kernel}"
            cases[name] = (model, attention, kernel)
            references[name, optimizer] = one_device(model, optimizer)

    heads = 6 if world == 3 else 8
    add(f"sp-gpt2-{heads}", "sgd", "library", ATTENTIONS)
    add(f"sp-llama-{heads}", "adamw", "library", ATTENTIONS if world < 8 else ["zigzag"])
    add(f"sp-llama-{heads}", "sgd", "hand", ["zigzag"])
    if world == 4:
        add("sp-dropout", "adamw", "library", ATTENTIONS)
    assert_equal(world, train, cases, references)


def train_beside_replicas(rt: Runtime, model: str, optimizer: str) -> Followed:
    """Train two replicas of two shards: samples split along dp, tokens along sp."""
    o, mesh = options(model), Mesh(rt.world, dp=2, sp=2)
    made, group = make_model(o, rt.device), mesh.group("sp")
    sequence_parallel(made, group, "zigzag")
    split = partial(split_sequence, group=group, order=ORDERS["zigzag"])
    finish = partial(sum_gradients, list(made.parameters()), mesh)
    samples = Padded(o, mesh.group("dp"), rt.device)
    step = training_step(Version(made, finish=finish, split=split), samples, mesh.group("dp", "sp"))
    return follow(made, optimizer, o.steps, step, mesh)


def test_beside_data_parallelism() -> None:
    model = "sp-llama-8"
    assert_equal(4, train_beside_replicas, {model: model}, {(model, "sgd"): one_device(model, "sgd")})


def train_hybrid(rt: Runtime, case: tuple[str, int, str], optimizer: str) -> Followed:
    """Train a version of the hybrid; check the bytes."""
    (name, inner, model), mesh = case, Mesh(rt.world, sp=rt.world_size)
    o = sp_hybrid.HybridOptions(**vars(options(model)), inner=inner)
    whole = make_model(o, rt.device)
    job = Job(rt, o, name, whole, mesh, "sp", OPTIMIZERS[optimizer], o.steps, Padded)
    with Ledger() as ledger:
        parallel = watch(sp_hybrid.train(job), job, mesh)
    assert ledger.bytes() == sp_hybrid.LESSON.bytes_of_run(name, whole, rt.world, o)
    return parallel


@pytest.mark.parametrize(
    ("inner", "across", "model"),
    [
        (2, 2, "sp-llama-8"),
        (2, 4, "sp-gpt2-8"),
        (4, 2, "sp-llama-8"),
        (1, 3, "sp-llama-6"),
    ],
)
def test_hybrid(inner: int, across: int, model: str) -> None:
    cases = {name: (name, inner, model) for name in sp_hybrid.ORDERS}
    pairs = zip(sp_hybrid.ORDERS, OPTIMIZERS, strict=True)  # one order under SGD, the other under AdamW
    references = {(name, optimizer): one_device(model, optimizer) for name, optimizer in pairs}
    assert_equal(inner * across, train_hybrid, cases, references)


def pieces(rt: Runtime, kv_heads: int) -> list[tuple[list[float], float]]:
    """Return differences of attention alone from torch's, each with its tolerance."""
    cases = ((True, torch.float64), (False, torch.float64), (True, torch.float32))
    return [(one_case(rt, kv_heads, *case), TOLERANCE[case[1]]) for case in cases]


def one_case(rt: Runtime, kv_heads: int, causal: bool, dtype: torch.dtype) -> list[float]:
    """Return the relative differences of o, dq, dk and dv, for each attention and kernel."""
    draw = torch.Generator().manual_seed(3)
    shapes = [(2, h, 24, 4) for h in (12, kv_heads, kv_heads, 12)]
    *qkv, do = (torch.randn(shape, generator=draw, dtype=dtype) for shape in shapes)
    whole = [x.clone().requires_grad_() for x in qkv]
    expected = attend(*whole, causal)
    expected.backward(do)
    group, found = sp_group(rt), []
    for kernel in KERNELS:
        for name, ours in sp_sequence_parallel.attends(group, kernel).items():
            mine = places(24, group, ORDERS[name])
            part = [x[:, :, mine].requires_grad_() for x in qkv]
            o = ours(*part, causal)
            o.backward(do[:, :, mine])
            pairs = zip((o, *(x.grad for x in part)), (expected, *(x.grad for x in whole)), strict=True)
            found += [((a - b[:, :, mine]).abs().max() / b.abs().max()).item() for a, b in pairs]
    return found


@pytest.mark.parametrize(("world", "kv_heads"), [(2, 4), (3, 12), (4, 3), (4, 1)])
def test_attention_alone(world: int, kv_heads: int) -> None:
    for of_rank in spawn(pieces, world, kv_heads):
        for found, limit in of_rank:
            assert len(found) == 4 * 4 * 2
            assert max(found) <= limit


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_work_is_the_mask_and_no_more(order: Order, n: int) -> None:
    s = 4
    where = [places(n * s, Group("sp", r, n, tuple(range(n))), order) for r in range(n)]
    seen, counts = torch.zeros(n * s, n * s, dtype=torch.int), []
    for r in range(n):
        items = [(owner, work(order, True, r, owner, s)) for owner in range(n)]
        for owner, item in items:
            if item:
                rows, columns = where[r][item.queries], where[owner][item.keys]
                ones = torch.ones(len(rows), len(columns), dtype=torch.int)
                seen[rows[:, None], columns] += ones.tril() if item.causal else ones
        counts.append(seen[where[r]].sum().item())
        column = Group("sp", r, n, tuple(range(n)))
        assert AttentionCase(attend, ring_bytes, column, order).pairs(n * s, 1) == counts[r]
    assert torch.equal(seen, torch.ones_like(seen).tril())  # every pair once, none that is masked
    assert sum(counts) == n * s * (n * s + 1) // 2
    if order == "zigzag":
        assert len(set(counts)) == 1
    elif n > 1:
        assert counts[-1] > 1.3 * sum(counts) / n


def test_kernels_agree_and_blocks_merge() -> None:
    draw = torch.Generator().manual_seed(0)
    q, do = (torch.randn(2, 6, 5, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 3, 9, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    expected = attend(q, k, v, False)
    for kernel in KERNELS.values():
        o, lse = kernel.forward(q, k[:, :, :4], v[:, :, :4], False)
        merge_(o, lse, *kernel.forward(q, k[:, :, 4:], v[:, :, 4:], False))
        torch.testing.assert_close(o, expected, rtol=1e-13, atol=1e-13)
        scores = q @ k.repeat_interleave(2, 1).mT / 2
        torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-13, atol=1e-13)
    for causal, keys in ((False, 9), (True, 5)):
        k_T, v_T = k[:, :, :keys], v[:, :, :keys]
        found = []
        for kernel in KERNELS.values():
            o, lse = kernel.forward(q, k_T, v_T, causal)
            found.append((o, lse, *kernel.backward(do, q, o, lse, k_T, v_T, causal)))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_copies_of_key_value_heads() -> None:
    assert [copies(2, n) for n in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert copies(3, 2) == 2  # 6 heads: 3 on each rank, one for each query head


def order_of_events(rt: Runtime) -> list[str]:
    """Return the sends, multiplications and waits of a ring, in their order."""
    events: list[str] = []
    plain, wait, kernel = comm.exchange, comm.Pending.wait, KERNELS["hand"]

    def send(*args, **how):
        events.append("send")
        return plain(*args, **how)

    def waiting(pending):
        if pending.works is not None and pending.op == "send":
            events.append("wait")
        wait(pending)

    def multiply(call, *args):
        events.append("multiply")
        return call(*args)

    comm.exchange, comm.Pending.wait = send, waiting
    logged = sp_ring_attention.Block(partial(multiply, kernel.forward), partial(multiply, kernel.backward))
    q, k, v = (torch.randn(1, 2, 4, 2, requires_grad=True) for _ in range(3))
    o = ring_attention(q, k, v, True, rt.world, "zigzag", logged)
    events.append("|")
    o.sum().backward()
    return events


def test_messages_travel_while_blocks_are_multiplied() -> None:
    forward, backward = ["send multiply wait " * 2 + "multiply ", "send multiply wait " * 2]
    backward = "send multiply wait "  # keys of step 1 on their way
    backward += "send multiply send wait "  # keys of step 2, dkv of step 1
    backward += "multiply wait send wait "  # dkv of step 2, which has no multiplication left to hide under
    for events in spawn(order_of_events, 3):
        assert " ".join(events) == forward + "| " + backward.strip()


def peaks(rt: Runtime) -> dict[tuple[object, str, int, int], int]:
    """Return the peak bytes of a model and of one attention: n ranks in a ring, 1024/n or 256 tokens each."""
    found, o = {}, MemoryOptions(shape=(1024, 32, 64), dtype="float32")
    for n in (1, 2, 4):
        group = Mesh(rt.world, dp=rt.world_size // n, sp=n).group("sp")
        for peak, name in itertools.product((model_peak, attention_peak), ("ring", "zigzag")):
            for s in {1024 // n, 256}:
                found[peak.__name__, name, n, s] = max(comm.everyones(peak(name, o, s, group, rt), rt.world))
    return found


def test_peak_of_the_ring_falls_with_ranks_and_does_not_grow_with_them() -> None:
    """Peak bytes fall as 1/n for 1024 tokens in all, and are constant at 256 tokens per rank.

    This holds for the model from 1 rank on, and for attention alone from 2 ranks on, since these also hold
    messages in flight.
    """
    found = spawn(peaks, 4)[0]
    for name, (what, n) in itertools.product(
        ("ring", "zigzag"), (("model_peak", 1), ("model_peak", 2), ("attention_peak", 2))
    ):
        assert 4 * found[what, name, 4, 256] == pytest.approx(n * found[what, name, n, 1024 // n], rel=0.05)
        assert found[what, name, 4, 256] == pytest.approx(found[what, name, n, 256], rel=0.05)


@pytest.mark.parametrize("kernel", KERNELS)
def test_bytes_kept_by_formula(kernel: str) -> None:
    """The bytes stored by the lesson's small attention match the formula."""
    o = MemoryOptions(shape=(96, 4, 4), kernel=kernel, dtype="float32")
    for exact in spawn(kept_bytes, 4, o):
        assert all(measured == formula for measured, formula in exact)


def kept_bytes(rt: Runtime, o: MemoryOptions) -> list[tuple[int, int]]:
    group, o = sp_group(rt), replace(o, micro_batches=1)
    return [(saved(name, o, group, rt), activation_bytes(name, o, group)) for name in ATTENTIONS]


# Bad input


def test_sequences_that_do_not_divide() -> None:
    three = Group("sp", 1, 3, (0, 1, 2))
    tokens = torch.zeros(1, 20, dtype=torch.int64)
    with pytest.raises(
        UsageError, match=r"20 tokens does not divide into 3 pieces, .* 3 ranks needs; 18 or 21 would"
    ):
        split_sequence(tokens, tokens, three)
    with pytest.raises(UsageError, match=r"into 6 pieces, which zigzag order .*; 18 or 24 would"):
        split_sequence(tokens, tokens, three, "zigzag")
    with pytest.raises(UsageError, match=r"2 tokens .*; 3 would"):
        split_sequence(tokens[:, :2], tokens[:, :2], three)
    with pytest.raises(UsageError, match="18 tokens is too long for a model with 16 learned positions"):
        split_sequence(tokens[:, :18], tokens[:, :18], three, longest=16)
    with pytest.raises(ValueError, match="a rank's 3 tokens are not two chunks"):
        ring_attention(*torch.zeros(3, 1, 1, 3, 2), True, three, "zigzag")


def test_models_that_cannot_be_split() -> None:
    three = Group("sp", 1, 3, (0, 1, 2))
    model = make_model(options("sp-dropout"), torch.device("cpu"))
    switch = make_model(options("switch-tiny"), torch.device("cpu"))
    with pytest.raises(
        UsageError, match=r"takes 1.25 times an even share: give a model with capacity_factor=None"
    ):
        sequence_parallel(switch, three)
    with pytest.raises(UsageError, match=r"cannot drop attention weights \(dropout 0.2\): give 0"):
        sequence_parallel(model, three)
    model = make_model(options("sp-gpt2-8"), torch.device("cpu"))
    with pytest.raises(UsageError, match=r"8 heads do not divide over 3 ranks; 1, 2, 4, 8 ranks would do"):
        sequence_parallel(model, three, "ulysses")
    with pytest.raises(UsageError, match=r"attention 'rings' is unknown; choose one of allgather, ulysses"):
        sequence_parallel(model, three, "rings")
    sequence_parallel(model, three)
    with pytest.raises(UsageError, match="needs its tokens' positions"):
        model(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sequence": 46}, "46 tokens does not divide into 4 pieces"),
        ({"sequence": 128}, "128 tokens is too long for a model with 64 learned positions"),
        ({"versions": ("zig",)}, "--versions 'zig' is unknown"),
    ],
)
def test_bad_input_is_one_line(given: dict[str, object], message: str) -> None:
    o = SequenceOptions(**{"versions": tuple(sp_ring_attention.ORDERS), **given})
    assert re.search(message, refused(sp_ring_attention.main, 2, o))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inner": 3}, "--inner 3 does not divide 4 ranks; 1, 2, 4 would"),
        (
            {"sequence": 42, "inner": 4},
            "42 tokens does not divide into 4 pieces, .* 4 ranks needs; 40 or 44 would",
        ),
    ],
)
def test_bad_grids(given: dict[str, object], message: str) -> None:
    o = sp_hybrid.HybridOptions(versions=tuple(sp_hybrid.ORDERS), **given)
    assert re.search(message, refused(sp_hybrid.main, 4, o))


def compare_with_torch(rt: Runtime) -> bool:
    """Return True if torch's ring and ours equal one device and send the bytes of their formulas."""
    return sp_library.main(rt, sp_library.LibraryOptions(versions=sp_library.VERSIONS, shape=(24, 4, 8)))


def test_torchs_ring_equals_one_device() -> None:
    assert spawn(compare_with_torch, 3) == [True] * 3


def test_torchs_ring_needs_two_ranks() -> None:
    o = sp_library.LibraryOptions(versions=sp_library.VERSIONS)
    assert "at least 2 ranks" in refused(sp_library.main, 1, o)
