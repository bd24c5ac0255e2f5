"""Models for tests: small Transformers of uneven sizes, two registered by name, and one with branches."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from common.models.configs import CONFIGS, TransformerConfig, bert, gpt2, llama, mixtral
from common.models.transformer import Transformer

SHAPES = {
    "gpt2": gpt2(layers=3, width=24, heads=3, sequence=19, vocabulary=37),
    "gpt2-untied": dataclasses.replace(
        gpt2(layers=2, width=20, heads=2, sequence=13, vocabulary=11), tied=False, mlp_width=33
    ),
    "bert": dataclasses.replace(
        bert(layers=3, width=24, heads=3, sequence=19, vocabulary=37), mlp_width=35, token_types=3
    ),
    "llama": llama(layers=3, width=24, heads=6, kv_heads=2, mlp_width=35, sequence=32, vocabulary=37),
    "llama-one-kv": llama(layers=2, width=18, heads=3, kv_heads=1, mlp_width=29, sequence=32, vocabulary=23),
    "llama-tied": dataclasses.replace(
        llama(layers=2, width=16, heads=2, kv_heads=2, mlp_width=21, sequence=32, vocabulary=23),
        tied=True,
        rotary_base=500.0,
    ),
    "mixtral": mixtral(
        layers=2, width=16, heads=4, kv_heads=2, mlp_width=21, sequence=32, experts=5, vocabulary=37
    ),
}

# For lessons, which take a model by its name; importing this module makes them known, to ranks as well.
CONFIGS["gpt2-nano"] = gpt2(layers=2, width=20, heads=2, sequence=12)
CONFIGS["llama-nano"] = llama(layers=1, width=24, heads=4, kv_heads=2, mlp_width=35, sequence=12)


def ours(c: TransformerConfig) -> Transformer:
    """Return a Transformer with every weight random, so that no error is hidden by a weight of 0 or 1."""
    model = Transformer(c, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    for p in model.parameters():
        p.data += 0.2 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model


def tokens(c: TransformerConfig, batch: int = 3) -> torch.Tensor:
    length = min(c.sequence, 17)
    return torch.randint(c.vocabulary, (batch, length), generator=torch.Generator().manual_seed(6))


class Branches(nn.Module):
    """Model with branches: samples above 0 use `often`, others `rarely`, none `never`; `twice` runs twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.twice = nn.Linear(3, 3, dtype=torch.float64)
        self.often, self.rarely, self.never = (nn.Linear(3, 1, dtype=torch.float64) for _ in range(3))

    def forward(self, x_BI: Tensor) -> Tensor:
        h_BI = self.twice(torch.tanh(self.twice(x_BI)))
        branch = self.often if x_BI.sum() > 0 else self.rarely
        return branch(h_BI).square().sum()


# For Branches, dealt out to 3 ranks in turn.
UNEVEN_SAMPLES = [
    [1.0, -2.0, 3.0, 4.0, 0.5],  # `rarely` on one rank only, whose hooks run in another order
    [-1.0, 1.0, 2.0, 1.5, 2.5],  # on rank 0 in an early micro-batch only: the last one does not see it
    [1.0, 2.0],  # rank 2 of 3 has nothing at all
]
