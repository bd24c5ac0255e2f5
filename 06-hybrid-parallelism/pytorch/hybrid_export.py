"""The model out of its mesh, and into it: Hugging Face's folders, one parameter at a time.

    out    every rank: its piece of a parameter  ->  whole on its stage  ->  rank 0, which writes the file
    in     every rank: a parameter of its stages from the file  ->  its piece

Out, all ranks of a stage hold one whole parameter at a time, and rank 0 the model's weights, in the host's memory. In,
a rank holds its pieces and one whole parameter (hybrid_initial.py).
"""

from __future__ import annotations

from pathlib import Path

import torch
from hybrid_model import Hybrid
from torch import Tensor

from common import comm
from common.equality import whole
from common.models.huggingface import write_weights
from common.models.transformer import Transformer


def gather_to_rank_0(hybrid: Hybrid) -> dict[str, Tensor]:
    """Every parameter whole, under its name in the plain model, on rank 0; empty elsewhere. All ranks call it."""
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
    """Write a folder that transformers' from_pretrained reads. Raises UsageError where it cannot, on rank 0."""
    weights = gather_to_rank_0(hybrid)
    if hybrid.mesh.world.rank == 0:
        write_weights(hybrid.config, weights, folder)
