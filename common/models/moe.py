"""A mixture of experts: for each token a router chooses k of E MLPs and weighs their outputs.

    y_t = sum over the k chosen experts e of  w_te expert_e(x_t)  +  shared(x_t)

    x_TD      router      rows sorted by expert      experts         back in place, weighted and summed
    t0  --->  e1 e2       e0: t1 t2                  e0(t1 t2)       y0 = w e1(t0) + w' e2(t0)
    t1  --->  e0 e2       e1: t0               --->  e1(t0)    --->  y1 = w e0(t1) + w' e2(t1)
    t2  --->  e2 e0       e2: t0 t1 t2               e2(t0 t1 t2)    y2 = w e2(t2) + w' e0(t2)

    router         scores s = f(W x)    chooses             weights
    softmax        softmax              k largest s         s                 Switch (arXiv:2101.03961, eq. 2)
    renormalised   softmax              k largest s         s / sum of the k  Mixtral (arXiv:2401.04088, section 2.1)
    sigmoid        sigmoid              k largest s + b     s / sum of the k  DeepSeek-V3 (arXiv:2412.19437, eq. 12-16)

Every choice is a function of its token alone, so it is the same whatever batch the token is in. With a
capacity factor c an expert takes C = ceil(c k S / E) tokens of each sequence, in the order of their
positions; later choices are dropped: they add nothing, and x + mlp(x) is x for a token whose choices are all
dropped. A sequence is the "group" of GShard (arXiv:2006.16668, section 3.2), so the split of the batch does
not change the dropped choices.

A strategy replaces `MoE.compute`, the map from sorted rows to sorted rows, which gets the counts and no
router.

    B batch  S sequence  T = B S tokens  D width  F width of an expert  E experts  K chosen  R rows, C capacity
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.models.configs import TransformerConfig

Compute = Callable[[Tensor, Tensor], Tensor]  # rows_RD sorted by expert, counts_E -> rows_RD


@dataclass(frozen=True)
class Routing:
    """The router's result for each token."""

    logits_BSE: Tensor
    scores_BSE: Tensor
    experts_BSK: Tensor
    weights_BSK: Tensor


class Router(nn.Module):
    """Router: scores, choices and weights, in float32 at least, since rounding could change a choice."""

    choice_bias: Tensor | None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))
        self.kind, self.k = config.router, config.experts_per_token
        # added to the scores only for the choice; it has no gradient
        self.register_buffer("choice_bias", torch.zeros(config.experts) if self.kind == "sigmoid" else None)

    def forward(self, x_BSD: Tensor) -> Routing:
        """Route every token."""
        precise = torch.promote_types(x_BSD.dtype, torch.float32)
        with torch.autocast(x_BSD.device.type, enabled=False):
            logits_BSE = F.linear(x_BSD.to(precise), self.weight.to(precise))
        scores_BSE = logits_BSE.sigmoid() if self.kind == "sigmoid" else logits_BSE.softmax(-1)
        wanted_BSE = scores_BSE if self.choice_bias is None else scores_BSE + self.choice_bias
        experts_BSK = wanted_BSE.topk(self.k, -1).indices
        weights_BSK = scores_BSE.gather(-1, experts_BSK)
        if self.kind != "softmax":
            weights_BSK = weights_BSK / weights_BSK.sum(-1, keepdim=True)
        return Routing(logits_BSE, scores_BSE, experts_BSK, weights_BSK)


class Linears(nn.Module):
    """One linear map per expert: weight_EOI, bias_EO."""

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts, outputs)) if bias else None
        self.bias_share = 1.0  # below 1 if a strategy sums the outputs of several ranks

    def maps(self) -> list[Callable[[Tensor], Tensor]]:
        """Return each expert's map.

        unbind stacks the E gradients in one backward; indexing weight[e] would make E gradients as large as
        the whole.
        """
        weights = self.weight.unbind()
        biases = [None] * len(weights) if self.bias is None else (self.bias * self.bias_share).unbind()
        return [partial(F.linear, weight=w, bias=b) for w, b in zip(weights, biases, strict=True)]


class Experts(nn.Module):
    """E MLPs with the weights stacked on dimension 0; each processes its own rows."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        E, outer, inner, bias = config.experts, config.width, config.mlp_width, config.bias
        self.gelu = config.gelu
        self.gate_proj = Linears(E, outer, inner, bias) if config.mlp == "swiglu" else None
        self.up_proj = Linears(E, outer, inner, bias)
        self.down_proj = Linears(E, inner, outer, bias)

    def forward(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Apply the experts to rows_RD sorted by expert, counts_E rows for each; return rows_RD."""
        pieces = zip(
            rows_RD.split(counts_E.tolist()), self.up_proj.maps(), self.down_proj.maps(), strict=True
        )
        if self.gate_proj is None:
            return torch.cat([down(F.gelu(up(x), approximate=self.gelu)) for x, up, down in pieces])
        gates = self.gate_proj.maps()
        return torch.cat(
            [down(F.silu(gate(x)) * up(x)) for gate, (x, up, down) in zip(gates, pieces, strict=True)]
        )


