"""What the lessons of chapter 06 share: their options, the mesh, the proof against one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from hybrid_check import check
from hybrid_model import Hybrid, Layout, Schedule
from sp_sequence_parallel import Attention
from torch import Tensor, nn

from common.comparison import one_rank
from common.equality import Followed, follow
from common.lesson import DTYPES
from common.mesh import Mesh
from common.runtime import Runtime
from common.training import Batches, TrainingOptions, Version, make_model, training_step


@dataclass
class HybridOptions(TrainingOptions):
    """Mesh, layout, model and batch of the lessons of chapter 06."""

    model: str = "mixtral-tiny"
    """A name of common/models/configs.py."""
    batch: int = 8
    """Samples of the global batch; places along dp and ep take parts that differ by one sample at the most."""
    pp: int = 1
    """Ranks along pp: stages of layers."""
    dp: int | None = None
    """Ranks along dp: replicas of the batch; all ranks that the other axes leave when left out."""
    ep: int = 1
    """Ranks along ep: experts, and one more axis of samples."""
    sp: int = 1
    """Ranks along sp: pieces of the sequence."""
    tp: int = 1
    """Ranks along tp: pieces of each matrix."""
    schedule: Schedule = "1f1b"
    """What the stages do in which order."""
    chunks: int = 2
    """Stages of each rank, where the schedule is interleaved."""
    attention: Attention = "zigzag"
    """How ranks along sp attend to one another's tokens."""
    sequence_parallel: bool = False
    """Megatron's: between the regions of tp each of its ranks has a slice of the tokens."""
    zero: Literal[0, 1, 2, 3] = 0
    """What ranks along dp share out: 1 optimizer states, 2 gradients too, 3 weights too."""
    checkpointing: bool = False
    """Keep the input of each layer alone and compute the layer again for its backward pass."""
    precision: Literal["full", "bfloat16"] = "full"
    """Type in which products are computed; full is that of the weights."""
    clip: float = 0.0
    """Largest norm of the gradient; 0 leaves it as it is."""

    def layout(self) -> Layout:
        """How the axes split."""
        return Layout(
            self.schedule,
            self.micro_batches,
            self.chunks,
            self.attention,
            self.sequence_parallel,
            self.zero,
            self.checkpointing,
            torch.bfloat16 if self.precision == "bfloat16" else None,
        )

    def mesh(self, rt: Runtime) -> Mesh:
        """The mesh of all ranks. Raises UsageError where the axes' product is not their number."""
        others = self.pp * self.ep * self.sp * self.tp
        dp = max(1, rt.world_size // others) if self.dp is None and others > 0 else self.dp or 0
        return Mesh(rt.world, self.pp, dp, self.ep, self.sp, self.tp, rt.timeout)


def make_hybrid(rt: Runtime, o: HybridOptions, mesh: Mesh) -> Hybrid:
    """The model of the options on the mesh. Raises UsageError where it does not fit, on all ranks alike."""
    check(o.model_config(), mesh, o.layout(), o.batch, o.sequence)
    return Hybrid(o.model_config(), mesh, o.layout(), rt.device, DTYPES[o.dtype], o.seed)


Step = Callable[[int], Tensor]


def mesh_step(hybrid: Hybrid, rt: Runtime, o: HybridOptions) -> Step:
    """step(t) on the mesh: synchronised, clipped gradients; returns the loss of the global batch."""
    step = training_step(hybrid.version(), Batches(o, hybrid.samples, rt.device), hybrid.tokens)

    def clipped(t: int) -> Tensor:
        loss = step(t)
        if o.clip:
            hybrid.clip(o.clip)
        return loss

    return clipped


def one_device_step(model: nn.Module, rt: Runtime, o: HybridOptions) -> Step:
    """The same on one device with the plain model, the batch in one piece, with torch's clipping."""
    alone = one_rank(rt)
    if precision := o.layout().precision:
        model.forward = torch.autocast(rt.device.type, precision)(model.forward)
    step = training_step(Version(model), Batches(replace(o, micro_batches=1), alone, rt.device), alone)

    def clipped(t: int) -> Tensor:
        loss = step(t)
        if o.clip:
            nn.utils.clip_grad_norm_(model.parameters(), o.clip)
        return loss

    return clipped


def reference(rt: Runtime, o: HybridOptions, optimizer: str) -> Followed:
    """What one device leaves."""
    model = make_model(o, rt.device)
    return follow(model, optimizer, o.steps, one_device_step(model, rt, o))
