"""Five strategies on one model: each changes only the parts that its axis splits, so they are separate calls.

    tensor_parallel      matrices and heads over tp       on shapes alone
    sequence_parallel    tokens of a sample over sp
    expert_parallel      whole experts over ep
    Pipeline             layers over pp
    materialise          each rank makes its own shards
    Zero                 dp: weights, gradients, states

A parameter carries its placement on the mesh (common/comm/placement.py), and the work after the backward pass
follows from the placement: the gradient is summed over the axes along which tokens are split and the
parameter is replicated; the parameter counts once in the norm. ZeRO's shards are placed along dp, so the same
rule sums their gradients over the remaining axes.

Every mesh runs as a pipeline. Without pp it has one stage, whose schedule is forward and backward in turn.

    rank = (((p*dp + d)*ep + e)*sp + s)*tp + t             tp communicates most: innermost
    samples over dp and ep, tokens of a sample over sp     the same on all ranks along pp and tp
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from common.comm import sizes_of
from common.comm.mesh import AXES, Mesh
from common.comm.placement import TOKEN_AXES, gradient_axes, gradient_norm, sum_gradients, sum_tied_gradients
from common.lesson.training import Version
from common.models.transformer import Transformer, TransformerConfig

from dp_zero import Zero
from ep_moe import ExpertExchange, expert_parallel
from hybrid_experts import split
from hybrid_initial import Whole, from_seed, materialise
from pp_pipeline import Pipeline
from pp_schedules import make_schedule
from sp_sequence_parallel import ORDERS, Attention, sequence_parallel
from sp_split import longest_sequence, split_sequence
from tp_megatron import Region, tensor_parallel

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"]


@dataclass(frozen=True)
class Layout:
    """Strategy options per axis. The mesh holds the axis sizes."""

    schedule: Schedule = "1f1b"
    micro_batches: int = 2
    """Micro-batches into which a rank splits its samples."""
    chunks: int = 2
    """Stages per rank if the schedule is interleaved."""
    attention: Attention = "zigzag"
    """Algorithm of attention across the ranks along sp."""
    sequence_parallel: bool = False
    """Megatron's sequence parallelism: between the regions each rank along tp holds a slice of the tokens."""
    zero: int = 0
    """Stage of ZeRO along dp: 1 shards optimizer states, 2 also gradients, 3 also weights."""
    checkpointing: bool = False
    """Keep only the input of each layer, and recompute the layer in the backward pass."""
    precision: torch.dtype | None = None
    """Type in which products are computed; None means the type of the weights."""


