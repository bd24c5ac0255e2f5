"""Targets of the memory model: bytes behind the tensors of chapter 06's model after a step, and of its graph."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from common.comm import Group
from common.comm.mesh import Mesh
from common.data.text import rank_slice
from common.grade.targets import Wrong, holds, target
from common.models.configs import gpt2
from common.models.transformer import Transformer
from common.utils.memory import saved_bytes

from dp_memory import bytes_of
from hybrid_layout import Layout
from hybrid_model import Hybrid
from tp_megatron import tensor_parallel

BATCH, SEQUENCE = 4, 16
CONFIG = gpt2(layers=3, width=32, heads=4, sequence=64, vocabulary=256)


@dataclass(frozen=True)
class Model:
    """Sizes of GPT-2 as the exercise names them; size: bytes per number."""

    layers: int = CONFIG.layers
    width: int = CONFIG.width
    mlp_width: int = CONFIG.mlp_width
    heads: int = CONFIG.heads
    vocabulary: int = CONFIG.vocabulary
    positions: int = CONFIG.sequence
    size: int = 8


def near(what: str, got: float, measured: float) -> None:
    """Raise Wrong if the prediction is off by more than 5 %."""
    if not abs(got - measured) <= 0.05 * measured:
        raise Wrong(
            f"{what}: {got:,.0f} bytes predicted, {measured:,.0f} measured: {got / measured - 1:+.0%}"
        )


def compare(mine: Any, group: Group, rng: torch.Generator, dp: int, tp: int, zero: int) -> None:
    """Train a step, then compare what this rank holds."""
    mesh = Mesh(group, dp=dp, tp=tp)
    hybrid = Hybrid(CONFIG, mesh, Layout(zero=zero, micro_batches=1), torch.device("cpu"), torch.float64, 0)
    optimizer = torch.optim.AdamW(hybrid.parameters())
    tokens_BS, targets_BS = torch.randint(256, (2, BATCH, SEQUENCE), generator=rng)
    mine_of = slice(*rank_slice(BATCH, mesh.at["dp"], dp))
    hybrid.step(tokens_BS[mine_of], targets_BS[mine_of])
    optimizer.step()
    tensors = [*hybrid.model.parameters(), *hybrid.parameters()]
    states = [x for of in optimizer.state.values() for x in of.values() if x.numel() > 1]
    measured = {
        "weights": bytes_of(tensors),
        "gradients": bytes_of(p.grad for p in tensors),
        "states": bytes_of(states),
    }
    got = mine.memory(Model(), dp, tp, zero, BATCH * SEQUENCE // dp)
    holds(
        isinstance(got, dict) and set(measured) <= set(got),
        f"the result needs {', '.join(measured)}, activations",
    )
    for kind, size in measured.items():
        near(f"{kind} with dp={dp} tp={tp}, ZeRO {zero}", got[kind], size)
    mesh.close()


@target("weights, gradients and states with tp", ranks=(4,))
def along_tp(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Without ZeRO: split and whole parameters."""
    compare(mine, group, rng, 1, 4, 0)


@target("ZeRO's stages", ranks=(4,))
def stages(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Each stage splits one thing more over dp."""
    for zero in (1, 2, 3):
        compare(mine, group, rng, 2, 2, zero)


@target("activations that the layers keep", ranks=(1, 2))
def activations(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Count what autograd saves for two layers more."""
    tokens_BS = torch.randint(256, (BATCH, SEQUENCE), generator=rng)

    def kept(layers: int) -> int:
        model = Transformer(replace(CONFIG, layers=layers), 0, torch.float64)
        tensor_parallel(model, Group("tp", group.rank, group.size, group.ranks, group.pg))
        return saved_bytes(lambda: model.loss(model(tokens_BS), tokens_BS)[0], model)

    measured = (kept(3) - kept(1)) * CONFIG.layers / 2
    got = mine.memory(Model(), 1, group.size, 0, BATCH * SEQUENCE)["activations"]
    near(f"activations of {CONFIG.layers} layers with tp={group.size}", got, measured)
