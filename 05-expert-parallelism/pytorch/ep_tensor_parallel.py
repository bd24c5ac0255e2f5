"""Tensor parallelism for experts: a slice of every expert on each rank, and all tokens to all ranks.

    experts    whole experts on ranks     each token to its k experts' ranks     y_t from k ranks, weighted
    tensor     a slice of each on ranks   each token to all ranks                y_t is a sum over ranks

    tensor:    x_bSD --all-gather--> x_BSD  route, gate and up by columns, down by rows  --reduce-scatter--> y_bSD

Inside an expert this is chapter 03: columns, then rows, then a sum. Combining is linear, so each rank first
takes the weighted sum of its partial results over a token's experts, and the sum over ranks follows: one
message of T D numbers instead of k T D. Every rank routes all tokens, but its slices contribute only a part
of the router's gradient, so this gradient is partial, as for all dense parameters. The slices' gradients are
complete, since each slice gets all tokens.

Cost, t tokens of a rank, forward and backward: experts 4 k t D (n-1)/n numbers per layer if the load is even,
tensor 4 t D (n-1) always, n / k times as many. For n < k slices send less. Every rank does 1/n of the
experts' work for any routing, so there is nothing to balance; but products are n times narrower, and every
rank routes all tokens.

    python ep_tensor_parallel.py --nproc 2      torchrun --nproc_per_node=2 ep_tensor_parallel.py
    OMP_NUM_THREADS=1 mpirun -np 2 --bind-to core python ep_tensor_parallel.py --benchmark --dtype float32

B batch, b of a rank  S sequence  D width  E experts  k experts a token  n ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from common.comm import Group, collectives
from common.comm.placement import shard, sum_gradients
from common.launch.runtime import Runtime
from common.lesson.comparison import prove, time_in_turn
from common.lesson.job import Job, total
from common.lesson.runner import run
from common.models.transformer import Transformer, cross_entropy_sum

import ep_moe
from ep_costs import RoutedBytes, SlicedBytes
from ep_training import MoEOptions, check, check_equal_samples, check_slices, mixtures


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
        moe.register_forward_pre_hook(
            lambda _, given: (collectives.gather(given[0], group, 0, gradient="partial"),)
        )
        moe.register_forward_hook(lambda _, given, y_BSD: collectives.reduce_scatter(y_BSD, group, 0))


def train(job: Job[MoEOptions], sent: RoutedBytes) -> Iterator[Tensor]:
    """Train with a slice of every expert on each rank; yield the loss of each global batch."""
    model, group = job.model, job.group
    slice_experts(model, group)
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
        sum_gradients(model.parameters(), job.mesh)  # of dense parameters; a slice's is complete
        optimizer.step()
        yield total(losses, group)


VERSIONS: dict[str, Callable[..., Iterator[Tensor]]] = {"experts": ep_moe.train, "tensor": train}


def main(rt: Runtime, o: MoEOptions) -> bool:
    """Prove both versions, or with --benchmark time them."""
    check(rt, o, VERSIONS)
    check_slices(o.model_config(), rt.world_size)
    check_equal_samples(rt, o)
    return (time_in_turn if o.benchmark else prove)(rt, o, ep_moe.lesson(VERSIONS, SlicedBytes()))


if __name__ == "__main__":
    run(main, MoEOptions, versions=VERSIONS)
