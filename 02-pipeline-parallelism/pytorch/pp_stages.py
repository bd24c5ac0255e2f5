"""A Transformer cut into stages: consecutive layers, the embeddings before the first, the head after the last.

    rank 0 | embed  layers.0  layers.1 |  x_BSD  ->  rank 1 | layers.2  layers.3  norm  head |  loss

A rank keeps the parts of the model that its stages use, under their names in the whole model, and drops the
rest. A tied head is the embedding, used twice: if the first and the last stage are on two ranks, both hold
the embedding, each computes a part of its gradient, and the parts are summed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from common.comm import sizes_of
from common.comm.mesh import Mesh
from common.comm.placement import tie
from common.errors import UsageError
from common.models.configs import CONFIGS
from common.models.transformer import Transformer

# parts of the first stage and of the last; the tokens' embedding may belong to both
EMBEDDINGS = ("embed_tokens", "embed_positions", "embed_types", "embed_norm")
HEAD = ("transform", "norm", "unembed")


class Stage(nn.Module):
    """Part of a Transformer: maps tokens_BS or x_BSD to x_BSD or logits_BSV.

    checkpointing: keep only the input of each layer, and recompute the layer for its backward pass.
    """

    checkpointing = False

    def __init__(self, model: Transformer, layers: range, stages: int, number: int) -> None:
        super().__init__()
        self.number, self.first, self.last = number, number == 0, number == stages - 1
        self.layers = nn.ModuleList(model.layers[i] for i in layers)
        embeddings = [getattr(model, name) for name in EMBEDDINGS] if self.first else []
        head = (
            [*(getattr(model, name) for name in HEAD), model.lm_head or model.embed_tokens]
            if self.last
            else []
        )
        self.beside = nn.ModuleList(module for module in (*embeddings, *head) if module is not None)
        # methods, since the model itself would be a submodule and add all stages
        self.embed, self.head, self.run_layer = model.embed, model.head, model.run_layer

    def forward(self, x: Tensor, positions_S: Tensor | None = None) -> Tensor:
        """Run one micro-batch through these layers. positions_S: default: 0 to S - 1."""
        if positions_S is None:
            positions_S = torch.arange(x.shape[1], device=x.device)
        if self.first:
            x = self.embed(x, positions_S)
        for layer in self.layers:
            x = self.run_layer(layer, x, positions_S)
        return self.head(x) if self.last else x


def cut_model(
    model: Transformer, owner: Sequence[int], mesh: Mesh, cuts: Sequence[range]
) -> dict[int, Stage]:
    """Return this rank's stages, by number. `model` keeps only their parts, under the same names.

    owner: the pp rank of each stage. cuts: the layers of each stage.
    """
    mine = [s for s, rank in enumerate(owner) if rank == mesh.at["pp"]]
    stages = {s: Stage(model, cuts[s], len(owner), s) for s in mine}
    model.add_module("layers", nn.ModuleDict({str(i): model.layers[i] for s in mine for i in cuts[s]}))
    first, last = 0 in stages, len(owner) - 1 in stages
    for name in () if first else EMBEDDINGS[1:]:
        setattr(model, name, None)
    for name in () if last else (*HEAD, "lm_head"):
        setattr(model, name, None)
    if model.config.tied:
        holders = mesh.part("pp", (owner[0], owner[-1]), "tied")
        if holders and holders.size > 1:
            tie(model.embed_tokens.weight, holders)
    if not first and not (last and model.config.tied):
        del model.embed_tokens
    return stages


def evenly(layers: int, stages: int) -> list[range]:
    """Return the layers of each stage, evenly up to one layer. Raises UsageError if a stage gets none."""
    if layers < stages:
        deep = [name for name, c in CONFIGS.items() if c.layers >= stages]
        raise UsageError(
            f"{layers} layers cannot be cut into {stages} stages; at most {layers} stages would do"
            + (f", or a model with more layers: {', '.join(deep)}" if deep else "")
        )
    ends = list(itertools.accumulate(sizes_of(layers, stages), initial=0))
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def measured_costs(
    model: Transformer, tokens_BS: Tensor, targets_BS: Tensor
) -> tuple[list[float], float, float]:
    """Return the seconds, forward and backward, of (each layer, the embeddings, the rest).

    The rest is norm, head and loss.
    """
    positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)

    def seconds(compute: Callable[[Tensor], Tensor], x: Tensor) -> float:
        took = []
        for _ in range(4):
            start = time.perf_counter()
            y = compute(x)
            y.backward(torch.ones_like(y))
            if y.is_cuda:
                torch.cuda.current_stream().synchronize()
            took.append(time.perf_counter() - start)
        return statistics.median(took[1:])

    before = seconds(lambda tokens: model.embed(tokens, positions_S), tokens_BS)
    x_BSD = model.embed(tokens_BS, positions_S).detach().requires_grad_()
    layers = [seconds(partial(layer, positions_S=positions_S), x_BSD) for layer in model.layers]
    after = seconds(lambda x: model.loss(model.head(x), targets_BS)[0], x_BSD)
    model.zero_grad()
    return layers, before, after


def by_cost(layers: Sequence[float], stages: int, before: float = 0, after: float = 0) -> list[range]:
    """Return the layers of each stage, at least one, such that the slowest stage is as fast as possible.

    layers: the cost of each. before, after: additional costs of the first and the last stage: embeddings and
    head.
    """
    L = len(layers)
    evenly(L, stages)
    total = list(itertools.accumulate(layers, initial=0.0))

    def cost(stage: int, a: int, b: int) -> float:
        return total[b] - total[a] + (before if stage == 0 else 0) + (after if stage == stages - 1 else 0)

    # best[b]: (slowest stage, ends) of the first stages with b layers
    best: dict[int, tuple[float, tuple[int, ...]]] = {b: (cost(0, 0, b), (0, b)) for b in range(1, L + 1)}
    for stage in range(1, stages):
        best = {
            b: min(
                (max(slowest, cost(stage, a, b)), (*ends, b)) for a, (slowest, ends) in best.items() if a < b
            )
            for b in range(stage + 1, L + 1)
        }
    return [range(a, b) for a, b in itertools.pairwise(best[L][1])]
