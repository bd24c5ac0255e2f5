"""Bytes that a rank sends per step, by formula, for each of its groups: --explain prints them before the run.

    tp          regions: 8 (n-1)/n |x| a layer, embedding and head 2 each; 3 numbers a token for the loss
    sp          attention, as chapter 04 has it for each kind
    ep          rows to experts and back, forward and backward: 2 (s + r) D; 8 bytes for each expert elsewhere
    pp          |x| for every border between two ranks; the loss; a tied head's gradient
    dp, with all axes that a parameter's gradient is summed over: 2 (n-1)/n of the gradients; ZeRO over the same
                axes as in chapter 01
    world       the square of the gradient norm if gradients are clipped, and the flags summed with it, 8 bytes each

|x| is the size of a micro-batch on this rank between layers: its samples, its tokens, D numbers each. The
number of rows that go to other ranks' experts is known after routing; before the first step an even load is
assumed. With products in 16 bits tp, sp and ep send half as much; the formulas hold for full precision and,
with activation checkpointing, for layers without dropout.
"""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from typing import cast

from common.comm import Group, padded, sizes_of
from common.comm.mesh import Mesh
from common.comm.placement import TOKEN_AXES, gradient_axes
from common.data.text import rank_slice
from common.models.transformer import Layer, Transformer

from dp_zero import Zero
from ep_moe import ExpertExchange
from hybrid_layout import HybridOptions
from sp_costs import copies
from tp_megatron import SharedRows

Bytes = dict[str, Fraction]  # group name -> bytes


def of_sum(group: Group, sent: int) -> Fraction:
    """Bytes that each rank of the group sends in an all-reduce of `sent` bytes, on average."""
    return Fraction(2 * (group.size - 1) * sent, group.size)


