"""Experts in the plain Transformer: routers against a loop over tokens; capacity, precision, bad input."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small_models import SHAPES, ours, tokens
from torch import Tensor, nn

from common.errors import UsageError
from common.models.configs import TransformerConfig, config, switch
from common.models.moe import MoE, combine
from common.models.transformer import Transformer, make_mlp

SWITCH = switch(layers=1, width=8, heads=2, sequence=24, experts=3)
KINDS = {
    "switch": replace(SWITCH, capacity_factor=None),
    "top-2 softmax": replace(SWITCH, capacity_factor=None, experts_per_token=2),
    "mixtral": replace(SHAPES["mixtral"], width=8),
    "deepseek": replace(SHAPES["mixtral"], width=8, router="sigmoid", shared_experts=2, experts_per_token=3),
}


def random_moe(c: TransformerConfig) -> MoE:
    moe = make_mlp(c).double()
    generator = torch.Generator().manual_seed(3)
    for p in (*moe.parameters(), *moe.buffers()):
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return moe


def expert(moe: MoE, e: int, x_D: Tensor) -> Tensor:
    def linear(part, x):
        return F.linear(x, part.weight[e], None if part.bias is None else part.bias[e])

    up = linear(moe.experts.up_proj, x_D)
    gate = moe.experts.gate_proj
    inner = F.gelu(up, approximate="tanh") if gate is None else F.silu(linear(gate, x_D)) * up
    return linear(moe.experts.down_proj, inner)


def one_by_one(moe: MoE, c: TransformerConfig, x_BSD: Tensor) -> tuple[Tensor, int]:
    """Compute the definition token by token; return the result and the number of dropped choices."""
    C = (
        math.inf
        if c.capacity_factor is None
        else math.ceil(c.capacity_factor * c.experts_per_token * x_BSD.shape[1] / c.experts)
    )
    y_BSD, dropped = torch.zeros_like(x_BSD), 0
    for b, sequence in enumerate(x_BSD):
        taken = [0] * c.experts
        for s, x_D in enumerate(sequence):
            logits = moe.router.weight @ x_D
            scores = logits.sigmoid() if c.router == "sigmoid" else logits.softmax(0)
            wanted = scores + moe.router.choice_bias if c.router == "sigmoid" else scores
            chosen = sorted(range(c.experts), key=lambda e: -wanted[e].item())[: c.experts_per_token]
            total = 1 if c.router == "softmax" else sum(scores[e] for e in chosen)
            for e in chosen:
                taken[e] += 1
                if taken[e] <= C:
                    y_BSD[b, s] += scores[e] / total * expert(moe, e, x_D)
                else:
                    dropped += 1
    return (y_BSD if moe.shared is None else y_BSD + moe.shared(x_BSD)), dropped


@pytest.mark.parametrize("capacity_factor", [None, 0.6, 1.0])
@pytest.mark.parametrize("name", KINDS)
def test_equals_its_definition(name, capacity_factor):
    c = replace(KINDS[name], capacity_factor=capacity_factor)
    moe = random_moe(c)
    x_BSD = torch.randn(3, 11, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    gradients = []
    for y_BSD in (moe(x_BSD.requires_grad_()), (expected := one_by_one(moe, c, x_BSD))[0]):
        torch.testing.assert_close(y_BSD, expected[0], rtol=0, atol=1e-12)
        y_BSD.square().sum().backward()
        gradients.append({n: p.grad for n, p in [("x", x_BSD), *moe.named_parameters()]})
        x_BSD.grad = None
        moe.zero_grad()
    for key, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][key], gradient, rtol=1e-11, atol=1e-11)
    assert (expected[1] > 0) == (capacity_factor is not None)


@pytest.mark.parametrize("capacity_factor", [None, 0.7])
def test_a_token_does_not_see_the_rest_of_the_batch(capacity_factor):
    model = ours(replace(SHAPES["mixtral"], capacity_factor=capacity_factor))
    tokens_BS = tokens(model.config)
    whole = model(tokens_BS)
    for b in range(len(tokens_BS)):
        torch.testing.assert_close(model(tokens_BS[b : b + 1]), whole[b : b + 1], rtol=0, atol=1e-12)
    changed = tokens_BS.clone()
    changed[:, 9] = (changed[:, 9] + 1) % model.config.vocabulary
    # 1e-12 as above: a BLAS rounds a row by its place in a product, and the experts of later tokens move rows
    torch.testing.assert_close(model(changed)[:, :9], whole[:, :9], rtol=0, atol=1e-12)


def test_a_token_that_lost_all_passes_by():
    moe = random_moe(replace(SWITCH, capacity_factor=1 / 11 * 3))  # one token an expert
    with torch.no_grad():
        moe.router.weight.zero_()[0, 0] = 5.0
    x_BSD = torch.ones(1, 11, 8, dtype=torch.float64)  # all choose expert 0
    y_BSD = moe(x_BSD)
    assert y_BSD[0, 0].abs().max() > 0
    assert y_BSD[0, 1:].abs().max() == 0


def test_the_combination_is_rounded_once():
    generator = torch.Generator().manual_seed(0)
    y_TKD = torch.randn(64, 4, 32, generator=generator).bfloat16()
    weights_TK = torch.rand(64, 4, generator=generator)
    exact = (y_TKD.double() * weights_TK.double()[..., None]).sum(1)
    one_by_one = torch.zeros(64, 32, dtype=torch.bfloat16)
    for k in range(4):
        one_by_one += y_TKD[:, k] * weights_TK[:, k, None].bfloat16()
    found = combine(y_TKD, weights_TK)
    assert found.dtype == torch.bfloat16
    half_a_step = exact.abs() * 2**-8 + 1e-6  # of bfloat16, plus the rounding of a sum in float32
    assert ((found.double() - exact).abs() <= half_a_step).all()
    assert (one_by_one.double() - exact).abs().mean() > 2 * (found.double() - exact).abs().mean()


def test_initial_values():
    model = Transformer(replace(config("mixtral-tiny"), router="sigmoid"))
    for layer in model.layers:
        assert isinstance(layer.mlp, MoE)
        assert layer.mlp.router.choice_bias.abs().max() == 0
        assert abs(layer.mlp.experts.up_proj.weight.std().item() - 0.02) < 1e-3
        assert abs(layer.mlp.experts.down_proj.weight.std().item() - 0.01) < 1e-3  # 0.02 / sqrt(2 layers)
    assert len(model.state_dict()) == len([*model.parameters(), *model.buffers()]), "a name too many"
    assert not any(isinstance(m, MoE) for m in Transformer(config("llama-tiny")).modules())
    assert isinstance(make_mlp(replace(SWITCH, shared_experts=1)).shared, nn.Module)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts_per_token": 4}, "a token cannot choose 4 of 3 experts; 1 to 3 would do"),
        ({"experts_per_token": 0}, "a token cannot choose 0 of 3 experts"),
        ({"experts": -1}, "-1 experts, 0 shared ones: give at least 0"),
        ({"capacity_factor": 0.0}, "capacity factor 0: give one above 0, such as 1.25"),
    ],
)
def test_bad_shapes_get_one_line(change, message):
    with pytest.raises(UsageError, match=message):
        replace(SWITCH, **change)
