"""The operations of a Transformer on one rank: products, memory traffic and collectives, from shapes alone.

    layer(config, plan, code, sequence)     -> the operations of a layer's forward pass for one micro-batch

Each operation knows its backward pass: a product y = x w^T becomes two of the same size, dx = dy w and dw = dy^T x; an
operation that moves memory moves `back` times as much; a collective becomes its adjoint, which sends as many bytes.

    B samples  S sequence  s tokens of a sample here  D width  H heads  G key-value heads  K width of a head
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from common.models.configs import TransformerConfig

from plan_layout import Code, Plan
from plan_machine import SIZES, Links, Machine, Ring
from plan_models import head_widths, projections


@dataclass(frozen=True)
class Product:
    """`count` products [rows, inner] x [inner, columns]; weights: the second matrix is a parameter."""

    rows: float
    columns: float
    inner: float
    count: float = 1
    weights: bool = True

    @property
    def flops(self) -> float:
        """Operations of the forward pass."""
        return 2 * self.rows * self.columns * self.inner * self.count


@dataclass(frozen=True)
class Traffic:
    """Bytes that an operation reads and writes; its backward pass moves `back` times as many."""

    nbytes: float
    back: float = 1.0
    launches: int = 1


@dataclass(frozen=True)
class Collective:
    """A collective of one axis, of so many bytes: of the whole tensor, or, all to all, of what a rank sends."""

    kind: Literal["all_reduce", "gather", "all_to_all", "ring"]
    axis: Literal["tp", "sp", "ep"]
    nbytes: float


Operation = Product | Traffic | Collective


def layer(c: TransformerConfig, plan: Plan, code: Code, sequence: int) -> list[Operation]:
    """Return a layer's operations, forward."""
    return [*attention(c, plan, code, sequence), *(experts if c.experts else mlp)(c, plan, code, sequence)]


def attention(c: TransformerConfig, plan: Plan, code: Code, S: int) -> list[Operation]:
    """Return the operations of the norm, the attention and the residual sum."""
    e, tp, sp = SIZES[code.dtype], plan.tp, plan.sp
    B, s, D, H = plan.micro_batch, S / sp, c.width, c.heads / tp
    K, V = head_widths(c)
    G = max(1.0, c.kv_heads / tp)
    tokens, between = B * s, B * s / (tp if plan.sequence_parallel else 1)
    out: list[Operation] = [Traffic(2 * between * D * e, 1.5), *_into_region(plan, tokens * D * e)]
    out += [Product(tokens, w.columns / (tp if w.split else 1), w.inner) for w in projections(c)]
    out.append(Traffic(2 * tokens * (H * K + G * (K + V)) * e))
    if sp > 1:
        out.append(Collective("ring", "sp", tokens * G * (K + V) * e))
    scores = [Product(s, S, K, B * H, False), Product(s, V, S, B * H, False)]
    if code.fused_attention:
        out += scores
    else:  # softmax with the mask; dropout of the weights with its own mask; the heads' results side by side
        table = B * H * s * S
        soft, dropped = Traffic(2 * table * e, 1.5), Traffic(2 * table * e + table)
        out += [scores[0], soft, dropped, scores[1], Traffic(2 * tokens * H * V * e)]
    out += [Product(tokens, D, H * V), *_out_of_region(plan, tokens * D * e), Traffic(3.5 * between * D * e)]
    return out


def mlp(c: TransformerConfig, plan: Plan, code: Code, S: int) -> list[Operation]:
    """Return the operations of the norm, a dense MLP and the residual sum."""
    e, D = SIZES[code.dtype], c.width
    tokens = plan.micro_batch * S / plan.sp
    between = tokens / (plan.tp if plan.sequence_parallel else 1)
    return [
        Traffic(2 * between * D * e, 1.5),
        *_into_region(plan, tokens * D * e),
        *_matrices(c, tokens, c.mlp_width / plan.tp, e),
        *_out_of_region(plan, tokens * D * e),
        Traffic(3.5 * between * D * e),
    ]


def experts(c: TransformerConfig, plan: Plan, code: Code, S: int) -> list[Operation]:
    """Return the operations of the norm, the router, the experts with their exchange, and the residual sum.

    The load is even: each rank's experts process as many rows as its tokens have choices.
    """
    e, D, tp = SIZES[code.dtype], c.width, plan.tp
    ways, etp = plan.expert_ranks
    tokens = plan.micro_batch * S / plan.sp
    mine = tokens / (tp if plan.sequence_parallel else 1)  # tokens that this rank routes
    copies = c.experts_per_token * (c.capacity_factor or 1.0)
    rows = mine * copies * (etp if plan.sequence_parallel else 1)  # that its experts process
    local = max(1.0, c.experts / ways)
    out: list[Operation] = [Traffic(2 * mine * D * e, 1.5), Product(mine, c.experts, D)]
    out += [Traffic(2 * mine * copies * D * e), Collective("all_to_all", "ep", mine * copies * D * e)]
    gather = [Collective("gather", "tp", rows * D * e)] if etp > 1 else []
    if not plan.sequence_parallel:
        gather = []
    out += [*gather, *_matrices(c, rows / local, c.mlp_width / etp, e, local), *gather]
    if not plan.sequence_parallel and etp > 1:
        out.append(Collective("all_reduce", "tp", tokens * D * e))
    out += [Collective("all_to_all", "ep", mine * copies * D * e), Traffic(2 * mine * copies * D * e)]
    if c.shared_experts:
        out += _matrices(c, tokens, c.shared_experts * c.mlp_width / tp, e)
    return [*out, Traffic(3.5 * mine * D * e)]