class StepBytes:
    """Byte formula for one rank, after the calls that split `model`.

    zero: has the parameters that the optimizer updates. clip: number of values in the message of the gradient
    norm; 0 means no clipping. balances: the load of the experts is counted.
    """

    def __init__(
        self,
        model: Transformer,
        zero: Zero,
        mesh: Mesh,
        o: HybridOptions,
        clip: int = 0,
        balances: bool = False,
    ) -> None:
        self.mesh, self.layout, self.config, self.clip = mesh, o, model.config, clip
        self.balances = balances
        self.zero, self.parameters = zero, [p for _, p in zero.named_parameters()]
        self.size = self.parameters[0].element_size()
        places = mesh.group("dp", "ep")
        lo, hi = rank_slice(o.batch, places.rank, places.size)
        self.samples = sizes_of(hi - lo, o.micro_batches)
        self.tokens = o.sequence // mesh.shape["sp"]  # tokens per sample on this rank
        self.times = 3 if self.layout.checkpointing else 2  # passes in which attention sends: F, B, F again
        held = {int(name): cast(Layer, layer) for name, layer in model.layers.named_children()}
        self.layers = list(held.values())
        self.last = self.config.layers - 1 in held
        self.ends = (0 in held) + self.last  # embeddings and heads on this rank
        self.sides = 2 * sum(number - 1 not in held for number in held) - self.ends  # borders to other ranks
        computes = [getattr(layer.mlp, "compute", None) for layer in self.layers]
        self.exchanges = [compute for compute in computes if isinstance(compute, ExpertExchange)]

    def all(self, first: bool = False) -> Bytes:
        """Return the bytes of a step by group name, without the groups in which this rank sends nothing.

        first: of the first step, in which ZeRO 1 and 2 gather no weights.
        """
        total: Bytes = defaultdict(Fraction)
        parts = (self.tensor(), self.attention(), self.experts(), self.stages(), self.gradients(first))
        for part in (*parts, self.shared(), self.loads()):
            for name, sent in part.items():
                total[name] += sent
        return {name: sent for name, sent in total.items() if sent}

    def tensor(self) -> Bytes:
        """Bytes along tp: regions, embedding, head, loss, and gradients of shared key and value weights."""
        group, D = self.mesh.group("tp"), self.config.width
        if group.size == 1:
            return {}
        sequence_parallel, batch = self.layout.sequence_parallel, sum(self.samples)
        length = padded(self.tokens, group.size) if sequence_parallel else self.tokens
        again = (3 if sequence_parallel else 2) if self.layout.checkpointing else 0
        halves = (8 + again) * len(self.layers) + 2 * self.ends
        sent = Fraction((group.size - 1) * halves * batch * length * D * self.size, group.size)
        if self.last:
            sent += of_sum(group, 3 * batch * self.tokens * self.size)
        for layer in self.layers:
            for linear in (layer.attention.k_proj, layer.attention.v_proj):
                if isinstance(linear, SharedRows):
                    numbers = sum(p.numel() for p in linear.parameters())
                    sent += of_sum(group, len(self.samples) * numbers * self.size)
        return {group.axis: sent}

    def attention(self) -> Bytes:
        """Bytes along sp: keys and values, round a ring or gathered; Ulysses: tokens to heads and back."""
        group, K = self.mesh.group("sp"), self.config.head_width
        n, sent = group.size, Fraction(0)
        for layer in self.layers if n > 1 else ():
            keys = layer.attention.k_proj
            k = (len(keys.rows) if isinstance(keys, SharedRows) else keys.weight.shape[0]) // K
            h = layer.attention.q_proj.weight.shape[0] // K
            token = sum(self.samples) * self.tokens * K * self.size
            if self.layout.attention == "ulysses":
                sent += Fraction(self.times * (n - 1) * token * (2 * h + 2 * k * copies(k, n)), n)
            elif self.layout.attention == "allgather":
                sent += self.times * (n - 1) * token * 2 * k
            else:
                sent += (self.times + 1) * (n - 1) * token * 2 * k
        return {group.axis: sent}

    def experts(self) -> Bytes:
        """Bytes along ep: rows to experts and results back, as in the last step, or for an even load."""
        group, c = self.mesh.group("ep"), self.config
        if not self.exchanges:
            return {}
        counts = 8 * (c.experts - sizes_of(c.experts, group.size)[group.rank])
        calls = len(self.samples) * len(self.exchanges) * (2 if self.layout.checkpointing else 1)
        return {group.axis: calls * counts + self.times * self.rows() * c.width * self.size}

    def rows(self) -> Fraction:
        """Number of rows per step that this rank sends to other ranks' experts and receives for its own."""
        calls = len(self.samples) * (2 if self.layout.checkpointing else 1)
        said = [e for e in self.exchanges if e.rows_sent]
        if said:
            moved = sum(sum(e.rows_sent[-calls:]) + sum(e.rows_received[-calls:]) for e in said)
            return Fraction(moved * len(self.samples), calls)
        n, tokens = self.mesh.shape["ep"], sum(self.samples) * self.tokens
        return Fraction(2 * len(self.exchanges) * self.config.experts_per_token * tokens * (n - 1), n)

    def stages(self) -> Bytes:
        """Bytes along pp: activations to the next stage, gradients to the previous, the loss, a tied head."""
        group, tp, D = self.mesh.group("pp"), self.mesh.group("tp"), self.config.width
        if group.size == 1:
            return {}
        length = sizes_of(self.tokens, tp.size)[tp.rank] if self.layout.sequence_parallel else self.tokens
        sent = of_sum(group, self.size) + self.sides * sum(self.samples) * length * D * self.size
        for p in self.parameters:
            if hasattr(p, "tied"):
                sent += of_sum(p.tied, p.numel() * self.size)
        return {group.axis: sent}

    def gradients(self, first: bool) -> Bytes:
        """Bytes of the gradient sums, by the axes of the rule, or of ZeRO's messages along them."""
        sent: Bytes = defaultdict(Fraction)
        for p in self.parameters:
            group = self.mesh.group(*gradient_axes(p))
            sent[group.axis] += of_sum(group, p.numel() * self.size)
        stage, M = self.zero.stage, len(self.samples)
        for unit in self.zero.units if stage else ():
            # in stage 3 a layer's weights are freed after each use, the others after the backward pass
            in_layer = next(iter(unit.parameters)).startswith("layers.")
            gathered = M * (1 + in_layer) if stage == 3 else not first
            times, group = (M if stage > 1 else 1) + gathered, unit.group
            sent[group.axis] += Fraction((group.size - 1) * times * unit.share * self.size)
            sent[group.axis] += of_sum(group, len(unit.parameters) * self.size)  # a flag each
        return sent

    def shared(self) -> Bytes:
        """Bytes of the number of targets (8) and of the loss; of the norm if gradients are clipped."""
        tokens, world = self.mesh.group(*TOKEN_AXES), self.mesh.group("pp", "dp", "ep", "sp", "tp")
        return {tokens.axis: of_sum(tokens, 8 + self.size), world.axis: of_sum(world, 8 * self.clip)}

    def loads(self) -> Bytes:
        """Bytes of the experts' loads: per layer and micro-batch two counts of 8 bytes for each, and some numbers."""
        if not self.balances:
            return {}
        tokens, stages = self.mesh.group(*TOKEN_AXES), self.mesh.group("pp")
        counts = len(self.samples) * len(self.layers) * 2 * self.config.experts
        return {tokens.axis: of_sum(tokens, 8 * (counts + 4)), stages.axis: of_sum(stages, 8 * 3)}
