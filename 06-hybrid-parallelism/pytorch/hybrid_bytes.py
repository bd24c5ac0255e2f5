"""Bytes that a rank sends in a step, by formula, for each group in which it talks: what --explain prints beforehand.

    tp          regions: 8 (n-1)/n |x| a layer, embedding and head 2 each; 3 numbers a token for the loss
    sp          attention, as chapter 04 has it for each kind
    ep          rows to experts and back, forward and backward: 2 (s + r) D; 8 bytes for each expert elsewhere
    pp          |x| for every border between two ranks; the loss; a tied head's gradient
    dp, with all axes that a parameter's gradient is summed over: 2 (n-1)/n of the gradients; ZeRO as in chapter 01
    world       the squares of the gradients' norm where they are clipped, and what travels with them, 8 bytes each

|x| is a micro-batch as this rank sees it between layers: its samples, its tokens, D numbers each. How many rows go to
other ranks' experts is known when the router has spoken; before, an even load is assumed. Products in 16 bits halve
what tp, sp and ep send; the formulas are for full precision, and for layers without dropout where they are computed
twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import cast

import torch
from hybrid_model import Hybrid, plain_layers
from pp_stages import Stage
from sp_ulysses import copies
from tp_megatron import SharedRows

from common.comm import Group, padded, sizes_of
from common.models.moe import MoE
from common.models.transformer import Layer
from common.placement import gradient_axes

Bytes = dict[str, Fraction]  # by the name of the group


def of_sum(group: Group, sent: int) -> Fraction:
    """An all-reduce of `sent` bytes."""
    return Fraction(2 * (group.size - 1) * sent, group.size)


class StepBytes:
    """The formula for one rank: `samples` in each of its micro-batches, `sequence` tokens a sample."""

    def __init__(self, hybrid: Hybrid, samples: Sequence[int], sequence: int, clip: int = 0) -> None:
        self.hybrid, self.samples, self.clip = hybrid, samples, clip
        self.gathers = True  # a first step with ZeRO 1 or 2 finds the weights whole
        self.size = next(hybrid.parameters()).element_size()
        self.mesh, self.layout, self.config = hybrid.mesh, hybrid.layout, hybrid.config
        self.tokens = sequence // self.mesh.shape["sp"]  # of a sample, on this rank
        self.times = (
            3 if self.layout.checkpointing else 2
        )  # passes that attention's messages are in: F, B, F again

    def all(self) -> Bytes:
        """By the name of the group; without those in which nothing is said."""
        total: Bytes = defaultdict(Fraction)
        for part in (self.tensor, self.attention, self.experts, self.stages, self.gradients, self.shared):
            for name, sent in part().items():
                total[name] += sent
        return {name: sent for name, sent in total.items() if sent}

    def layers(self) -> list[Layer]:
        """Those of this rank."""
        return [cast(Layer, layer) for stage in self.hybrid.stages for layer in plain_layers(stage.layers)]

    def between(self, stages: Sequence[Stage]) -> int:
        """How many of embedding and head these stages have."""
        return sum(stage.first + stage.last for stage in stages)

    def tensor(self) -> Bytes:
        """Regions, the two ends, the loss, and the gradients of key and value weights that ranks share."""
        group, D = self.mesh.group("tp"), self.config.width
        if group.size == 1:
            return {}
        sequence_parallel, batch = self.layout.sequence_parallel, sum(self.samples)
        length = padded(self.tokens, group.size) if sequence_parallel else self.tokens
        again = (3 if sequence_parallel else 2) if self.layout.checkpointing else 0
        halves = (8 + again) * len(self.layers()) + 2 * self.between(self.hybrid.stages)
        sent = Fraction((group.size - 1) * halves * batch * length * D * self.size, group.size)
        if any(stage.last for stage in self.hybrid.stages):
            sent += of_sum(group, 3 * batch * self.tokens * self.size)
        for layer in self.layers():
            for linear in (layer.attention.k_proj, layer.attention.v_proj):
                if isinstance(linear, SharedRows):
                    numbers = sum(p.numel() for p in linear.parameters())
                    sent += of_sum(group, len(self.samples) * numbers * self.size)
        return {group.axis: sent}

    def attention(self) -> Bytes:
        """Keys and values round a ring or gathered; or everything from tokens to heads and back."""
        group, K = self.mesh.group("sp"), self.config.head_width
        n, sent = group.size, Fraction(0)
        for layer in self.layers() if n > 1 else ():
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
        """Rows to experts and their results back: as many as the last step sent, or an even load."""
        group, c = self.mesh.group("ep"), self.config
        if not self.hybrid.exchanges or group.size == 1:
            return {}
        mixtures = sum(isinstance(layer.mlp, MoE) for layer in self.layers())
        counts = 8 * (c.experts - sizes_of(c.experts, group.size)[group.rank])
        calls = len(self.samples) * mixtures * (2 if self.layout.checkpointing else 1)
        return {group.axis: calls * counts + self.times * self.rows() * c.width * self.size}

    def rows(self) -> Fraction:
        """Rows that this rank sends to other ranks' experts, and receives for its own, in all layers of a step."""
        calls = len(self.samples) * (2 if self.layout.checkpointing else 1)
        said = [e for e in self.hybrid.exchanges if e.rows_sent]
        if said:
            moved = sum(sum(e.rows_sent[-calls:]) + sum(e.rows_received[-calls:]) for e in said)
            return Fraction(moved * len(self.samples), calls)
        n, c = self.mesh.shape["ep"], self.config
        mixtures = sum(isinstance(layer.mlp, MoE) for layer in self.layers())
        tokens = sum(self.samples) * self.tokens
        return Fraction(2 * mixtures * c.experts_per_token * tokens * (n - 1), n)

    def stages(self) -> Bytes:
        """Activations to the next stage and gradients to the one before, the loss, a tied head."""
        group, owner = self.mesh.group("pp"), self.hybrid.pipe.schedule.owner
        if group.size == 1:
            return {}
        sides = sum(
            owner[other] != group.rank
            for stage in self.hybrid.stages
            for other in (stage.number - 1, stage.number + 1)
            if 0 <= other < len(owner)
        )
        parts = [torch.empty(batch, self.tokens, device="meta") for batch in self.samples]
        numbers = sum(math.prod(self.hybrid.pipe.executor.shape(part)) for part in parts)
        sent = of_sum(group, self.size) + sides * numbers * self.size
        for p in self.hybrid.parameters():
            if hasattr(p, "tied"):
                sent += of_sum(p.tied, p.numel() * self.size)
        return {group.axis: sent}

    def gradients(self) -> Bytes:
        """Sums over the axes of the rule, and what ZeRO moves along dp."""
        sent: Bytes = defaultdict(Fraction)
        for p in self.hybrid.parameters():
            group = self.mesh.group(*gradient_axes(p))
            sent[group.axis] += of_sum(group, p.numel() * self.size)
        if zero := self.hybrid.zero:
            group, M = self.mesh.group("dp"), len(self.samples)
            whole = [group.size * unit.share for unit in zero.units]
            outside = sum(
                w for w, unit in zip(whole, zero.units, strict=True) if not self.in_layer(unit.parameters)
            )
            reduced = sum(whole) * (M if zero.stage > 1 else 1)
            gathered = M * (2 * sum(whole) - outside) if zero.stage == 3 else sum(whole) * self.gathers
            sent[group.axis] += Fraction((group.size - 1) * (reduced + gathered) * self.size, group.size)
            sent[group.axis] += of_sum(group, len(zero.names) * self.size)
        return sent

    def in_layer(self, parameters: Mapping[str, object]) -> bool:
        """Does a unit of ZeRO hold a layer, whose weights go after each use?"""
        return next(iter(parameters)).startswith("layers.")

    def shared(self) -> Bytes:
        """The number of targets (8 bytes) and the loss; the norm where gradients are clipped."""
        tokens, world = self.hybrid.tokens, self.mesh.group("pp", "dp", "ep", "sp", "tp")
        return {tokens.axis: of_sum(tokens, 8 + self.size), world.axis: of_sum(world, 8 * self.clip)}