@dataclass(frozen=True)
class Plan:
    """Positions of the tokens' choices among the rows, which are sorted by expert."""

    counts_E: Tensor
    token_R: Tensor
    """Token in each row; T for an empty row."""
    row_TK: Tensor
    """Row of each choice; R if it was dropped."""
    full: bool
    """True if no row is empty and no choice is dropped."""


def plan_all(experts_BSK: Tensor, E: int) -> Plan:
    """Give every choice a row: a permutation of the T K choices."""
    K, chosen_N = experts_BSK.shape[-1], experts_BSK.flatten()
    order_N = chosen_N.argsort(stable=True)
    row_N = torch.empty_like(order_N)
    row_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return Plan(torch.bincount(chosen_N, minlength=E), order_N // K, row_N.view(-1, K), full=True)


def plan_capacity(experts_BSK: Tensor, E: int, capacity_factor: float) -> Plan:
    """Give every expert and sequence C rows; some rows stay empty, and some choices are dropped."""
    B, S, K = experts_BSK.shape
    C = math.ceil(capacity_factor * K * S / E)
    chosen_BN = experts_BSK.flatten(1)
    queue_BN = F.one_hot(chosen_BN, E).cumsum(1).gather(2, chosen_BN[..., None])[..., 0] - 1
    kept_BN = queue_BN < C
    sequence_B1 = torch.arange(B, device=chosen_BN.device)[:, None]
    row_BN = torch.where(kept_BN, (chosen_BN * B + sequence_B1) * C + queue_BN, E * B * C)
    token_R = row_BN.new_full((E * B * C + 1,), B * S)
    token_R[row_BN.flatten()] = torch.arange(B * S, device=row_BN.device).repeat_interleave(K)
    return Plan(row_BN.new_full((E,), B * C), token_R[:-1], row_BN.view(-1, K), full=False)


def pick(x_ND: Tensor, index: Tensor, full: bool) -> Tensor:
    """Return rows of x by number; number N is a row of zeros, which exists unless `full`."""
    x_ND = x_ND if full else torch.cat([x_ND, x_ND.new_zeros(1, x_ND.shape[1])])
    return x_ND.index_select(0, index.flatten()).view(*index.shape, -1)


def combine(y_TKD: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the weighted sum over a token's choices, in the weights' precision, rounded once to y's type."""
    total_TD = (y_TKD.to(weights_TK.dtype) * weights_TK[..., None]).sum(1)
    return total_TD.to(y_TKD.dtype)


class MoE(nn.Module):
    """Mixture of experts in place of an MLP: x_BSD -> [B, S, D]."""

    def __init__(self, config: TransformerConfig, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.capacity_factor = config.capacity_factor
        self.router, self.experts, self.shared = Router(config), Experts(config), shared
        self.compute: Compute = self.experts.forward  # the module itself would be a child under two names
        self.observe: Callable[[Routing], object] = lambda routing: None  # for losses and load statistics

    def plan(self, experts_BSK: Tensor) -> Plan:
        """Return the rows of the choices, with or without a capacity."""
        E = len(self.router.weight)
        if self.capacity_factor is None:
            return plan_all(experts_BSK, E)
        return plan_capacity(experts_BSK, E, self.capacity_factor)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Route, sort, compute, put back, combine."""
        routing: Routing = self.router(x_BSD)
        self.observe(routing)
        plan = self.plan(routing.experts_BSK)
        rows_RD = pick(x_BSD.flatten(0, 1), plan.token_R, plan.full)
        y_TKD = pick(self.compute(rows_RD, plan.counts_E), plan.row_TK, plan.full)
        y_BSD = combine(y_TKD, routing.weights_BSK.flatten(0, 1)).view_as(x_BSD)
        return y_BSD if self.shared is None else y_BSD + self.shared(x_BSD)

    def active_weights(self) -> int:
        """Return the number of matrix weights that one token uses: the router's and those of its experts."""
        matrices = (m.weight for m in self.experts.modules() if isinstance(m, Linears))
        return self.router.weight.numel() + sum(self.router.k * w[0].numel() for w in matrices)
