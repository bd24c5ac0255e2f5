"""Activation checkpointing: results are the same bit for bit; bytes saved match the formula exactly."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from beside_one_device import Case, equal_to_one_device
from mpi.launch import refused
from small_models import SHAPES, ours, tokens
from torch import nn

from common.lesson.comparison import Lesson
from common.models.transformer import Transformer, config, cross_entropy_sum
from common.utils.memory import LiveBytes, saved_bytes

from dp_checkpointing import (
    LESSON,
    VERSIONS,
    checkpoint_layers,
    main,
)
from dp_memory import activation_bytes, activations, measure
from dp_training import DataParallelOptions

OPTIONS = DataParallelOptions(
    versions=VERSIONS, model="gpt2-nano", batch=9, sequence=8, steps=2, micro_batches=2
)


def lesson_of(case: Case) -> Lesson:
    return LESSON


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_equal_to_one_device(world: int) -> None:
    equal_to_one_device(world, lesson_of, {name: Case(name, OPTIONS) for name in OPTIONS.versions})


@pytest.mark.parametrize("shape", list(SHAPES))
def test_the_same_bits_for_every_shape(shape: str) -> None:
    gradients = []
    for version in VERSIONS:
        model = ours(SHAPES[shape])
        checkpoint_layers(model, version)
        x_BS = tokens(SHAPES[shape])
        for _ in range(2):  # the second backward pass adds to the first
            cross_entropy_sum(model(x_BS[:, :-1]), x_BS[:, 1:])[0].backward()
        gradients.append([p.grad for p in model.parameters()])
        assert list(model.state_dict()) == list(ours(SHAPES[shape]).state_dict())
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))


@pytest.mark.parametrize("name", ["gpt2-tiny", "gpt2-10m"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("batch", "sequence"), [(1, 8), (3, 17)])
def test_saved_bytes_are_the_formulas(name: str, dtype: torch.dtype, batch: int, sequence: int) -> None:
    c = config(name)
    saved, peak = {}, {}
    x_BS = torch.randint(256, (batch, sequence + 1), generator=torch.Generator().manual_seed(0))
    for version in VERSIONS:
        model = Transformer(c, 0, dtype)
        checkpoint_layers(model, version)
        saved[version], peak[version] = measure(model, x_BS[:, :-1].clone(), x_BS[:, 1:].clone())
        formula = activation_bytes(c, batch, sequence, dtype.itemsize, version != "none")
        assert saved[version] == formula, version
    if c.layers > 2 and batch > 1:
        assert peak["library"] < 0.5 * peak["none"]


def test_the_table_says_whether_bits_change() -> None:
    table, exact = activations(OPTIONS, checkpoint_layers)
    assert exact
    assert table.row_count == 2 * len(VERSIONS)


def test_a_changed_bit_is_seen() -> None:
    def wrong(model: Transformer, version: str) -> None:
        checkpoint_layers(model, version)
        if version == "by-hand":
            model.norm.weight.data[0] += 1e-15

    assert not activations(OPTIONS, wrong)[1]


def test_live_bytes_count_storages_until_they_are_freed() -> None:
    with LiveBytes() as live:
        a = torch.zeros(1000)
        assert live.now == 4000
        view = a[3:].view(-1)
        a += 1
        assert live.now == 4000
        del a
        assert live.now == 4000  # the view holds the storage
        del view
        gc.collect()
        assert (live.now, live.peak) == (0, 4000)


def test_saved_bytes_count_a_storage_once_and_no_parameters() -> None:
    model = nn.Linear(10, 20, bias=False)
    x = torch.ones(3, 10)
    assert saved_bytes(lambda: model(x), model) == 3 * 10 * 4  # for the weight's gradient
    # x * x saves x twice; tanh saves its result
    assert saved_bytes(lambda: torch.tanh((y := model(x)) * y), model) == (30 + 60 + 60) * 4


def test_bad_input_is_one_line() -> None:
    assert "--versions 'all' is unknown" in refused(main, 2, replace(OPTIONS, versions=("all",)))
