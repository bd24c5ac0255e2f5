"""Load balance of the experts on a mesh: chapter 05's losses and biases, in a pipeline of micro-batches.

    loss + sum over layers and micro-batches m of  (a E sum_e f_em sum_t s_te  +  z sum_t log(sum of exp)^2) / T

    forward of m      counts of m's choices  --- all-reduce over dp, ep and sp is posted --->  f_em
                      scores s_te of this rank's tokens t, which sum to 1 per token, are summed
    backward of m     waits for f_em;  gradient of the sum of s_te:  a E f_em / T

a: the coefficient of switch or gshard (ep_load_balance.py), z: that of the z-loss (ep_switch_router.py). f_em is the
share of choices that fell on expert e in the micro-batches 0 to m of all ranks. The share of the whole batch is known
only after its last forward pass, and most schedules begin backward passes before. Megatron-LM's `global_aux_loss`
(megatron/core/transformer/moe/router.py) has this definition, too; Qiu et al., arXiv:2501.11873, call the sum a buffer.
With one micro-batch this is the loss of chapter 05. Micro-batch m consists of the m-th part of the samples of each
place along dp and ep: meshes with as many places and micro-batches have the same loss. Biases move once a
step, by the counts of the whole batch, and z-losses add up: neither depends on the micro-batches.

The loss enters where a layer's routing leaves the router: `AddLoss` returns the weights unchanged, and hands the sums
their gradient in the backward pass. So each stage adds what its own layers contribute, in any schedule. All ranks along
tp route the same tokens, and the gradient of a router is summed over them: each adds 1/tp of the loss's.

Cost: all-reduces of 2 E integers per layer and micro-batch, of T, and of 3 numbers over pp and over dp, ep and sp.

B batch  S sequence  T tokens of the global batch  E experts  X = E + 1: a sum for each expert, and that of the z-loss
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Pending
from common.comm.mesh import Mesh
from common.comm.placement import TOKEN_AXES
from common.launch.command_line import Checked, Within
from common.models.moe import Routing
from common.models.transformer import Transformer

from ep_load_balance import move_bias, shares
from ep_switch_router import z_loss_sum
from ep_training import load, mixtures


@dataclass
class Balancing(Checked):
    """Options: the ways of chapter 05 to balance the load of the experts."""

    balance: Literal["none", "switch", "gshard", "bias"] = "none"
    """Balance the experts' load: by a loss on all choices (switch) or on the first ones (gshard), or by a bias."""
    balance_coefficient: Annotated[float, Within(0, 1000)] = 0.01
    """Coefficient a of the loss of --balance switch or gshard; 0.01 as in Switch."""
    balance_rate: Annotated[float, Within(0, 1000)] = 0.001
    """Change u of a bias in a step of --balance bias; 0.001 as in DeepSeek-V3."""
    z_coefficient: Annotated[float, Within(0, 1000)] = 0.0
    """Coefficient z of the routers' z-loss; ST-MoE's is 0.001."""

    @property
    def balances(self) -> bool:
        """True if there is anything to count."""
        return self.balance != "none" or self.z_coefficient > 0


@dataclass
class Pass:
    """A layer's forward pass of one micro-batch."""

    sums_X: Tensor
    """Of this rank's tokens."""
    counts_2E: Tensor
    """All choices and first choices per expert, of all ranks once `pending` is over."""
    pending: Pending


