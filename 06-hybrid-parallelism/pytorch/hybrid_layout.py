"""Options of the mesh and of each axis' strategy, and checks that they fit the model and the batch.

The checks come before any rank waits for another. Their errors name a value that works.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.command_line import Checked, Count, Ranks, Size, Within
from common.launch.runtime import Runtime
from common.lesson.training import TrainingOptions
from common.models.configs import TransformerConfig

from pp_schedules import KINDS
from pp_stages import evenly
from sp_sequence_parallel import ORDERS, Attention
from sp_split import check_length, longest_sequence
from sp_training import check_heads
from tp_megatron import check_sizes


@dataclass
class Layout(Checked):
    """Strategy options of each axis. The mesh holds the axis sizes."""

    micro_batches: Size = 2
    """Parts into which each rank cuts its samples to accumulate gradients."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] = "1f1b"
    """Pipeline schedule: the order of the passes on each stage."""
    chunks: Annotated[int, Within(1, 1000)] = 2
    """Stages per rank if the schedule is interleaved."""
    attention: Attention = "zigzag"
    """Algorithm of attention across the ranks along sp."""
    sequence_parallel: bool = False
    """Megatron's sequence parallelism: between the regions each rank along tp holds a slice of the tokens."""
    zero: Literal[0, 1, 2, 3] = 0
    """Stage of ZeRO, over all ranks that hold a parameter: 1 shards states, 2 also gradients, 3 also weights."""
    overlap: bool = True
    """Sum gradients while the last micro-batch's backward pass runs; no: afterwards."""
    checkpointing: bool = False
    """Keep only the input of each layer, and recompute the layer in the backward pass."""
    precision: Literal["full", "bfloat16"] = "full"
    """Type in which products are computed; full means the type of the weights."""


@dataclass
class Axes(Checked):
    """Ranks along each axis of the mesh."""

    pp: Ranks = 1
    """Ranks along pp: stages of layers."""
    dp: Ranks | None = None
    """Ranks along dp: replicas of the model; default: all ranks that the other axes leave."""
    ep: Ranks = 1
    """Ranks along ep: experts, and one more axis of samples."""
    sp: Ranks = 1
    """Ranks along sp: shards of the sequence."""
    tp: Ranks = 1
    """Ranks along tp: shards of each matrix."""


