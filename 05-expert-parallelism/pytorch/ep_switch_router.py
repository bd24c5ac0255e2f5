"""Routing on its own: ways to assign tokens to experts, and their effect on the load.

    y_t = x_t + sum over e of  G_te expert_e(x_t)             p = softmax(W x): the router's scores

    A router determines the matrix G, mostly zeros. A row is a token, a column an expert:

        top-1, C = 2          top-2               top-2 normalised      expert choice, C = 2
        .7   .    .           .7   .2   .         .8   .2   .           .7   .    .
        .6   .    .           .6   .    .3        .7   .    .3          .6   .    .3
        dropped: x passes     .5   .4   .         .6   .4   .           .    .4   .
        .    .8   .           .    .8   .1        .    .9   .1          .    .8   .1

    top-1             Switch (arXiv:2101.03961, section 2.1). The weight is p, not 1: else no gradient would reach W.
    capacity          an expert takes C = ceil(c k S / E) tokens of a sequence, in the order of their positions: shapes
                      and times are fixed; a token whose expert is full keeps only x, on the residual path.
    top-k             GShard, Mixtral (arXiv:2401.04088): k experts; normalised, the weights sum to 1 for any p.
    expert choice     each expert takes its C best tokens (arXiv:2202.09368): perfect balance by construction, but not
                      causal: routing sees later tokens, which are unknown while a model generates text.
    jitter            W gets x times uniform numbers in 1 -+ eps (Switch, section 2.4): near ties are resolved randomly.
    z-loss            mean of log(sum of exp(logits))^2 (ST-MoE, arXiv:2202.08906, eq. 5): keeps the logits small.

Cost: the router multiplies T E D numbers; the experts compute k T rows (without capacity) or E C B rows
(with), some of them empty. The lesson trains a small model on real text, twice: plain and with z-loss. Then
each router assigns the same tokens by the scores of the first of these models. Each rank routes its own
samples; the summed loads must be those of one device.

    python ep_switch_router.py --nproc 2 --plot load.png    torchrun --nproc_per_node=2 ep_switch_router.py
    mpirun -np 2 python ep_switch_router.py

B batch  S sequence  D width  E experts  k experts a token  C capacity
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from common import random
from common.comm.checked.asked import if_asked
from common.comm.mesh import Mesh
from common.comm.placement import sum_gradients
from common.launch.command_line import Count, Within
from common.launch.runtime import Runtime
from common.lesson.comparison import check
from common.lesson.job import Job, total
from common.lesson.runner import console, run
from common.lesson.training import Batches, make_model
from common.models.transformer import Transformer, cross_entropy_sum

from ep_loads import models_table, prove_loads
from ep_training import ExpertOptions, drain, mixtures, observed

VERSIONS = ("plain", "z-loss")


@dataclass
class RouterOptions(ExpertOptions, without=("benchmark", "scaling", "json")):
    """Options: the models to train, and the settings of the routers."""

    model: str = "switch-tiny"
    """Name of a model with experts in common/models/configs.py."""
    steps: Count = 60
    """Training steps before the tokens are routed."""
    versions: tuple[str, ...] = VERSIONS
    """Models to train: plain, z-loss."""
    capacity_factor: Annotated[float, Within(1e-6, 1000)] = 1.25
    """Capacity factor c: the multiple of an even share that an expert takes."""
    jitter: Annotated[float, Within(0, 1)] = 0.01
    """Half-width eps of the jitter: router inputs are multiplied by numbers from 1 - eps to 1 + eps."""
    z_coefficient: Annotated[float, Within(0, 1000)] = 1e-2
    """Coefficient of the z-loss; ST-MoE's is 1e-3, for longer training."""


def top_k(scores_BSE: Tensor, k: int, normalised: bool = False) -> Tensor:
    """Return G_BSE by which each token takes its k best experts."""
    weights_BSk, experts_BSk = scores_BSE.topk(k, -1)
    if normalised:
        weights_BSk = weights_BSk / weights_BSk.sum(-1, keepdim=True)
    return torch.zeros_like(scores_BSE).scatter(-1, experts_BSk, weights_BSk)


def with_capacity(gates_BSE: Tensor, C: int) -> Tensor:
    """Return G_BSE with only the first C tokens of each sequence for each expert."""
    return gates_BSE * ((gates_BSE > 0).cumsum(1) <= C)


def expert_choice(scores_BSE: Tensor, C: int) -> Tensor:
    """Return G_BSE by which each expert takes its C best tokens of each sequence."""
    weights_BCE, tokens_BCE = scores_BSE.topk(C, 1)
    return torch.zeros_like(scores_BSE).scatter(1, tokens_BCE, weights_BCE)


