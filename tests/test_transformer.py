"""The Transformer and the MLP alone: initial values, positions, the loss, parameter counts, bad shapes."""

import dataclasses
import math

import pytest
import torch
from small_models import SHAPES, ours, tokens
from torch.utils.flop_counter import FlopCounterMode

from common import random
from common.errors import UsageError
from common.models.configs import CONFIGS, config, gpt2, llama
from common.models.mlp import MLP, sizes
from common.models.transformer import Transformer, cross_entropy_sum, initialise


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_part_is_initialised_as_in_the_whole(name):
    c = SHAPES[name]
    whole = Transformer(c, seed=3)
    with torch.device("meta"):
        skeleton = Transformer(c)
    assert all(p.is_meta for p in skeleton.parameters())
    layer = skeleton.layers[1].to_empty(device="cpu")
    initialise(layer, c, seed=3, prefix="layers.1.")
    assert all(
        torch.equal(p, q) for p, q in zip(layer.parameters(), whole.layers[1].parameters(), strict=True)
    )
    assert not torch.equal(whole.layers[0].mlp.up_proj.weight, whole.layers[1].mlp.up_proj.weight)
    assert not torch.equal(whole.embed_tokens.weight, Transformer(c, seed=4).embed_tokens.weight)
    values = random.normal(3, random.stream_of("embed_tokens.weight"), range(5, 50))  # a slice alone
    assert torch.equal(whole.embed_tokens.weight.flatten()[5:50], torch.from_numpy(0.02 * values).float())


def test_initial_values_start_near_the_uniform_loss():
    c = config("gpt2-tiny")
    model = Transformer(c)
    tokens_BS = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(0))
    total, count = cross_entropy_sum(model(tokens_BS), tokens_BS.roll(-1, 1))
    assert abs(total.item() / count.item() - math.log(256)) < 0.05
    state = torch.get_rng_state()
    Transformer(c)
    assert torch.equal(state, torch.get_rng_state()), "the model drew from torch's own generator"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_positions_and_causality(name):
    c = SHAPES[name]
    model, tokens_BS = ours(c), tokens(SHAPES[name])
    S = tokens_BS.shape[1]
    whole = model(tokens_BS)
    torch.testing.assert_close(model(tokens_BS, torch.arange(S).expand(3, S)), whole, rtol=0, atol=1e-12)
    assert (model(tokens_BS, torch.arange(S).flip(0)) - whole).abs().max() > 1e-3
    changed = tokens_BS.clone()
    changed[:, 9] = (changed[:, 9] + 1) % c.vocabulary
    difference = (model(changed) - whole).abs().amax((0, 2))
    assert difference[:9].max() == 0
    assert difference[9:].min() > 0
    if name == "gpt2":
        both_ways = Transformer(dataclasses.replace(c, causal=False), dtype=torch.float64)
        assert (both_ways(changed) - both_ways(tokens_BS))[:, :9].abs().max() > 0
        with pytest.raises(UsageError, match="20 tokens is too long for a model with 19"):
            model(torch.zeros(1, 20, dtype=torch.long))


def test_counts_and_flops():
    counts = {}
    for name in CONFIGS:
        with torch.device("meta"):
            counts[name] = Transformer(config(name)).parameter_count()
    assert counts["gpt2"] == 124_439_808  # as published
    assert counts["bert-base"] == 109_514_298  # as transformers has it
    assert counts["llama2-7b"] == 6_738_415_616  # as published
    assert counts["mixtral-8x7b"] == 46_702_792_704  # as published
    assert 9e6 < counts["gpt2-10m"] < 11e6
    assert 9e6 < counts["bert-10m"] < 11e6


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama-tied", "mixtral"])
def test_flops_are_those_that_torch_counts(name):
    def attend(q_BHSK, k_BHSK, v_BHSK, causal):  # as matrix products, which the counter sees
        return (q_BHSK @ k_BHSK.mT).softmax(-1) @ v_BHSK

    model = Transformer(dataclasses.replace(SHAPES[name], kv_heads=SHAPES[name].heads))
    for layer in model.layers:
        layer.attention.attend = attend
    tokens_BS = tokens(model.config)
    with FlopCounterMode(display=False) as counter:
        cross_entropy_sum(model(tokens_BS), tokens_BS)[0].backward()
    assert counter.get_total_flops() == model.flops_per_token(tokens_BS.shape[1]) * tokens_BS.numel()


def test_the_loss_is_a_sum_in_float32_at_least():
    logits_BSV = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(1))
    targets_BS = torch.tensor([[1, 2, -100, 3, 4], [0, -100, -100, 6, 5]])
    total, count = cross_entropy_sum(logits_BSV, targets_BS)
    assert count == 7
    parts = [cross_entropy_sum(logits_BSV[i : i + 1], targets_BS[i : i + 1]) for i in range(2)]
    torch.testing.assert_close(sum(p for p, _ in parts), total)
    assert not torch.isclose(sum(p / n for p, n in parts) / 2, total / count, atol=1e-4)  # a mean of means
    assert cross_entropy_sum(logits_BSV.bfloat16(), targets_BS)[0].dtype == torch.float32
    assert cross_entropy_sum(logits_BSV[:1], torch.full((1, 5), -100))[0] == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: config("gpt5"), "model 'gpt5' is unknown; choose one of gpt2-tiny"),
        (lambda: gpt2(1, 20, 3, 8), "width 20 does not divide into 3 heads; 18 or 21 would"),
        (lambda: llama(1, 24, 6, 4, 8, 8), "6 heads cannot share 4 key-value heads; 1, 2, 3, 6 would do"),
        (lambda: llama(1, 9, 3, 3, 8, 8), "rotary positions need an even width per head, not 3"),
        (lambda: gpt2(0, 20, 4, 8), "layers of at least 1, not 0"),
        (lambda: MLP([8]), r"two or more sizes, all at least 1; given \[8\]"),
    ],
)
def test_bad_shapes_get_one_line(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_mlp_equals_its_definition():
    """The MLP's initial weights and layers equal their definition in plain formulas."""
    assert sizes(context=2, hidden=5, layers=3) == [16, 5, 5, 256]
    model = MLP([16, 5, 3], seed=9, dtype=torch.float64)
    assert [name for name, _ in model.named_parameters()] == [
        f"layers.{i}.{k}" for i in (0, 1) for k in ("weight", "bias")
    ]
    w, b = model.layers[1].weight, model.layers[1].bias
    assert w[2, 4].item() == (2 * random.uniform(9, 2, 2 * 5 + 4)[0] - 1) * math.sqrt(3 / 5)
    assert b[1].item() == (2 * random.uniform(9, 3, 1)[0] - 1) / math.sqrt(5)
    x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    z = x @ model.layers[0].weight.T + model.layers[0].bias
    gelu = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    torch.testing.assert_close(model(x), gelu @ w.T + b, rtol=0, atol=1e-13)
    assert model.flops_per_sample() == 4 * 16 * 5 + 6 * 5 * 3
