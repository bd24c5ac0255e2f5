"""One file of whole tensors, for runs in all three languages: each continues what another has saved, on any mesh.

    weights       embed_tokens.weight, layers.0.attention.q_proj.weight, ...: names of the plain model
    AdamW         optimizer.exp_avg.NAME, optimizer.exp_avg_sq.NAME, optimizer.step.NAME
    metadata      {"step": "200", "seed": "0", "batch": "16", ...}: the step, and what decides the order of samples

The format is safetensors, which runs no code; cpp/include/fived/lesson/checkpoint.hpp reads and writes it in
C++. While rank 0 writes, it holds all tensors in host memory, as in hybrid_export.py. When a file is read, a
rank holds its shards and one whole tensor. The checkpoints of a long run are those of hybrid_checkpoint.py:
every rank writes its own boxes, with checksums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common import comm
from common.comm.mesh import Mesh
from common.comm.placement import piece
from common.errors import UsageError
from common.lesson.equality import whole

from hybrid_checkpoint import check_model
from hybrid_files import sync
from hybrid_pieces import Entry

TYPES = {"F64": "float64", "F32": "float32"}


def gather_to_rank_0(entries: Sequence[Entry], mesh: Mesh) -> dict[str, Tensor]:
    """Gather every entry whole on rank 0, by its name. Returns {} on other ranks. All ranks call it."""
    mine = {entry.name: entry for entry in entries}
    kinds = {name: (entry.whole(mesh), entry.tensor.dtype) for name, entry in mine.items()}
    of_stages = comm.everyones(kinds, mesh.group("pp"))
    first = {name: stage for stage in reversed(range(len(of_stages))) for name in of_stages[stage]}
    found, per_stage = {}, mesh.world.size // mesh.shape["pp"]
    for name, stage in first.items():
        sender = stage * per_stage  # the first rank of that stage
        x = torch.empty(0)
        if mesh.at["pp"] == stage:
            x, like = mine[name].tensor, mine[name].like
            x = whole(x, like if mine[name].splits else x, mesh)
        if sender > 0 and mesh.world.rank == sender:
            comm.send(x, mesh.world, 0)
        if sender > 0 and mesh.world.rank == 0:
            shape, dtype = of_stages[stage][name]
            x = entries[0].tensor.new_empty(shape, dtype=dtype)
            comm.recv(x, mesh.world, sender)
        if mesh.world.rank == 0:
            found[name] = x.detach().cpu()
    return found


def save_whole(file: Path, entries: Sequence[Entry], mesh: Mesh, about: Mapping[str, object]) -> None:
    """Write all entries whole into one file, with `about` as its metadata; it has its name once it is complete.

    Raises UsageError on rank 0 if it cannot be written. All ranks call it.
    """
    tensors = gather_to_rank_0(entries, mesh)
    if mesh.world.rank > 0:
        return
    partial = file.with_name(f"{file.name}.partial")
    try:
        save_file(tensors, partial, {key: str(value) for key, value in about.items()})
        sync(partial)
        partial.rename(file)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"{file} cannot be written: {error}") from None


@torch.no_grad()
def read_whole(file: Path, entries: Sequence[Entry], mesh: Mesh) -> dict[str, str]:
    """Fill the entries with their pieces of the file's tensors; return its metadata.

    Raises UsageError for a file that cannot be read, or that is of another model or optimizer. All ranks call it.
    """
    try:
        with safe_open(file, framework="pt") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118, it is no mapping
            there = {
                name: f"{x.get_shape()} {TYPES.get(x.get_dtype(), x.get_dtype())}"
                for name, x in slices.items()
            }
            check_model(file, there, entries, mesh)
            for entry in entries:
                x = stored.get_tensor(entry.name)
                entry.tensor.copy_(piece(x, entry.like, mesh) if entry.splits else x)
            about = dict(stored.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot read {file}: {error}") from None
    if not about.get("step", "").isdecimal():
        raise UsageError(f"{file} does not say how many steps it has behind it")
    return about
