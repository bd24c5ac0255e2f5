"""Tensor parallelism in PyTorch: every split equal to one device at every world size, and refused options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from beside_one_device import Case, equal_to_one_device
from torch import nn

from common.comm import Group, sizes_of
from common.comm.placement import Shard, placement
from common.errors import RankError, UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.comparison import Lesson
from common.lesson.training import make_model
from common.models.configs import CONFIGS, gpt2, llama
from common.models.transformer import cross_entropy_sum
from common.utils.memory import peak_allocated

import tp_column_parallel
import tp_dtensor
import tp_megatron
import tp_overlap
import tp_row_parallel
import tp_vocabulary
from tp_column_parallel import ColumnParallelLinear
from tp_megatron import MegatronOptions, tensor_parallel
from tp_row_parallel import RowParallelLinear
from tp_training import TensorOptions, tp_group
from tp_vocabulary import VocabularyParallelEmbedding, cross_entropy_sum_parallel

# 24 heads divide by 2, 3, 4 and 8; nothing else does by all: 259 tokens, an MLP of 51, 6 key-value heads
CONFIGS["tp-gpt2"] = replace(gpt2(layers=2, width=48, heads=24, sequence=48, vocabulary=259), mlp_width=51)
CONFIGS["tp-llama"] = llama(
    layers=2, width=48, heads=24, kv_heads=6, mlp_width=35, sequence=48, vocabulary=259
)
CONFIGS["tp-even"] = replace(CONFIGS["tp-gpt2"], mlp_width=52, vocabulary=260)
CONFIGS["tp-even-llama"] = replace(CONFIGS["tp-llama"], mlp_width=36)
CONFIGS["tp-untied"] = replace(CONFIGS["tp-gpt2"], tied=False, bias=False, layers=1)

LESSONS = {
    "column": tp_column_parallel,
    "row": tp_row_parallel,
    "vocabulary": tp_vocabulary,
    "megatron": tp_megatron,
    "overlap": tp_overlap,
    "dtensor": tp_dtensor,
}
OPTIONS = {"megatron": tp_megatron.MegatronOptions, "overlap": tp_overlap.OverlapOptions}


@dataclass(frozen=True)
class OfLesson(Case):
    """A version of one of LESSONS."""

    lesson: str


def case(lesson: str, version: str, model: str, **more: Any) -> OfLesson:
    kind = OPTIONS.get(lesson, TensorOptions)
    return OfLesson(version, kind(model=model, batch=4, steps=2, **{"sequence": 12, **more}), lesson)


CASES = {
    "column, gpt2": case("column", "gathered", "tp-gpt2"),
    "column, llama": case("column", "gathered", "tp-llama"),
    "row, gpt2": case("row", "scattered", "tp-gpt2"),
    "column-row, llama": case("row", "column-row", "tp-llama"),
    "vocabulary, gpt2": case("vocabulary", "gathered", "tp-gpt2"),
    "vocabulary, llama": case("vocabulary", "parallel", "tp-llama"),
    "megatron, gpt2": case("megatron", "plain", "tp-gpt2"),
    "megatron, llama": case("megatron", "plain", "tp-llama", micro_batches=2),
    "megatron, untied, dropout": case("megatron", "plain", "tp-untied", dropout=0.3),
    "sequence, gpt2": case("megatron", "sequence-parallel", "tp-gpt2", sequence=13, micro_batches=3),
    "sequence, llama": case("megatron", "sequence-parallel", "tp-llama"),
    "sequence, dropout": case(
        "megatron", "sequence-parallel", "tp-gpt2", dropout=0.3, sequence=11, micro_batches=2
    ),
    "overlap, gpt2": case("overlap", "pieces", "tp-gpt2", sequence=48, pieces=3),
}
# all on 2 ranks; with more ranks than cores, what depends on their number
ON_3 = [
    "megatron, llama",
    "megatron, untied, dropout",
    "sequence, gpt2",
    "sequence, llama",
    "sequence, dropout",
    "overlap, gpt2",
]
NAMES = {
    1: ["megatron, gpt2", "sequence, gpt2", "overlap, gpt2"],
    2: list(CASES),
    3: ON_3,
    4: ["megatron, llama", "sequence, gpt2", "sequence, dropout"],
    8: ["megatron, llama"],
}


def lesson_of(case: OfLesson) -> Lesson:
    return LESSONS[case.lesson].LESSON


@pytest.mark.parametrize("world", NAMES)
def test_equal_to_one_device(world: int) -> None:
    equal_to_one_device(world, lesson_of, {name: CASES[name] for name in NAMES[world]})


def test_dtensor_is_equal_and_sends_the_same() -> None:
    cases = {model: case("dtensor", "dtensor", model) for model in ("tp-even", "tp-even-llama")}
    equal_to_one_device(2, lesson_of, cases)


def place(total: int, group: Group) -> slice:
    """Return the slice of this rank's shard."""
    sizes = sizes_of(total, group.size)
    return slice(sum(sizes[: group.rank]), sum(sizes[: group.rank + 1]))


