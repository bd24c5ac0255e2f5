"""Checks of model, mesh, layout and batch before any rank waits; errors name a value that works."""

from __future__ import annotations

from common.comm.mesh import Mesh
from common.errors import UsageError
from common.models.configs import TransformerConfig

from hybrid_model import Layout
from pp_schedules import KINDS
from pp_stages import evenly
from sp_sequence_parallel import ORDERS
from sp_split import check_length, longest_sequence
from sp_training import check_heads
from tp_megatron import check_sizes


def check(config: TransformerConfig, mesh: Mesh, layout: Layout, batch: int, sequence: int) -> None:
    """Check that model, mesh, layout and batch fit together. Raises UsageError."""
    shape = mesh.shape
    if shape["tp"] > 1:
        check_sizes(config, shape["tp"])
    elif layout.sequence_parallel:
        raise UsageError(
            "--sequence-parallel cuts the tokens over tp, which has 1 rank here; give --tp 2, or leave it out"
        )
    if shape["sp"] > 1:
        check_length(sequence, ORDERS[layout.attention], shape["sp"], longest_sequence(config))
        if layout.attention == "ulysses":
            check_heads(config.heads // shape["tp"], shape["sp"])
    elif (longest := longest_sequence(config)) and sequence > longest:
        raise UsageError(
            f"a sequence of {sequence} tokens is too long for a model with {longest} learned positions"
        )
    if config.experts and shape["ep"] > config.experts:
        raise UsageError(
            f"{shape['ep']} ranks along ep are more than the {config.experts} experts; "
            f"at most {config.experts} would do"
        )
    chunks = KINDS[layout.schedule].chunks or layout.chunks
    if layout.chunks < 1:
        raise UsageError(f"--chunks {layout.chunks}: a rank needs at least 1 stage")
    evenly(config.layers, shape["pp"] * chunks)
    check_batch(shape["dp"] * shape["ep"], layout.micro_batches, batch)
    check_zero(shape, layout)


def check_batch(places: int, micro_batches: int, batch: int) -> None:
    """Check that each place along dp and ep has a sample per micro-batch. Raises UsageError."""
    if micro_batches < 1 or batch // places < micro_batches:
        raise UsageError(
            f"--batch {batch} gives each of {places} places along dp and ep {batch // places} samples, too few for "
            f"{micro_batches} micro-batches; give --batch {places * max(1, micro_batches)}, or fewer micro-batches"
        )


def check_zero(shape: dict[str, int], layout: Layout) -> None:
    """Check that the pipeline allows this stage of ZeRO. Raises UsageError."""
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
