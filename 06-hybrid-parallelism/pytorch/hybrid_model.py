"""Five strategies on one model: each changes only the parts that its axis splits, so they are separate calls.

    tensor_parallel      matrices and heads over tp       on shapes alone
    sequence_parallel    tokens of a sample over sp
    expert_parallel      whole experts over ep
    Pipeline             layers over pp
    materialise          each rank makes its own shards
    Zero                 sums of gradients, while the last backward pass runs; shards over the same ranks

    optimizer.zero_grad()
    loss = hybrid.step(tokens_BS, targets_BS)      forward, backward, sums over ranks
    hybrid.clip(1.0)
    optimizer.step()

A parameter carries its placement on the mesh (common/comm/placement.py), and the work after the backward pass
follows from the placement: the gradient is summed over the axes along which tokens are split and the
parameter is replicated; the parameter counts once in the norm. The ranks along these axes hold copies of the
parameter, so ZeRO shards it over them.

A unit of Zero, a layer's parameters of one placement, is sent when the last micro-batch's backward pass has
completed it, in an order that is the same on all ranks, and in process groups of its own: the backward pass itself
communicates meanwhile. The first stage's embedding and the last stage's head follow after it.

Every mesh runs as a pipeline. Without pp it has one stage, whose schedule is forward and backward in turn.

    rank = (((p*dp + d)*ep + e)*sp + s)*tp + t             tp communicates most: innermost
    samples over dp and ep, tokens of a sample over sp     the same on all ranks along pp and tp
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group
from common.comm.mesh import AXES, Mesh
from common.comm.placement import (
    TOKEN_AXES,
    clip_gradients,
    gradient_axes,
    sum_tied_gradients,
)
from common.data.text import rank_slice
from common.errors import UsageError
from common.lesson.job import Batch
from common.models.dropout import Dropout
from common.models.transformer import Transformer, TransformerConfig

from dp_zero import Zero
from ep_moe import ExpertExchange, expert_parallel
from hybrid_balance import Balance, Balancing
from hybrid_experts import split
from hybrid_initial import Whole, from_seed, materialise
from hybrid_layout import Layout, check_batch, check_layout
from pp_pipeline import Pipeline
from pp_schedules import make_schedule
from sp_block import Kernel
from sp_sequence_parallel import ORDERS, sequence_parallel
from sp_split import longest_sequence, split_sequence
from tp_megatron import Region, tensor_parallel


class Hybrid:
    """A Transformer on a mesh: this rank's part of it, and its training step.

    zero: has the parameters that the optimizer updates. balance: balances the load of the experts; call its `step`
    after the optimizer's. whole(name, shape): values of the plain model's parameters; default: those of `seed`.
    balancing: options of `balance`; default: no balancing, and no `step` is needed. Every rank of the
    mesh constructs this object with the same arguments. Raises UsageError before any rank waits if model,
    mesh and layout do not fit together.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        layout: Layout,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        whole: Whole | None = None,
        balancing: Balancing | None = None,
    ) -> None:
        if layout.precision == "bfloat16" and dtype == torch.float64:
            raise UsageError("--precision bfloat16 leaves float64 as it is; give --dtype float32 with it")
        check_layout(layout, config, mesh.shape)
        with torch.device("meta"):
            self.model = model = Transformer(config, seed, dtype)
        self.config, self.mesh, self.layout, shape = config, mesh, layout, mesh.shape
        self.exchanges: list[ExpertExchange] = []
        region = None
        if shape["tp"] > 1:
            region = tensor_parallel(model, mesh.group("tp"), layout.sequence_parallel, split)
        if shape["sp"] > 1:
            sequence_parallel(model, mesh.group("sp"), layout.attention, ring_kernel(device))
        if shape["ep"] > 1 and config.experts:  # without experts ep is one more axis of samples
            self.exchanges = expert_parallel(model, mesh.group("ep"))
        make_groups(model, mesh)
        schedule = make_schedule(layout.schedule, shape["pp"], layout.micro_batches, layout.chunks)
        between = between_stages(model, region)
        self.pipe = Pipeline(model, mesh, schedule, checkpointing=layout.checkpointing, shape=between)
        stages, layers = [*self.pipe.stages.values()], model.layers.children()
        materialise(model, mesh, device, whole or from_seed(model, seed))
        if layout.precision == "bfloat16":
            for stage in stages:
                stage.forward = torch.autocast(device.type, torch.bfloat16)(stage.forward)  # type: ignore[method-assign]
        self.balance = Balance(model, mesh, balancing or Balancing())
        self.zero = Zero(model, layers, gradient_groups(mesh), layout.zero, stages)
        self.tokens, self.samples = mesh.group(*TOKEN_AXES), mesh.group("dp", "ep")
        self.dropouts = [m for m in model.modules() if isinstance(m, Dropout) and m.p > 0]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of this rank's optimizer, under the names of the plain model."""
        return self.zero.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the same parameters without names."""
        return (p for _, p in self.named_parameters())

    def split(self, tokens_BS: Tensor, targets_BS: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's tokens of some samples: (tokens_Bs, positions_s, targets_Bs).

        Without sp they are (tokens_BS, targets_BS).
        """
        group = self.mesh.group("sp")
        if group.size == 1:
            return tokens_BS, targets_BS
        order = ORDERS[self.layout.attention]
        return split_sequence(tokens_BS, targets_BS, group, order, longest_sequence(self.config))

    def step(self, tokens_BS: Tensor, targets_BS: Tensor, at: tuple[int, int] = (0, 0)) -> Tensor:
        """Leave the gradients of the global batch; return its cross-entropy, the same on all ranks.

        tokens_BS, targets_BS: the samples of this rank's place along dp and ep, the same on all ranks along
        pp, sp and tp. Places may have different numbers of samples, at least one per micro-batch. at: the
        numbers of the step and of the first sample in the global batch, on which dropout depends. Raises
        UsageError for too few samples, and for a sequence that the ranks or the model cannot take.
        """
        (B, S), M = tokens_BS.shape, self.layout.micro_batches
        check_batch(self.layout, self.config, self.mesh.shape, B * self.samples.size, S)
        cuts = [rank_slice(B, m, M) for m in range(M)]
        parts = [self.split(tokens_BS[lo:hi], targets_BS[lo:hi]) for lo, hi in cuts]
        batch = Batch(at[0], parts, [at[1] + lo for lo, _ in cuts], self.dropouts)
        count = batch.count_targets(self.tokens)
        for exchange in self.exchanges:
            exchange.forget()
        self.balance.start(batch.parts)

        def begin(m: int) -> None:
            batch.begin(m)
            self.balance.begin(m)

        no_sync = (
            self.zero.no_sync if self.layout.zero < 2 else nullcontext
        )  # ZeRO 2 sums after every micro-batch
        with nullcontext() if self.layout.overlap else no_sync():
            loss = self.pipe.run(batch.parts, 1 / count, begin, no_sync)
        self.finish()
        self.balance.finish()
        comm.all_reduce(loss, self.tokens)
        return loss / count

    def finish(self) -> None:
        """Turn every gradient into that of the global batch, after the backward passes.

        A tied head's comes last: its two holders must step with the same bits, and the rounding of a sum over
        many ranks depends on the gradient's position in the message.
        """
        self.zero.finish()
        sum_tied_gradients(self.parameters())

    def clip(self, largest: float, also: Tensor | None = None) -> Tensor:
        """Clip the gradients as `clip_gradients` does; return their norm before."""
        return clip_gradients(self.parameters(), self.mesh, largest, also)