def jittered(x_BSD: Tensor, epsilon: float, seed: int, first_sample: int) -> Tensor:
    """Return x times uniform numbers in [1 - epsilon, 1 + epsilon), set by the place in the global batch."""
    place = first_sample * x_BSD[0].numel() + np.arange(x_BSD.numel())
    uniform = torch.from_numpy(random.uniform(seed, random.stream_of("jitter"), place)).view_as(x_BSD)
    return x_BSD * (1 + epsilon * (2 * uniform - 1)).to(x_BSD)


def z_loss_sum(logits_BSE: Tensor) -> Tensor:
    """Return the sum over tokens of log(sum of exp(logits))^2."""
    return logits_BSE.logsumexp(-1).square().sum()


def train(job: Job[RouterOptions], logits_seen: list[Tensor]) -> Iterator[Tensor]:
    """Train with all experts on every rank, and its own samples; yield the loss of each global batch.

    logits_seen: receives the routers' logits of each pass, [layers, B, S, E].
    """
    model, group, o = job.model, job.group, job.options
    seen = observed(model)
    optimizer = job.optimizer(model)
    for batch in job.batches():
        count, losses = batch.count_targets(group), []  # of all ranks: an all-reduce of 8 bytes
        optimizer.zero_grad()
        for tokens_BS, targets_BS in batch:
            loss_sum, _ = cross_entropy_sum(model(tokens_BS), targets_BS)
            logits = [routing.logits_BSE for layer in drain(seen) for routing in layer]
            logits_seen[:] = [torch.stack(logits).detach()]
            if job.version == "z-loss":  # a sum over tokens, like the cross-entropy: the same on every mesh
                loss_sum = loss_sum + o.z_coefficient * sum(map(z_loss_sum, logits), loss_sum.new_zeros(()))
            loss = loss_sum / count
            loss.backward()
            losses.append(loss.detach())
        sum_gradients(model.parameters(), job.mesh)  # samples are split, weights whole
        optimizer.step()
        yield total(losses, group)


def trained(rt: Runtime, o: RouterOptions, name: str) -> tuple[Transformer, float, Tensor]:
    """Train `o.steps` steps; return (the model, its last loss, its routers' logits in the last pass)."""
    mesh, logits, adamw = (
        Mesh(rt.world, dp=rt.world_size),
        list[Tensor](),
        partial(torch.optim.AdamW, lr=3e-3),
    )
    job = Job(rt, o, name, make_model(o, rt.device), mesh, "dp", adamw, o.steps)
    with if_asked(mesh):
        *_, loss = train(job, logits)
    return job.model, loss.item(), logits[0]


@torch.no_grad()
def routers(o: RouterOptions, E: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return each way of routing by name, a function scores_BSE -> G_BSE."""

    def C(k: int, factor: float) -> int:
        return min(o.sequence, math.ceil(factor * k * o.sequence / E))

    c, two = o.capacity_factor, min(2, E)
    return {
        "top-1": partial(top_k, k=1),
        "top-1, capacity 1": lambda p: with_capacity(top_k(p, 1), C(1, 1)),
        f"top-1, capacity {c:g}": lambda p: with_capacity(top_k(p, 1), C(1, c)),
        f"top-{two}": partial(top_k, k=two),
        f"top-{two}, normalised": partial(top_k, k=two, normalised=True),
        f"top-{two}, capacity {c:g}": lambda p: with_capacity(top_k(p, two), C(two, c)),
        "expert choice": partial(expert_choice, C=C(1, 1)),
    }


def route(model: Transformer, o: RouterOptions, batches: Batches) -> dict[str, Tensor]:
    """Return each router's G_BSE for this rank's samples of a batch that training did not use.

    All route the input of the last layer's router by that router's matrix.
    """
    inputs: list[Tensor] = []
    router = mixtures(model)[-1].router
    hook = router.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    model(torch.cat([tokens_BS for tokens_BS, _ in batches.parts(o.steps)]))
    hook.remove()
    (x_BSD,), w_ED = inputs, router.weight.detach()
    scores_BSE = (x_BSD @ w_ED.T).softmax(-1)
    shaken_BSE = (jittered(x_BSD, o.jitter, o.seed, batches.samples()[0][0]) @ w_ED.T).softmax(-1)
    gates = {name: f(scores_BSE) for name, f in routers(o, len(w_ED)).items()}
    return gates | {f"top-1, jitter {o.jitter:g}": top_k(shaken_BSE, 1)}


def main(rt: Runtime, o: RouterOptions) -> bool:
    """Train, route the same tokens by each router, and compare the loads with those of one device."""
    check(rt, VERSIONS, o)
    models = {name: trained(rt, o, name) for name in o.versions}
    console(rt).print(models_table(o, {name: (loss, logits) for name, (_, loss, logits) in models.items()}))
    model, *_ = models[o.versions[0]]
    return prove_loads(rt, o, lambda batches: route(model, o, batches))


if __name__ == "__main__":
    run(main, RouterOptions)