class Hybrid:
    """A Transformer on a mesh: this rank's part of it, and its training step.

    whole(name, shape): values of the plain model's parameters; default: those of `seed`. Every rank of the
    mesh constructs this object with the same arguments. Raises UsageError if the model does not divide;
    hybrid_check.py checks that beforehand, for all axes.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        layout: Layout,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        whole: Whole | None = None,
    ) -> None:
        self.config, self.mesh, self.layout = config, mesh, layout
        with torch.device("meta"):
            self.model = model = Transformer(config, seed, dtype)
        shape, region, exchanges = mesh.shape, None, []
        if shape["tp"] > 1:
            region = tensor_parallel(model, mesh.group("tp"), layout.sequence_parallel, split)
        if shape["sp"] > 1:
            kernel: Literal["library", "hand"] = "library" if device.type == "cpu" else "hand"
            sequence_parallel(model, mesh.group("sp"), layout.attention, kernel)
        if shape["ep"] > 1 and config.experts:  # without experts ep is one more axis of samples
            exchanges = expert_parallel(model, mesh.group("ep"))
        self.exchanges: list[ExpertExchange] = exchanges
        self._make_groups()
        self.pipe = Pipeline(
            model,
            mesh,
            make_schedule(layout.schedule, shape["pp"], layout.micro_batches, layout.chunks),
            checkpointing=layout.checkpointing,
            shape=partial(between_stages, width=config.width, region=region),
        )
        self.stages = list(self.pipe.stages.values())
        materialise(model, mesh, device, whole or from_seed(model, seed))
        if layout.precision:
            for stage in self.stages:
                stage.forward = torch.autocast(device.type, layout.precision)(stage.forward)  # type: ignore[method-assign]
        self.zero: Zero | None = None
        if layout.zero:
            layers = [layer for stage in self.stages for layer in plain_layers(stage.layers)]
            self.zero = Zero(model, layers, mesh.group("dp"), layout.zero, self.stages)

    def _make_groups(self) -> None:
        """Create all groups, in one order on all ranks, before the ranks keep different parameters."""
        for axis in AXES:
            self.mesh.group(axis)
        self.tokens = self.mesh.group(*TOKEN_AXES)
        self.samples = self.mesh.group("dp", "ep")
        for p in self.model.parameters():
            axes = gradient_axes(p)
            self.mesh.group(*axes)
            self.mesh.group(*(axis for axis in axes if axis != "dp"))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of this rank's optimizer, under the names of the plain model."""
        return (self.zero or self.model).named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the same parameters without names."""
        return (p for _, p in self.named_parameters())

    def split(self, tokens_BS: Tensor, targets_BS: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's tokens of some samples: (tokens_Bs, positions_s, targets_Bs).

        Without sp they are (tokens_BS, targets_BS).
        """
        group = self.mesh.group("sp")
        if group.size == 1:
            return tokens_BS, targets_BS
        order = ORDERS[self.layout.attention]
        return split_sequence(tokens_BS, targets_BS, group, order, longest_sequence(self.config))

    def run(self, parts: list[tuple[Tensor, ...]], scale: float, begin: Callable[[int], None]) -> Tensor:
        """Run forward and backward of all micro-batches.

        Returns the sum of this rank's losses, the same on all ranks along pp and tp.
        """
        for exchange in self.exchanges:
            exchange.forget()
        with self.zero.no_sync() if self.zero and self.zero.stage == 1 else nullcontext():
            return self.pipe.run(parts, scale, begin)

    def finish(self) -> None:
        """Turn every gradient into that of the global batch, after the backward passes.

        A tied head's comes last: its two holders must step with the same bits, and the rounding of a sum over
        many ranks depends on the gradient's position in the message.
        """
        if self.zero:
            self.zero.finish()
        sum_gradients(self.parameters(), self.mesh)
        sum_tied_gradients(self.parameters())

    @torch.no_grad()
    def clip(self, largest: float, also: Tensor | None = None) -> Tensor:
        """Scale the gradients so that their global norm is at most `largest`; return the norm before scaling.

        As torch.nn.utils.clip_grad_norm_ on one device. also: see `gradient_norm`.
        """
        norm = gradient_norm(self.parameters(), self.mesh, also)
        factor = (largest / (norm + 1e-6)).clamp(max=1.0)
        for p in self.parameters() if largest < math.inf else ():
            if p.grad is not None:
                p.grad *= factor.to(p.grad.dtype)
        return norm

    def version(self) -> Version:
        """Return the interface that the training step of common/lesson/training.py drives."""
        return Version(
            self.model, finish=self.finish, owner=self, loss=self.model.loss, split=self.split, run=self.run
        )


def between_stages(tokens_BS: Tensor, width: int, region: Region | None) -> tuple[int, ...]:
    """Return the shape of the activations between stages, [B, s, D]."""
    batch, length = tokens_BS.shape
    if region is not None and region.sequence_parallel:
        length = sizes_of(length, region.group.size)[region.group.rank]
    return batch, length, width


def plain_layers(layers: nn.ModuleList) -> Iterator[nn.Module]:
    """Iterate over the layers of a stage, without their checkpointing wrappers."""
    return (getattr(layer, "layer", layer) for layer in layers)