def _matrices(c: TransformerConfig, rows: float, width: float, e: int, count: float = 1) -> list[Operation]:
    """Return `count` MLPs, each of `rows` rows and `width` inner numbers."""
    up = 2 if c.mlp == "swiglu" else 1
    return [
        Product(rows, up * width, c.width, count),
        Traffic((up + 1) * rows * width * count * e, 1.5),
        Product(rows, c.width, width, count),
    ]


def _into_region(plan: Plan, nbytes: float) -> list[Operation]:
    """Return the collectives before a region of tp: an all-gather, if tokens are split between regions."""
    return [Collective("gather", "tp", nbytes)] if plan.tp > 1 and plan.sequence_parallel else []


def _out_of_region(plan: Plan, nbytes: float) -> list[Operation]:
    if plan.tp == 1:
        return []
    return [Collective("gather" if plan.sequence_parallel else "all_reduce", "tp", nbytes)]


def embedding(c: TransformerConfig, plan: Plan, code: Code, S: int) -> list[Operation]:
    """Return the operations before the first layer."""
    e, tokens = SIZES[code.dtype], plan.micro_batch * S / plan.sp
    between = tokens / (plan.tp if plan.sequence_parallel else 1)
    norm = [Traffic(2 * between * c.width * e, 1.5)] if c.post_norm else []
    return [Traffic(4 * tokens * c.width * e), *_out_of_region(plan, tokens * c.width * e), *norm]


def head(c: TransformerConfig, plan: Plan, code: Code, S: int) -> list[Operation]:
    """Return the operations behind the last layer: norm, logits, and a loss whose numbers have 32 bits."""
    e, tokens, V = SIZES[code.dtype], plan.micro_batch * S / plan.sp, c.vocabulary / plan.tp
    between = tokens / (plan.tp if plan.sequence_parallel else 1)
    dense: list[Operation] = []
    if c.masked_head:
        dense = [Product(between, c.width, c.width), Traffic(2 * between * c.width * e, 1.5)]
    return [
        *dense,
        Traffic(2 * tokens * c.width * e, 1.5),
        *_into_region(plan, tokens * c.width * e),
        Product(tokens, V, c.width),
        Traffic(tokens * V * (e + 18), 0.6, launches=6),
    ]


@dataclass(frozen=True)
class Seconds:
    """Time of a pass: of the device by kind of operation, and of the host."""

    products: float = 0.0
    traffic: float = 0.0
    tp: float = 0.0
    sp: float = 0.0
    ep: float = 0.0
    host: float = 0.0

    @property
    def device(self) -> float:
        return self.products + self.traffic + self.tp + self.sp + self.ep

    @property
    def total(self) -> float:
        """Seconds of the pass: the device works through what the host gives it, or waits for the host."""
        return max(self.device, self.host)


def seconds(
    work: Iterable[Operation], machine: Machine, plan: Plan, code: Code, backward: bool = False
) -> Seconds:
    """Return the time of operations, forward or backward."""
    t = dict(products=0.0, traffic=0.0, tp=0.0, sp=0.0, ep=0.0, host=0.0)
    kernels = 0.0  # of attention, behind which a ring hides
    e = SIZES[code.dtype]
    for w in work:
        if isinstance(w, Product):
            m, n, k = w.rows, w.columns, w.inner
            product = partial(
                machine.product,
                dtype=code.dtype,
                count=w.count,
                attention=code.fused_attention and not w.weights,
            )
            took = product(m, n, k)
            t["host"] += machine.launch
            if backward:
                took = product(m, k, n) + product(k, n, m)
                t["host"] += machine.launch
                if w.weights and not code.adds_weight_gradients:
                    t["traffic"] += machine.moved(3 * e * n * k * w.count)
                    t["host"] += machine.launch
            t["products"] += took
            kernels += 0 if w.weights else took
        elif isinstance(w, Traffic):
            t["traffic"] += machine.moved(w.nbytes * (w.back if backward else 1))
            t["host"] += machine.launch * w.launches
        elif w.kind == "ring":
            ring = ring_of(plan, w.axis, machine.links)
            far = ring.inside < ring.size
            times = 2 if backward else 1
            t["sp"] += times * (ring.size - 1) * machine.links.send(w.nbytes, far)
        else:
            call = getattr(machine.links, w.kind)
            t[w.axis] += call(w.nbytes, ring_of(plan, w.axis, machine.links))
            t["host"] += machine.launch_collective
    t["sp"] = max(0.0, t["sp"] - (kernels if machine.overlaps else 0.0))
    return Seconds(**t)


def ring_of(plan: Plan, axis: str, links: Links) -> Ring:
    """Return the ranks along an axis, and how many of them share a host."""
    size, stride = getattr(plan, axis), plan.stride(axis)
    if axis == "ep" and plan.folded > 1:
        size, stride = plan.folded, 1
    return Ring(size, max(1, min(size, links.ranks_per_host // stride)))
