"""Export of a model from its mesh, and import into a mesh: Hugging Face's folders, one parameter at a time.

    export    every rank: its shard of a parameter  ->  whole on its stage  ->  rank 0, which writes the file
    import    every rank: a parameter of its stages from the file  ->  its shard

On export, all ranks of a stage hold one whole parameter at a time, and rank 0 holds all weights in host
memory. On import, a rank holds its shards and one whole parameter (hybrid_initial.py).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from common import comm
from common.lesson.equality import whole
from common.models.huggingface import write_huggingface
from common.models.transformer import Transformer

from hybrid_model import Hybrid


def gather_to_rank_0(hybrid: Hybrid) -> dict[str, Tensor]:
    """Gather every parameter whole on rank 0, by its name in the plain model.

    Returns {} on other ranks. All ranks call it.
    """
    mesh, mine = hybrid.mesh, dict(hybrid.named_parameters())
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Transformer(hybrid.config).named_parameters()}
    of_stages = comm.everyones(set(mine), mesh.group("pp"))
    found, per_stage = {}, mesh.world.size // mesh.shape["pp"]
    for name, shape in shapes.items():
        stage = next(rank for rank, names in enumerate(of_stages) if name in names)
        sender = stage * per_stage  # the first rank of that stage
        x = torch.empty(0)
        if mesh.at["pp"] == stage:
            x = whole(mine[name], mine[name], mesh)
        if sender > 0 and mesh.world.rank == sender:
            comm.send(x, mesh.world, 0)
        if sender > 0 and mesh.world.rank == 0:
            x = next(iter(mine.values())).new_empty(shape)
            comm.recv(x, mesh.world, sender)
        if mesh.world.rank == 0:
            found[name] = x.detach().cpu()
    return found


def export(hybrid: Hybrid, folder: Path) -> None:
    """Write a folder that transformers' from_pretrained reads. Raises UsageError on rank 0 if that fails."""
    weights = gather_to_rank_0(hybrid)
    if hybrid.mesh.world.rank == 0:
        write_huggingface(hybrid.config, weights, folder)