def layers_alone(rt: Runtime) -> None:
    """Check every option of the two linear layers on sizes that divide by nothing, forward and backward."""
    group = tp_group(rt)
    for bias in (False, True):
        torch.manual_seed(3)
        plain = nn.Linear(11, 13, bias, dtype=torch.float64)
        x, dy = (torch.randn(2, 5, d, dtype=torch.float64) for d in (11, 13))
        x_one = x.clone().requires_grad_()
        y_one = plain(x_one)
        y_one.backward(dy)
        rows = range(
            sum(sizes_of(13, group.size)[: group.rank]), sum(sizes_of(13, group.size)[: group.rank + 1])
        )
        inner = range(
            sum(sizes_of(11, group.size)[: group.rank]), sum(sizes_of(11, group.size)[: group.rank + 1])
        )
        for gather_output in (False, True):
            column = ColumnParallelLinear(plain, group, gather_output)
            x_many = x.clone().requires_grad_()
            y = column(x_many)
            mine = slice(None) if gather_output else rows
            y.backward(dy[..., mine])
            torch.testing.assert_close(y, y_one[..., mine], rtol=0, atol=1e-13)
            torch.testing.assert_close(x_many.grad, x_one.grad, rtol=0, atol=1e-13)
            torch.testing.assert_close(column.weight.grad, plain.weight.grad[rows], rtol=0, atol=1e-13)
            if bias:
                torch.testing.assert_close(column.bias.grad, plain.bias.grad[rows], rtol=0, atol=1e-13)
                assert placement(column.bias)["tp"] == Shard(0, tuple(sizes_of(13, group.size)))
        for input_is_parallel in (False, True):
            row = RowParallelLinear(plain, group, input_is_parallel)
            if bias:
                row.bias.grad = None
            part = inner if input_is_parallel else slice(None)
            x_many = x[..., part].clone().requires_grad_()
            y = row(x_many)
            y.backward(dy)
            torch.testing.assert_close(y, y_one, rtol=0, atol=1e-13)
            torch.testing.assert_close(x_many.grad, x_one.grad[..., part], rtol=0, atol=1e-13)
            torch.testing.assert_close(row.weight.grad, plain.weight.grad[:, inner], rtol=0, atol=1e-13)
            if bias:
                torch.testing.assert_close(row.bias.grad, dy.sum((0, 1)), rtol=0, atol=1e-13)