def make_groups(model: nn.Module, mesh: Mesh) -> None:
    """Create all groups, in one order on all ranks, before the ranks keep different parameters."""
    for axes in (*((axis,) for axis in AXES), TOKEN_AXES, ("dp", "ep")):
        mesh.group(*axes)
    for p in model.parameters():
        axes = gradient_axes(p)
        mesh.group(*axes, purpose="gradients")
        mesh.group(*axes)  # of what looks at ZeRO's shards from outside


def gradient_groups(mesh: Mesh) -> Callable[[Tensor], Group]:
    """Return a function of a parameter: the ranks that hold it and over which its gradient is summed.

    ZeRO shards it over the same ranks: a dense parameter over dp, ep and sp, an expert over dp and sp. Its process
    groups are not those of the forward and the backward pass, which communicate meanwhile.
    """
    return lambda p: mesh.group(*gradient_axes(p), purpose="gradients")


def ring_kernel(device: torch.device) -> Kernel:
    """Return the kernel of ring attention on `device`, which a model on "meta" does not know."""
    return "library" if device.type == "cpu" else "hand"


def between_stages(model: Transformer, region: Region | None) -> Callable[[Tensor], tuple[int, ...]]:
    """Return shape(tokens_Bs) of the activations between stages: [B, s, D], or a slice of s in Megatron's way."""

    def shape(tokens_Bs: Tensor) -> tuple[int, ...]:
        places_s = torch.arange(tokens_Bs.shape[1])
        length = len(region.slice(places_s) if region else places_s)
        return len(tokens_Bs), length, model.config.width

    return shape
