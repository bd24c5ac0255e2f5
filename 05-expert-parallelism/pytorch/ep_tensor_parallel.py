"""Experts without an all-to-all: all tokens to all ranks, which hold whole experts (naive) or a slice of each.

    naive      whole experts on ranks     each token to all ranks                y_t is a sum over ranks
    experts    whole experts on ranks     each token to its k experts' ranks     y_t from k ranks, weighted
    tensor     a slice of each on ranks   each token to all ranks                y_t is a sum over ranks

    naive:     x_bSD -all-gather-> x_BSD  route, own experts on their rows, 0 for the others  -reduce-scatter-> y_bSD
    tensor:    x_bSD -all-gather-> x_BSD  route, gate and up by columns, down by rows         -reduce-scatter-> y_bSD

Inside an expert `tensor` is chapter 03: columns, then rows, then a sum. Combining is linear, so each rank first
takes the weighted sum of its partial results over a token's experts, and the sum over ranks follows: one
message of T D numbers instead of k T D. Every rank routes all tokens, but its experts or slices contribute only a
part of the router's gradient, so this gradient is partial, as for all dense parameters. The gradients of experts
and slices are complete, since each gets all of its tokens.

Cost, t tokens of a rank, forward and backward: experts 4 k t D (n-1)/n numbers per layer if the load is even,
naive and tensor 4 t D (n-1) always, n / k times as many. For n < k they send less. Every rank holds and routes all
tokens. With slices every rank does 1/n of the experts' work for any routing, so there is nothing to balance; but
products are n times narrower. The naive version waits for the busiest rank, as `experts` does.

    python ep_tensor_parallel.py --nproc 2      torchrun --nproc_per_node=2 ep_tensor_parallel.py
    OMP_NUM_THREADS=1 mpirun -np 2 --bind-to core python ep_tensor_parallel.py --benchmark --dtype float32

B batch, b of a rank  S sequence  D width  E experts  k experts a token  n ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from common.comm import Group, collectives, sizes_of
from common.comm.placement import shard, sum_gradients
from common.launch.runtime import Runtime
from common.lesson.comparison import prove, time_in_turn
from common.lesson.job import Job, total
from common.lesson.runner import run
from common.models.moe import Compute, Experts, MoE
from common.models.transformer import Transformer, cross_entropy_sum

import ep_moe
from ep_costs import RoutedBytes, SlicedBytes
from ep_moe import keep_own_experts
from ep_training import MoEOptions, check, check_equal_samples, check_slices, mixtures


def exchange_all_tokens(moe: MoE, group: Group) -> None:
    """Let a mixture take the tokens of all ranks, and return this rank's part of the sum of all results."""
    moe.register_forward_pre_hook(
        lambda _, given: (collectives.gather(given[0], group, 0, gradient="partial"),)
    )
    moe.register_forward_hook(lambda _, given, y_BSD: collectives.reduce_scatter(y_BSD, group, 0))


def own_rows(experts: Experts, group: Group, E: int) -> Compute:
    """Return the map that applies this rank's experts to their rows; all other rows of its result are 0."""
    sizes = sizes_of(E, group.size)

    def compute(rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        counts = counts_E.split(sizes)
        rows = rows_RD.split([int(here_e.sum()) for here_e in counts])
        results = [torch.zeros_like(x_RD) for x_RD in rows]
        results[group.rank] = experts(rows[group.rank], counts[group.rank])
        return torch.cat(results)

    return compute


def gather_tokens(model: Transformer, group: Group) -> None:
    """Spread the experts over the ranks of `group` and send all tokens to all ranks, in place: the naive version.

    Each rank then runs the model on its own samples, the same number on every rank.
    """
    for moe in mixtures(model):
        keep_own_experts(moe.experts, group)
        moe.compute = own_rows(moe.experts, group, model.config.experts)
        exchange_all_tokens(moe, group)


def slice_experts(model: Transformer, group: Group) -> None:
    """Cut every expert over the ranks of `group`, in place; the same whole model must be on all of them.

    Each rank then runs the model on its own samples, the same number on every rank. Raises UsageError where
    `check_slices` does.
    """
    check_slices(model.config, group.size)
    for moe in mixtures(model):
        for name, part in moe.experts.named_children():
            rows = 2 if name == "down_proj" else 1  # weight_EOI: columns are O, rows are I
            part.weight = shard(part.weight, group, rows)  # type: ignore[arg-type]
        exchange_all_tokens(moe, group)


def train(
    job: Job[MoEOptions], sent: RoutedBytes, split: Callable[[Transformer, Group], None] = slice_experts
) -> Iterator[Tensor]:
    """Train with all tokens on all ranks and the experts split by `split`; yield the loss of each global batch."""
    model, group = job.model, job.group
    split(model, group)
    optimizer = job.optimizer(model)  # SGD or AdamW: the runner's choice
    for batch in job.batches():  # samples of this rank
        count = batch.count_targets(group)  # of all ranks: an all-reduce of 8 bytes
        losses = []
        optimizer.zero_grad()
        for tokens_BS, targets_BS in batch:
            loss_sum, _ = cross_entropy_sum(model(tokens_BS), targets_BS)
            loss = loss_sum / count
            loss.backward()
            losses.append(loss.detach())
        sum_gradients(model.parameters(), job.mesh)  # of dense parameters; an expert's is complete
        optimizer.step()
        yield total(losses, group)


VERSIONS: dict[str, Callable[..., Iterator[Tensor]]] = {
    "naive": partial(train, split=gather_tokens),
    "experts": ep_moe.train,
    "tensor": train,
}


def main(rt: Runtime, o: MoEOptions) -> bool:
    """Prove all versions, or with --benchmark time them."""
    check(rt, o, VERSIONS)
    if "tensor" in o.versions:
        check_slices(o.model_config(), rt.world_size)
    check_equal_samples(rt, o)
    return (time_in_turn if o.benchmark else prove)(rt, o, ep_moe.lesson(VERSIONS, SlicedBytes()))


if __name__ == "__main__":
    run(main, MoEOptions, versions=VERSIONS)
