"""What calibrate.py times on one rank, what the planner counts for it, and the rates that fit the times best.

    made = cases(384, 2048, code, device)       -> products, attention, models of one layer, AdamW
    fit(features, seconds, peak, bandwidth)     -> Rates, and the seconds that they give

The planner predicts each time as FLOP and bytes divided by rates, and a start for each product. It is linear in the
inverse rates and in the start, so these follow from measured times by linear least squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import lsq_linear
from torch import nn

from common.models.configs import TransformerConfig, gpt2, llama
from common.models.transformer import Transformer, cross_entropy_sum

from plan_layout import Code, Plan
from plan_machine import Links, Machine
from plan_time import OPTIMIZER_BYTES
from plan_work import Operation, Product, Traffic, embedding, head, layer, seconds

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A call to time, and the operations that the planner counts for it."""

    name: str
    call: Call
    work: Sequence[Operation]
    passes: tuple[bool, ...]
    """Passes that `call` makes; True is a backward pass."""


def product_case(rows: int, columns: int, inner: int, like: Mapping[str, object]) -> Case:
    """Return a product [rows, inner] x [inner, columns]."""
    x, weight = (torch.randn(n, inner, **like) for n in (rows, columns))  # type: ignore[call-overload]
    call = partial(F.linear, x, weight)
    return Case(f"product {rows} x {inner} x {columns}", call, [Product(rows, columns, inner)], (False,))


def attention_case(samples: int, S: int, heads: int, K: int, like: Mapping[str, object]) -> Case:
    """Return causal attention, forward and backward."""
    q, k, v, dy = (torch.randn(samples, heads, S, K, **like) for _ in range(4))  # type: ignore[call-overload]
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def call() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), inputs, dy)

    count = samples * heads
    work = [Product(S, S, K, count, weights=False), Product(S, K, S, count, weights=False)]
    return Case(f"attention of {samples} x {S} tokens", call, work, (False, True))


def model_case(
    name: str, c: TransformerConfig, samples: int, S: int, like: Mapping[str, object], code: Code
) -> Case:
    """Return a step of a model of one layer, without the optimizer."""
    with torch.device("meta"):
        model = Transformer(c)
    model.to(like["dtype"]).to_empty(device=like["device"])  # type: ignore[call-overload]
    parameters = list(model.parameters())
    for p in parameters:
        nn.init.normal_(
            p, std=0.02
        )  # the values do not matter, but drawing ours takes minutes for wide models
    tokens_BS = torch.randint(c.vocabulary, (samples, S), device=parameters[0].device)

    def call() -> None:
        loss, _ = cross_entropy_sum(model(tokens_BS).flatten(0, 1), tokens_BS.flatten())
        torch.autograd.grad(loss, parameters)

    plan = Plan(micro_batch=samples)
    work = [part for make in (embedding, layer, head) for part in make(c, plan, code, S)]
    return Case(f"{name} of one layer, {samples} x {S} tokens", call, work, (False, True))


def optimizer_case(c: TransformerConfig, device: torch.device) -> Case:
    """Return a step of AdamW on four matrices of an MLP, in float32 as the trainer keeps them."""
    matrices = [nn.Parameter(torch.randn(c.mlp_width, c.width, device=device)) for _ in range(4)]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    parameters = sum(matrix.numel() for matrix in matrices)
    work = [Traffic(OPTIMIZER_BYTES * parameters, launches=0)]
    return Case(f"AdamW on {parameters:,} parameters", torch.optim.AdamW(matrices).step, work, (False,))


def cases(width: int, tokens: int, code: Code, device: torch.device) -> list[Case]:
    """Return what rank 0 times alone: for models of that width, a multiple of 64, with at most so many tokens."""
    D, T = width, tokens
    like = {"device": device, "dtype": getattr(torch, code.dtype)}
    ours = llama(1, D, D // 64, D // 64, D * 8 // 3 // 64 * 64, 256)  # rows of whole vector registers
    wide = gpt2(1, D, D // 64, sequence=256, vocabulary=8192)
    inner = ours.mlp_width
    shapes = [(rows, n, k) for rows in (T // 8, T) for n, k in ((D, D), (D // 2, D), (inner, D), (D, inner))]
    made = [product_case(*shape, like) for shape in [*shapes, (inner, D, T)]]
    made += [attention_case(T // S, S, D // 64, 64, like) for S in (128, 256)]
    made += [
        model_case(name, c, samples, S, like, code)
        for name, c in (("llama", ours), ("gpt2", wide))
        for samples, S in ((T // 256, 256), (T // 256, 128))
    ]
    return [*made, optimizer_case(ours, device)]


def features(case: Case, code: Code) -> list[float]:
    """Return what the planner counts: FLOP of weight products, FLOP of attention, bytes moved, number of products.

    Its time is linear in the inverse rates, so each is its time on a machine where only that rate is finite.
    """
    nothing = Links(1, {2: (0.0, math.inf)}, math.inf, 1.0, 0.0)
    free = Machine("free", 0, math.inf, {code.dtype: 1.0}, math.inf, 1.0, 0, 0, 0, 0, nothing, 0, math.inf)
    machines = (
        replace(free, sustained_products=1.0),
        replace(free, sustained_attention=1.0),
        replace(free, bandwidth=1.0),
        replace(free, start=1.0),
    )
    return [
        sum(seconds(case.work, machine, Plan(), code, backward).total for backward in case.passes)
        for machine in machines
    ]


@dataclass(frozen=True)
class Rates:
    """Rates of a rank: FLOP/s and B/s at best, the shares that it sustains, seconds that a product takes beyond.

    The shares of products and attention are of `peak`, that of memory is of `bandwidth`.
    """

    peak: float
    bandwidth: float
    products: float
    attention: float
    memory: float
    start: float


def fit(
    table: Sequence[Sequence[float]], took: Sequence[float], peak: float, bandwidth: float
) -> tuple[Rates, list[float]]:
    """Return the rates that predict measured seconds best, by least squares of relative errors; and what they predict.

    table: a row of `features` per case; took: its measured seconds; peak in FLOP/s, bandwidth in B/s.
    """
    relative = np.array(table) / np.array(took)[:, None]
    scale = np.array([1 / peak, 1 / peak, 1 / bandwidth, 1e-5])  # makes the unknowns about 1
    least = np.array([1.0, 0.5, 1.0, 0.0])  # no share above 1; a causal kernel computes half of all scores
    found = lsq_linear(relative * scale, np.ones(len(took)), (least, np.full(4, 1e6))).x
    products, attention, memory = (float(1 / x) for x in found[:3])
    rates = Rates(peak, bandwidth, products, attention, memory, float(found[3] * scale[3]))
    return rates, [float(x) for x in np.array(table) @ (found * scale)]
