"""Targets of the gradients' axes: chapter 06's model, whose sums after the backward pass are those of the answer."""

import itertools
from typing import Any

import torch
from torch import Tensor

from common import comm
from common.comm import Group
from common.comm.mesh import AXES, Mesh
from common.comm.placement import piece
from common.data.text import rank_slice
from common.grade.targets import holds, same, target
from common.models.configs import mixtral
from common.models.transformer import Transformer

from hybrid_layout import Layout
from hybrid_model import Hybrid

CONFIG = mixtral(layers=2, width=16, heads=4, kv_heads=2, mlp_width=24, sequence=16, experts=4, vocabulary=32)
SEED = 3


def one_device(tokens_BS: Tensor, targets_BS: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the plain model."""
    model = Transformer(CONFIG, SEED, torch.float64)
    loss, _ = model.loss(model(tokens_BS), targets_BS)
    (loss / targets_BS.numel()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(
    mine: Any, group: Group, rng: torch.Generator, shape: dict[str, int], megatron: bool = False
) -> None:
    """Train a step on the mesh, sum as the answer says, compare this rank's parts of every gradient."""
    tokens_BS, targets_BS = torch.randint(32, (2, 4, 16), generator=rng)
    want, mesh = one_device(tokens_BS, targets_BS), Mesh(group, **shape)
    layout = Layout(2 if shape.get("pp", 1) > 1 else 1, sequence_parallel=megatron, overlap=False)
    hybrid = Hybrid(CONFIG, mesh, layout, torch.device("cpu"), torch.float64, SEED)
    several = [axis for axis in AXES if mesh.shape[axis] > 1]
    for n in range(len(several) + 1):
        for axes in itertools.combinations(several, n):
            mesh.group(*axes)  # all ranks make all groups in one order
    shown = " ".join(f"{axis}={mesh.shape[axis]}" for axis in several) + (
        ", sequence parallel" if megatron else ""
    )

    def finish() -> None:
        for name, p in hybrid.model.named_parameters():
            axes = set(mine.gradient_axes(name, dict(mesh.shape), megatron))
            holds(axes <= set(AXES), f"{name}: {sorted(axes)} are no axes of the mesh")
            holds(
                "pp" not in axes or mesh.shape["pp"] == 1, f"{name}: stages along pp own different parameters"
            )
            if p.grad is None:
                p.grad = torch.zeros_like(p)  # of experts that no token of this rank chose
            comm.all_reduce(p.grad, mesh.group(*(axis for axis in several if axis in axes)))

    hybrid.finish = finish  # type: ignore[method-assign]
    places = mesh.group("dp", "ep")
    mine_of = slice(*rank_slice(4, places.rank, places.size))
    hybrid.step(tokens_BS[mine_of], targets_BS[mine_of])
    for name, p in hybrid.model.named_parameters():
        same(f"mesh {shown}: the gradient of {name}", p.grad, piece(want[name], p, mesh), tolerance=1e-11)
    mesh.close()


@target("data parallelism: dense parameters", ranks=(4,))
def dense(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Only dp, then dp with stages."""
    compare(mine, group, rng, {"dp": 4})
    compare(mine, group, rng, {"pp": 2, "dp": 2})


@target("sequence parallelism: tokens split over sp", ranks=(4,))
def sequence(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Keys and values go around; gradients are partial."""
    compare(mine, group, rng, {"dp": 2, "sp": 2})


@target("tensor parallelism: parts of matrices, and what is replicated", ranks=(4,))
def tensor(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Along tp all ranks see the same tokens, but for norms under Megatron's sequence parallelism."""
    compare(mine, group, rng, {"dp": 2, "tp": 2})
    compare(mine, group, rng, {"dp": 2, "tp": 2}, megatron=True)
    compare(mine, group, rng, {"sp": 2, "tp": 2}, megatron=True)


@target("expert parallelism: whole experts", ranks=(4,))
def experts(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Experts get the tokens of all ranks along ep, and have replicas along dp."""
    compare(mine, group, rng, {"ep": 4})
    compare(mine, group, rng, {"dp": 2, "ep": 2})
    compare(mine, group, rng, {"ep": 2, "tp": 2}, megatron=True)
