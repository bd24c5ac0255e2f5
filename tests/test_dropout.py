"""Dropout by position: the masks are the bits of random.py, on every rank and mesh."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_models import SHAPES, ours, tokens

from common import random
from common.models.dropout import Dropout, _mix, kept
from common.models.transformer import Transformer, attend, attend_and_drop


def test_bits_are_those_of_random() -> None:
    numbers = torch.tensor([0, 1, 2**40 + 7, -1, -(2**63)])
    expected = random.mix(numbers.numpy().astype(np.uint64)).astype(np.int64)
    assert (_mix(numbers).numpy() == expected).all()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_share_and_independence(p: float) -> None:
    keep = kept(p, 3, [torch.arange(40), torch.arange(50), torch.arange(60)])
    assert keep.shape == (40, 50, 60)
    n = keep.numel()
    assert abs(keep.double().mean().item() - (1 - p)) <= 5 * (p * (1 - p) / n) ** 0.5
    if p:  # neighbours along each dimension are independent
        for dim in range(3):
            a = keep.narrow(dim, 0, keep.shape[dim] - 1).double() - (1 - p)
            b = keep.narrow(dim, 1, keep.shape[dim] - 1).double() - (1 - p)
            assert abs((a * b).mean().item()) <= 5 * p * (1 - p) / a.numel() ** 0.5


def test_a_part_is_dropped_as_the_whole() -> None:
    dropout = Dropout(0.3, seed=4)
    x = torch.ones(6, 8, 5)
    whole = dropout(x, torch.arange(8))
    dropout.first_sample = 2
    part = dropout(x[2:5, 3:7], torch.arange(3, 7))
    assert torch.equal(part, whole[2:5, 3:7])
    weights = torch.ones(6, 4, 8, 8)
    dropout.first_sample = 0
    whole = dropout(weights, torch.arange(8))
    dropout.first_head = 1
    assert torch.equal(dropout(weights[:, 1:3], torch.arange(8)), whole[:, 1:3])


def test_steps_layers_and_seeds_differ() -> None:
    model = Transformer(replace(SHAPES["gpt2"], dropout=0.5))
    names = {m.name for m in model.modules() if isinstance(m, Dropout)}
    assert len(names) == 1 + 3 * len(model.layers)
    x, positions = torch.ones(2, 16, 24), torch.arange(16)
    masks = []
    for name, seed, step in [("a", 0, 0), ("b", 0, 0), ("a", 1, 0), ("a", 0, 1)]:
        dropout = Dropout(0.5, seed)
        dropout.name, dropout.step = name, step
        masks.append(dropout(x, positions))
    for i, a in enumerate(masks):
        assert all(not torch.equal(a, b) for b in masks[:i])


def test_off_in_evaluation_and_by_default() -> None:
    x = torch.ones(2, 3, 4)
    assert Dropout(0.5).eval()(x, torch.arange(3)) is x
    assert Dropout(0.0)(x, torch.arange(3)) is x


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_attention_with_weights_is_attention(shape: str) -> None:
    generator = torch.Generator().manual_seed(0)
    c = SHAPES[shape]
    q = torch.randn(2, c.heads, 9, c.head_width, dtype=torch.float64, generator=generator)
    k, v = torch.randn(2, 2, c.kv_heads, 9, c.head_width, dtype=torch.float64, generator=generator)
    for causal in (False, True):
        difference = attend_and_drop(q, k, v, causal, lambda x: x) - attend(q, k, v, causal)
        assert difference.abs().max() < 1e-13


def test_the_model_drops_in_training_alone() -> None:
    c = replace(SHAPES["gpt2"], dropout=0.2)
    plain, dropping = ours(SHAPES["gpt2"]), ours(c)
    x = tokens(c)
    assert not torch.allclose(plain(x), dropping(x))
    assert torch.equal(plain.eval()(x), dropping.eval()(x))
