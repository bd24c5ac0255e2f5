"""Load balancing of experts: a loss on the load of the global batch, or a bias that no gradient moves.

    load over training: rows are steps, columns are experts, darker means more tokens

          none             switch, gshard            bias
    0     ▒ ▒ ▓ ░ ▒ ▒      ▒ ▒ ▓ ░ ▒ ▒               ▒ ▒ ▓ ░ ▒ ▒       f_e  share of the choices that fell on e
    20    █ ░   ░ ▓ ░      ▓ ▒ ▒ ▒ ▓ ▒               ▓ ▒ ▒ ▒ ▒ ▒       P_e  mean of the router's scores for e
    40    █       █        ▒ ▒ ▒ ▒ ▓ ▒               ▒ ▒ ▒ ▒ ▒ ▒       both over all tokens of the global batch

    switch    loss + a E sum_e f_e P_e            arXiv:2101.03961, eq. 4-6; with k > 1 all choices count
    gshard    the same with f_e of the first choices alone    arXiv:2006.16668, algorithm 1 (its loss is 1/E^2 of this)
    bias      a token chooses the k largest s_e + b_e and weighs with s_e; after each step
              b_e += u sign(mean load - load_e)   DeepSeek-V3, arXiv:2412.19437, eq. 16; arXiv:2408.15664

f is a count and has no gradient; P has one, and the loss lowers the scores where f is large. With even load E
sum_e f_e P_e is 1. Since f and P multiply, a mean of means is wrong: the average of f P over ranks or
micro-batches is another loss, which requires every small part to be balanced (Qiu et al., arXiv:2501.11873).
So counts are first summed over all ranks and micro-batches, and then each part of P gets its gradient. Tokens
that a capacity will drop count like all others; otherwise the loss would not measure an overload. f is known
only after the last micro-batch's forward pass: here all graphs are kept until then, so micro-batches save no
memory. The alternatives are a forward pass for counting, the counts of the step before, or those of the
micro-batches so far (hybrid_balance.py in chapter 06).

Cost: an all-reduce of 2 E integers per layer. The bias costs nothing else, and does not change the gradients.

    python ep_load_balance.py --nproc 2 --plot balance.png    torchrun --nproc_per_node=2 ep_load_balance.py
    mpirun -np 2 python ep_load_balance.py

B batch  S sequence  L layers  E experts  K choices of a token
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, cast

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group
from common.comm.placement import sum_gradients
from common.launch.command_line import Within
from common.launch.runtime import Runtime
from common.lesson.comparison import prove
from common.lesson.job import Job, total
from common.lesson.runner import run
from common.models.moe import Routing
from common.models.transformer import cross_entropy_sum

import ep_moe
from ep_costs import BalancedBytes
from ep_loads import show_balance
from ep_moe import expert_parallel, with_capacity
from ep_training import MoEOptions, check, drain, load, mixtures, observed

VERSIONS = ("none", "switch", "gshard", "bias")


@dataclass
class BalanceOptions(MoEOptions, without=("capacity_factor", "benchmark", "scaling")):
    """Options: the strengths of the ways of balancing."""

    coefficient: Annotated[float, Within(0, 1000)] = 0.01
    """Coefficient a of the loss; 0.01 as in Switch."""
    rate: Annotated[float, Within(0, 1000)] = 0.01
    """Change u of a bias in a step; DeepSeek-V3's is 0.001, for longer training."""
    curve_steps: Annotated[int, Within(0, 10**9)] = 80
    """Steps of the training whose loads are shown; 0 skips this training."""


def shares(scores_BSE: Tensor) -> Tensor:
    """Return scores that sum to 1 per token: sigmoid's are divided by their sum, softmax's already do."""
    return scores_BSE / scores_BSE.sum(-1, keepdim=True)


def balance_loss(routings: list[Routing], counts_E: Tensor) -> Tensor:
    """Return this rank's part of T E sum_e f_e P_e: T tokens in the global batch, f of the global counts.

    The parts of all ranks add up to T times the loss. counts_E: the global counts, of first choices or of
    all.
    """
    here_E = torch.stack([shares(r.scores_BSE).sum((0, 1)) for r in routings]).sum(0)
    f_E = counts_E.to(here_E) / counts_E.sum()
    return len(f_E) * (f_E * here_E).sum()


def move_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> None:
    """Raise the bias of each expert with less than the mean load, lower it where the load is higher; in place."""
    bias_E += rate * (load_E.double().mean() - load_E).sign().to(bias_E)