@dataclass
class HybridOptions(Layout, Axes, TrainingOptions, without=("versions",)):
    """Options of the lessons of chapter 06: mesh, layout, model and batch."""

    steps: Annotated[int, Within(0, 10**9)] = 3
    """Training steps."""
    model: str = "mixtral-tiny"
    """Name of a model in common/models/configs.py."""
    batch: Size = 16
    """Samples in the global batch; the shares of places along dp and ep differ by one sample at most."""
    clip: Annotated[float, Within(0, 1e30)] = 0.0
    """Largest norm of the gradient; 0 means no clipping."""
    explain: bool = False
    """Print the mesh, each rank's place and memory, groups, bytes of a step; with --steps 0 only that."""

    def validate(self) -> None:
        """Check that the options fit together. Raises UsageError.

        Construction does not check this, because a configuration file gives the options one by one.
        """
        if not self.steps and not self.explain:
            raise UsageError("--steps 0: give at least 1; 0 goes with --explain, and then nothing is trained")

    def mesh(self, rt: Runtime) -> Mesh:
        """Return the mesh of all ranks.

        Raises UsageError if the axes' product is not the number of ranks, and if layout, model and batch do
        not fit the mesh.
        """
        others = self.pp * self.ep * self.sp * self.tp
        dp = max(1, rt.world_size // others) if self.dp is None and others > 0 else self.dp or 0
        mesh, config = Mesh(rt.world, self.pp, dp, self.ep, self.sp, self.tp, rt.timeout), self.model_config()
        check_layout(self, config, mesh.shape)
        check_batch(self, config, mesh.shape, self.batch, self.sequence)
        return mesh


@dataclass
class TorchOptions(
    HybridOptions,
    without=(
        *("ep", "sp", "schedule", "chunks", "attention", "sequence_parallel"),
        *("checkpointing", "precision", "clip", "scaling", "explain", "check"),
    ),
):
    """Options of hybrid_torch.py: a dense model on pp, dp and tp."""

    steps: Count = 3
    """Training steps."""
    model: str = "llama-tiny"
    """Name of a model in common/models/configs.py, dense and with an untied head."""


def check_layout(layout: Layout, config: TransformerConfig, shape: Mapping[str, int]) -> None:
    """Raise UsageError if the layout does not fit the model on a mesh of this shape."""
    if shape["tp"] > 1:
        check_sizes(config, shape["tp"])
    elif layout.sequence_parallel:
        raise UsageError(
            "--sequence-parallel cuts the tokens over tp, which has 1 rank here; give --tp 2, or leave it out"
        )
    if shape["sp"] > 1 and layout.attention == "ulysses":
        check_heads(config.heads // shape["tp"], shape["sp"])
    if config.experts and shape["ep"] > config.experts:
        raise UsageError(
            f"{shape['ep']} ranks along ep are more than the {config.experts} experts; "
            f"at most {config.experts} would do"
        )
    evenly(config.layers, shape["pp"] * (KINDS[layout.schedule].chunks or layout.chunks))
    if layout.zero < 2:
        return
    if shape["pp"] > 1:
        raise UsageError(
            f"--zero {layout.zero} would "
            + ("reduce all gradients" if layout.zero == 2 else "gather all weights")
            + " once for each micro-batch that passes a stage; with pp above 1 use --zero 1"
        )
    if layout.schedule != "1f1b":
        raise UsageError(
            f"--zero {layout.zero} lets go of a layer before the next micro-batch, so a forward pass must be followed "
            f"by its backward pass: use --schedule 1f1b, not {layout.schedule}"
        )


def check_batch(
    layout: Layout, config: TransformerConfig, shape: Mapping[str, int], batch: int, sequence: int
) -> None:
    """Raise UsageError if ranks cannot cut the sequence, or a place along dp and ep lacks a sample per micro-batch."""
    longest = longest_sequence(config)
    if shape["sp"] > 1:
        check_length(sequence, ORDERS[layout.attention], shape["sp"], longest)
    elif longest and sequence > longest:
        raise UsageError(
            f"a sequence of {sequence} tokens is too long for a model with {longest} learned positions"
        )
    places = shape["dp"] * shape["ep"]
    if batch // places < layout.micro_batches:
        raise UsageError(
            f"--batch {batch} gives each of {places} places along dp and ep {batch // places} samples, too few for "
            f"{layout.micro_batches} micro-batches; give --batch {places * layout.micro_batches}, or fewer "
            f"micro-batches"
        )


def check_torch(o: TorchOptions, mesh: Mesh) -> None:
    """Check that torch's parts can run these options. Raises UsageError."""
    c, tp = o.model_config(), mesh.shape["tp"]
    if mesh.world.size == 1:
        raise UsageError("torch's parts need a process group: start at least 2 ranks")
    if c.tied or c.experts:
        raise UsageError(
            f"--model {o.model}: give a dense one whose head is not its embedding, such as llama-tiny"
        )
    for what, number in (("key-value heads", c.kv_heads), ("columns of the MLP", c.mlp_width)):
        if number % tp:
            raise UsageError(
                f"{number} {what} do not divide over {tp} ranks along tp, which DTensor's plan needs"
            )
    parts = mesh.shape["dp"] * o.micro_batches
    if o.batch % parts or o.micro_batches < mesh.shape["pp"]:
        raise UsageError(
            f"--batch {o.batch} --micro-batches {o.micro_batches}: torch wants equal micro-batches, at least "
            f"as many as stages; --batch {max(1, o.batch // parts) * parts} "
            f"--micro-batches {max(o.micro_batches, o.pp)} would do"
        )
