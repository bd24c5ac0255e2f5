"""A mistake that all shapes allow, and what the checker of placements says of it: docs/types-on-ranks.md.

    python examples/forgotten_sum.py

B batch  D width  F hidden numbers  f = F / n, those of a rank
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from common.comm.checked import checked
from common.comm.mesh import Mesh
from common.comm.placement import shard
from common.launch.program import run_program
from common.launch.runtime import Runtime
from common.launch.spawn import spawn


def partial_gelu(rt: Runtime) -> None:
    """Multiply by this rank's columns of a matrix, and take the GELU before the sum over the ranks."""
    mesh = Mesh(rt.world, tp=rt.world_size)
    h_Bf, w_DF = torch.ones(3, 2), nn.Parameter(torch.ones(5, 2 * rt.world_size))
    w_Df = shard(w_DF, mesh.group("tp"), dim=1)
    with checked(mesh):
        y_BD = F.linear(h_Bf, w_Df)  # this rank's term of the sum
        F.gelu(y_BD)  # wrong: gelu(y0 + y1) is not gelu(y0) + gelu(y1)


if __name__ == "__main__":
    run_program(lambda: len(spawn(partial_gelu, 2)))