def vocabulary_alone(rt: Runtime) -> None:
    """Check embedding and loss on 13 tokens, with ignored targets and large logits, forward and backward."""
    group, V = tp_group(rt), 13
    mine, sizes = place(V, group), sizes_of(V, group.size)
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(V, (3, 7), generator=generator)
    targets[0, 2:5] = -100
    logits = 300 * torch.randn(3, 7, V, dtype=torch.float64, generator=generator)
    one = logits.clone().requires_grad_()
    many = logits[..., mine].clone().requires_grad_()
    expected, count = cross_entropy_sum(one, targets)
    found, same = cross_entropy_sum_parallel(many, targets, group, V)
    assert count == same == 18
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    (2.5 * expected).backward()
    (2.5 * found).backward()
    torch.testing.assert_close(many.grad, one.grad[..., mine], rtol=0, atol=1e-13)

    gone = logits.clone()
    gone[
        ..., [sum(sizes[:r]) for r in range(group.size)]
    ] = -torch.inf  # each rank's first token is never right
    impossible = gone.gather(-1, targets.clamp(min=0)[..., None])[..., 0].isinf()
    some = torch.where(impossible, -100, targets)
    expected, _ = cross_entropy_sum(gone, some)
    found, _ = cross_entropy_sum_parallel(gone[..., mine], some, group, V)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    for wrong in (-1, V):
        with pytest.raises(IndexError, match=f"of a vocabulary of {V}"):
            cross_entropy_sum_parallel(many, torch.full((3, 7), wrong), group, V)

    table = nn.Embedding(V, 5, dtype=torch.float64)
    with torch.no_grad():
        table.weight.copy_(torch.randn(V, 5, dtype=torch.float64, generator=generator))
    pieces = VocabularyParallelEmbedding(table, group)
    tokens = torch.randint(V, (4, 6), generator=generator)
    x, y = table(tokens), pieces(tokens)
    assert torch.equal(x, y)
    x.square().sum().backward()
    y.square().sum().backward()
    torch.testing.assert_close(pieces.weight.grad, table.weight.grad[mine], rtol=0, atol=1e-13)


def loss_memory(rt: Runtime) -> tuple[int, int]:
    """Return (peak bytes of the loss forward and backward, bytes of the full logits)."""
    group, N, V = tp_group(rt), 64, 4096
    logits = torch.randn(N, V // group.size).requires_grad_()
    call = partial(cross_entropy_sum_parallel, logits, torch.arange(N), group, V)
    call()[0].backward()
    logits.grad = None
    return peak_allocated(lambda: call()[0].backward()), N * V * 4


@pytest.mark.parametrize("world", [1, 3, 4])
def test_parts_alone(world: int) -> None:
    spawn(layers_alone, world)
    spawn(vocabulary_alone, world)


def test_the_loss_holds_no_whole_logits() -> None:
    for peak, whole in spawn(loss_memory, 4):
        assert whole / 2 <= peak < 0.55 * whole  # softmax and gradient, a quarter each


def logits_of(rt: Runtime, sequence_parallel: bool) -> None:
    """Check that logits are this rank's shard of the plain model's, in evaluation mode."""
    o = MegatronOptions(model="tp-gpt2", dropout=0.5)
    plain, split = (make_model(o, rt.device).eval() for _ in range(2))
    group = tp_group(rt)
    tensor_parallel(split, group, sequence_parallel)
    tokens = torch.arange(22).view(2, 11)
    expected = plain(tokens)[..., place(259, group)]
    torch.testing.assert_close(split(tokens), expected, rtol=0, atol=1e-13)
    assert sum(p.numel() for p in split.parameters()) < sum(p.numel() for p in plain.parameters())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_logits_in_evaluation(sequence_parallel: bool) -> None:
    spawn(logits_of, 3, sequence_parallel)


def refused(rt: Runtime, model: str) -> None:
    tensor_parallel(make_model(MegatronOptions(model=model), rt.device), tp_group(rt))


def test_what_does_not_divide_is_refused_in_one_line() -> None:
    with pytest.raises(RankError, match="4 heads do not divide over 3 ranks along tp; 1, 2, 4 would do"):
        spawn(refused, 3, "gpt2-tiny")


@pytest.mark.parametrize(
    ("lesson", "options", "message"),
    [
        ("overlap", {"model": "llama-tiny"}, "MLPs with one first layer"),
        ("megatron", {"versions": ("fast",)}, "--versions 'fast' is unknown; choose from plain"),
        ("megatron", {"model": "mixtral-tiny"}, "one MLP a layer over tp, not 8 experts; see chapter 06"),
    ],
)
def test_bad_options(lesson: str, options: dict, message: str) -> None:
    world = Group.alone("world")
    rt = Runtime(0, 1, 0, 1, "none", torch.device("cpu"), "gloo", 60.0, world)
    with pytest.raises(UsageError, match=message):
        LESSONS[lesson].main(rt, OPTIONS.get(lesson, TensorOptions)(**options))