class AddLoss(torch.autograd.Function):
    """Identity of x; in the backward pass `sums` get gradient(), which is not known before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
        ctx.gradient = gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.gradient(), None


class Balance:
    """Balancing of this rank's layers; without `balances` it does nothing.

    numbers: the last step's balance_loss and z_loss, as they are added to the loss, and load, that of the most loaded
    expert over the mean, averaged over the layers; the same on all ranks.
    """

    def __init__(self, model: Transformer, mesh: Mesh, o: Balancing) -> None:
        self.o, self.mesh, self.config, self.tokens = o, mesh, model.config, mesh.group(*TOKEN_AXES)
        self.layers = mixtures(model) if o.balances else []
        self.passes: list[list[Pass]] = [[] for _ in self.layers]
        self.coefficient = o.balance_coefficient if o.balance in ("switch", "gshard") else 0.0
        self.micro, self.numbers = 0, dict[str, float]()
        for moe, passes in zip(self.layers, self.passes, strict=True):
            moe.router.register_forward_hook(partial(self.observe, passes))
            if o.balance == "bias":
                moe.router.choice_bias = torch.zeros_like(moe.router.weight[:, 0])

    def start(self, parts: Sequence[tuple[Tensor, ...]]) -> None:
        """Begin a step with these micro-batches; start to sum their tokens over the ranks."""
        if self.o.balances:
            self.T = torch.tensor(sum(tokens.numel() for tokens, *_ in parts), device=parts[0][0].device)
            self.summed = comm.all_reduce(self.T, self.tokens, async_op=True)
        for passes in self.passes:
            passes.clear()

    def begin(self, m: int) -> None:
        """Say that the next computation is of micro-batch m."""
        self.micro = m

    def observe(self, passes: list[Pass], router: nn.Module, given: object, routing: Routing) -> Routing:
        """Add the losses of a layer's tokens, after its router has chosen; not in an evaluation."""
        if not torch.is_grad_enabled():
            return routing
        shares_E, squares = shares(routing.scores_BSE).sum((0, 1)), z_loss_sum(routing.logits_BSE)
        sums_X = torch.cat([shares_E, squares[None]])
        if self.micro == len(passes):  # else checkpointing recomputes the layer
            chosen_BSK, E = routing.experts_BSK, self.config.experts
            counts_2E = torch.stack([load(chosen_BSK, E), load(chosen_BSK[..., 0], E)])
            pending = comm.all_reduce(counts_2E, self.tokens, async_op=True)
            passes.append(Pass(sums_X.detach(), counts_2E, pending))
        gradient = partial(self.factors, passes, self.micro, self.mesh.shape["tp"])
        return replace(routing, weights_BSK=AddLoss.apply(routing.weights_BSK, sums_X, gradient))

    def factors(self, passes: list[Pass], m: int, ranks: int = 1) -> Tensor:
        """Return the factors of a layer's sums of micro-batch m in the loss, [X]; `ranks` share them."""
        for pending in (self.summed, *(one.pending for one in passes[: m + 1])):
            pending.wait()
        counts_2E = torch.stack([one.counts_2E for one in passes[: m + 1]]).sum(0)
        counts_E = counts_2E[1 if self.o.balance == "gshard" else 0].to(passes[m].sums_X)
        factors_E = self.coefficient * len(counts_E) * counts_E / counts_E.sum()
        return torch.cat([factors_E, factors_E.new_tensor([self.o.z_coefficient])]) / (self.T * ranks)

    def loads(self) -> list[Tensor]:
        """Return the choices of each expert in the whole batch, for each layer of this rank."""
        return [torch.stack([one.counts_2E[0] for one in passes]).sum(0) for passes in self.passes]

    def finish(self) -> None:
        """Set `numbers`, after the backward passes."""
        if not self.o.balances:
            return
        sums = self.passes[0][0].sums_X.new_zeros(3, dtype=torch.float64)
        for passes in self.passes:
            for m, one in enumerate(passes):
                terms_X = self.factors(passes, m) * one.sums_X
                sums[:2] += torch.stack([terms_X[:-1].sum(), terms_X[-1]])
        for load_E in self.loads():  # the same on all ranks of `tokens`
            sums[2] += load_E.max() / load_E.double().mean() / (self.config.layers * self.tokens.size)
        comm.all_reduce(sums, self.mesh.group("pp"))
        comm.all_reduce(sums, self.tokens)
        self.numbers = dict(zip(("balance_loss", "z_loss", "load"), sums.tolist(), strict=True))

    def step(self) -> None:
        """Move the biases by the loads of the batch; with the optimizer's step."""
        if self.o.balance == "bias":
            for moe, load_E in zip(self.layers, self.loads(), strict=True):
                assert moe.router.choice_bias is not None
                move_bias(moe.router.choice_bias, load_E, self.o.balance_rate)
