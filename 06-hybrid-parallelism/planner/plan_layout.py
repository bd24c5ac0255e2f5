"""A plan: the mesh, the micro-batch and the options of each axis; and the code that would run it.

    Plan(pp=4, dp=2, tp=2, micro_batch=1, schedule="1f1b")

The axes are this course's, outermost first: pp dp ep sp tp. Tokens are split over dp, ep and sp; for everything but the
experts ep is one more axis of samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeVar

from common.comm import sizes_of

T = TypeVar("T")

AXES = ("pp", "dp", "ep", "sp", "tp")
Kept = Literal["all", "no scores", "inputs"]


@dataclass(frozen=True)
class Plan:
    """A way to train a model on pp * dp * ep * sp * tp ranks."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    sp: int = 1
    tp: int = 1
    micro_batch: int = 1
    """Samples that a rank processes at once."""
    schedule: str = "1f1b"
    chunks: int = 1
    """Stages of a rank."""
    zero: int = 0
    sequence_parallel: bool = False
    """Megatron's sequence parallelism along tp."""
    kept: Kept = "all"
    """Activations that a forward pass keeps: all; all but the attention's scores, which are computed again; or the
    inputs of layers alone, so that the backward pass begins with a second forward pass."""
    folded: int = 1
    """Ranks that whole experts lie on, across tp, sp and dp: MoE Parallel Folding (arXiv:2504.14960). 1 means that
    experts lie along ep, each split over tp."""

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.ep * self.sp * self.tp

    @property
    def samples(self) -> int:
        """Places that hold different samples."""
        return self.dp * self.ep

    @property
    def expert_ranks(self) -> tuple[int, int]:
        """Ranks that the experts are distributed over, and ranks that each of them is split over."""
        return (self.folded, 1) if self.folded > 1 else (self.ep, self.tp)

    @property
    def holders(self) -> tuple[int, int]:
        """Ranks that hold the same parameters: dense ones, and those of experts."""
        ways, parts = self.expert_ranks
        return self.dp * self.ep * self.sp, self.ranks // (self.pp * ways * parts)

    def micro_batches(self, batch: int) -> int:
        """Return the number of micro-batches of a step."""
        return batch // (self.samples * self.micro_batch)

    def stride(self, axis: str) -> int:
        """Return the distance of neighbours along an axis: the product of the axes inside it."""
        product = 1
        for inner in AXES[AXES.index(axis) + 1 :]:
            product *= getattr(self, inner)
        return product

    def words(self) -> Iterator[str]:
        """Yield what differs from one rank, for a line of text."""
        default = Plan()
        for f in fields(self):
            value = getattr(self, f.name)
            if value != getattr(default, f.name) and f.name != "chunks":
                yield f.name.replace("_", "-") if value is True else f"{f.name.replace('_', '-')}={value}"
        if self.chunks > 1 and self.schedule == "interleaved":
            yield f"chunks={self.chunks}"

    def __str__(self) -> str:
        return " ".join(self.words()) or "one rank"


def split(layers: Sequence[T], stages: int) -> list[Sequence[T]]:
    """Return the layers of each stage, in equal parts up to one layer, the larger ones first."""
    ends = [0, *itertools.accumulate(sizes_of(len(layers), stages))]
    return [layers[a:b] for a, b in itertools.pairwise(ends)]


@dataclass(frozen=True)
class Code:
    """Properties of the program that trains, on which its time and memory depend."""

    name: str
    dtype: str = "bfloat16"
    """Type of products, activations and messages."""
    fused_attention: bool = True
    """The scores of attention never leave the processor (Dao et al., arXiv:2205.14135)."""
    adds_weight_gradients: bool = True
    """The product of a weight gradient adds to the gradient; otherwise a second operation does."""
    weight_bytes: int = 2
    """Bytes of a weight as layers use it."""
    gradient_bytes: int = 4
    """Bytes of a number of the gradients that are summed over dp."""
    state_bytes: int = 12
    """Bytes per parameter of AdamW's states and of the weights in 32 bits beside those in 16."""
    overlaps_gradients: bool = True
    """Sums along dp run while the last micro-batch's backward pass does."""
    overlaps_messages: bool = True
    """Messages along pp travel while ranks compute."""
    fused_activation: bool = True
    """An activation keeps its arguments alone, and computes the rest again."""
    fused_norm: bool = True
    """An RMSNorm keeps its input and its result; otherwise the normalised numbers as well."""
    fused_rotary: bool = True
    """Attention's result has its tokens outermost, as the next product reads it; otherwise a copy of it is kept."""
    gathers_again: bool = True
    """With sequence parallelism a region's whole input is gathered again for weight gradients; otherwise it is kept."""
    dropout: bool = False
    """Dropout after attention, on its weights and after the MLP."""
    keeps_gradients: bool = True
    """Gradients take memory in the whole step; otherwise, where no rank sums them, from the first backward pass on."""
    logit_bytes: float = 6
    """Bytes per logit while the loss is computed: in 16 and in 32 bits."""


OUR_LOGIT_BYTES = 12.0  # of float32: logits, their exponentials and their gradient
CODES = {
    code.name: code
    for code in (
        Code(
            "ours",
            weight_bytes=4,
            state_bytes=8,
            fused_activation=False,
            fused_norm=False,
            fused_rotary=False,
            gathers_again=False,
            keeps_gradients=False,
            logit_bytes=OUR_LOGIT_BYTES,
        ),
        # Narayanan et al., "Efficient large-scale language model training", arXiv:2104.04473
        Code("megatron-2021", "float16", False, False, 2, 2, 16, False, False),
        # Korthikanti et al., "Reducing activation recomputation", arXiv:2205.05198
        Code("megatron-2022", "float16", False, True, 2, 2, 16, False, False),
        Code("megatron-core"),
        Code("torchtitan", gradient_bytes=4, state_bytes=8),
    )
}