class Balance:
    """Balancing of the experts by the choices of the whole global batch.

    group: the ranks that see different tokens. loads: the load of each step, [L, E].
    """

    def __init__(self, kind: str, model: nn.Module, group: Group, o: BalanceOptions) -> None:
        self.kind, self.model, self.group, self.o = kind, model, group, o
        self.seen, self.loads = observed(model), cast(list[Tensor], [])
        for moe in mixtures(model) if kind == "bias" else []:
            moe.router.choice_bias = torch.zeros_like(moe.router.weight[:, 0])

    def loss(self) -> Tensor | float:
        """Return this rank's part of the balancing loss, after the forward passes of all micro-batches.

        Sums the counts over the ranks, for which it sends 2(n-1)/n of 2 E integers per layer.
        """
        layers, loss = list(drain(self.seen)), cast(Tensor | float, 0.0)
        counts_L2E = self.counts(layers)
        comm.all_reduce(counts_L2E, self.group)
        self.loads.append(counts_L2E[:, 0])
        if self.kind in ("switch", "gshard"):
            which = 0 if self.kind == "switch" else 1
            tokens = int(counts_L2E[0, 1].sum())  # each has one first choice
            for routings, counts_2E in zip(layers, counts_L2E, strict=True):
                loss = loss + self.o.coefficient * balance_loss(routings, counts_2E[which]) / tokens
        return loss

    def step(self) -> None:
        """Move the biases by the loads of this step."""
        if self.kind == "bias":
            self.move_biases(self.loads[-1])

    def counts(self, layers: list[list[Routing]]) -> Tensor:
        """Return all choices and first choices per expert here, int64 [L, 2, E], dropped ones included."""
        experts = [torch.cat([r.experts_BSK.flatten(0, 1) for r in routings]) for routings in layers]
        E = layers[0][0].scores_BSE.shape[-1]
        return torch.stack(
            [torch.stack([load(chosen_TK, E), load(chosen_TK[:, 0], E)]) for chosen_TK in experts]
        )

    def move_biases(self, loads_LE: Tensor) -> None:
        """Move the biases of all layers."""
        for moe, load_E in zip(mixtures(self.model), loads_LE, strict=True):
            move_bias(cast(Tensor, moe.router.choice_bias), load_E, self.o.rate)


def balanced_steps(job: Job[BalanceOptions], balance: Balance) -> Iterator[Tensor]:
    """Train with experts balanced by all choices of the global batch; yield the loss of each batch."""
    model, group = job.model, job.group
    optimizer = job.optimizer(model)  # SGD or AdamW: the runner's choice
    for batch in job.batches():  # samples of this rank
        count = batch.count_targets(group)  # of all ranks: an all-reduce of 8 bytes
        losses = []
        optimizer.zero_grad()
        for tokens_BS, targets_BS in batch:
            loss_sum, _ = cross_entropy_sum(model(tokens_BS), targets_BS)
            losses.append(loss_sum / count)
        loss = torch.stack(losses).sum() + balance.loss()  # known only after the last forward pass
        loss.backward()
        balance.step()
        sum_gradients(model.parameters(), job.mesh)  # of dense parameters; an expert's is complete
        optimizer.step()
        yield total([loss.detach()], group)


def train(job: Job[BalanceOptions], sent: BalancedBytes) -> Iterator[Tensor]:
    """Train with the experts spread over the ranks and balanced by the version."""
    sent.exchanges[job.version] = expert_parallel(job.model, job.group)
    with_capacity("dropless", job.model, job.options)
    balance = Balance(job.version, job.model, job.group, job.options)
    sent.loads[job.version] = balance.loads
    return balanced_steps(job, balance)


def train_plain(job: Job[BalanceOptions]) -> Iterator[Tensor]:
    """Train the plain model on one device, balanced by the whole batch."""
    with_capacity("dropless", job.model, job.options)
    return balanced_steps(job, Balance(job.version, job.model, job.group, job.options))


def main(rt: Runtime, o: BalanceOptions) -> bool:
    """Prove each version, then show its effect on the load."""
    check(rt, o, VERSIONS)
    lesson = replace(ep_moe.lesson(dict.fromkeys(VERSIONS, train), BalancedBytes()), one_device=train_plain)
    right = prove(rt, replace(o, plot=None), lesson)
    if o.curve_steps:
        show_balance(rt, o, train, o.curve_steps)
    return right


if __name__ == "__main__":
    run(main, BalanceOptions, versions=VERSIONS)
