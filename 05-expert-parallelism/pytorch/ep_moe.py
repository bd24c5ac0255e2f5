"""Expert parallelism: whole experts on ranks; each token travels to its experts and back.

    y_t = sum over the k chosen experts e of  w_te expert_e(x_t),     expert_e on rank r(e)

    rank 0 has tokens a b and experts 0 1, rank 1 tokens c d and experts 2 3; k = 2

a0 is token a's row for expert 0; | stands between ranks, senders or experts:

              rows by expert   all-to-all, by sender   transposed, by expert   experts, then the way back
    rank 0    a0 b1 | a2 b3    a0 b1 | d0 c1           a0 d0 | b1 c1           ... weighted and summed: y_a y_b
    rank 1    d0 c1 | c2 d3    a2 b3 | c2 d3           a2 c2 | b3 d3           ... weighted and summed: y_c y_d

The ranks see different tokens, so gradients of dense parameters are summed over "ep". An expert gets the tokens
of all ranks: its gradient is complete on its rank, and is not summed over "ep". common/comm/placement.py
derives both from one fact, that experts are Shard(0) along "ep".

    both        the ranks first exchange the numbers of rows for each expert (E integers)
    dropless    then they exchange exactly these rows
    capacity    an expert takes C = ceil(c k S / E) tokens of a sequence (c: --capacity-factor): it gets C rows per
                sequence, some empty;
                tokens over the capacity are dropped, and empty rows are computed for nothing

Cost: each pass, forward and backward, sends D numbers for every row that goes to another rank, and D for every
row that came from one, in each layer; with even load k t (n-1)/n rows go and as many come. The numbers of rows
add 8 bytes for each expert of another rank, in the forward pass. Once per step the gradients of dense parameters
are all-reduced. Memory: experts, their gradients and states 1/n; dropless, a rank may get any number of rows. The
slowest rank sets the pace: ep_load_balance.py. k is the model's; a shared expert is dense and stays whole, outside
of `moe.experts`. Lepikhin et al., "GShard",
arXiv:2006.16668, section 3; dropless: Gale et al., "MegaBlocks", arXiv:2211.15841.

    python ep_moe.py --nproc 4      torchrun --nproc_per_node=4 ep_moe.py      mpirun -np 4 python ep_moe.py
    python ep_moe.py --nproc 3 --model switch-tiny     # 8 experts on 3 ranks: 3, 3 and 2

B batch  S sequence  t tokens of a rank  R rows  D width  E experts, e of this rank  C capacity  k experts a token
n ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group, collectives, sizes_of
from common.comm.placement import shard, sum_gradients
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson, prove, time_in_turn
from common.lesson.job import Job, one_device, total
from common.lesson.runner import console, run
from common.models.moe import Experts
from common.models.transformer import Transformer, cross_entropy_sum, need_transformer

from ep_costs import RoutedBytes, rows_table
from ep_training import MoEOptions, check, check_split, mixtures

VERSIONS = ("dropless", "capacity")


def transposed(x_RD: Tensor, rows_ab: Tensor) -> Tensor:
    """Reorder blocks of rows from order (a, b) to (b, a); block (i, j) has rows_ab[i, j] rows.

    The inverse is transposed(y_RD, rows_ab.T).
    """
    a, b = rows_ab.shape
    blocks = x_RD.split(rows_ab.flatten().tolist())
    return torch.cat([blocks[i * b + j] for j in range(b) for i in range(a)])


class ExpertExchange:
    """Replacement for a mixture's experts: sends rows to the ranks of their experts, and results back.

    rows_sent, rows_received: rows to and from other ranks, in each call since the last `forget`.
    """

    def __init__(self, experts: Experts, group: Group, E: int) -> None:
        self.experts, self.group, self.sizes = experts, group, sizes_of(E, group.size)
        self.rows_sent: list[int] = []
        self.rows_received: list[int] = []
        self.last_sent: list[int] = []  # rows to each rank in the last call

    def __call__(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Apply the experts to rows_RD, sorted by expert, counts_E for each; return results in that order."""
        group, e = self.group, self.sizes[self.group.rank]
        # comm, not collectives: counts need no gradient. Row i: numbers of rows from rank i for this rank's experts
        counts_ne = comm.all_to_all(counts_E, group, self.sizes, [e] * group.size).view(group.size, e)
        send = [int(counts.sum()) for counts in counts_E.split(self.sizes)]
        receive = counts_ne.sum(1).tolist()
        self.note(send, receive)
        x_RD = collectives.all_to_all(rows_RD, group, send, receive)  # its adjoint sends the gradients back
        y_RD = self.experts(transposed(x_RD, counts_ne), counts_ne.sum(0))
        return collectives.all_to_all(transposed(y_RD, counts_ne.T), group, receive, send)

    def note(self, send: list[int], receive: list[int]) -> None:
        """Record the numbers of rows, from which the bytes by formula follow."""
        self.last_sent = send
        self.rows_sent.append(sum(send) - send[self.group.rank])
        self.rows_received.append(sum(receive) - receive[self.group.rank])

    def forget(self) -> None:
        """Clear the recorded numbers of rows, which grow with every call: a trainer calls this once per step."""
        self.rows_sent.clear()
        self.rows_received.clear()


def keep_own_experts(experts: Experts, group: Group) -> None:
    """Keep only this rank's experts, in place; the ranks' numbers of experts differ by at most one."""
    for module in experts.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, shard(parameter, group, 0))


def expert_parallel(model: Transformer, group: Group) -> list[ExpertExchange]:
    """Spread the experts over the ranks of `group`, in place; the same whole model must be on all of them.

    Each rank then runs the model on its own samples, with the same number of passes on every rank; call
    `placement.sum_gradients` after the last backward pass. Returns the exchange of each layer. Raises
    UsageError where a rank would have no expert, TypeError for another model.
    """
    need_transformer(model, "expert_parallel", "ExpertExchange in place of a loop over experts")
    check_split(model.config.experts, group.size)
    exchanges = []
    for moe in mixtures(model):
        keep_own_experts(moe.experts, group)
        exchanges.append(ExpertExchange(moe.experts, group, model.config.experts))
        moe.compute = exchanges[-1]
    return exchanges


def with_capacity(name: str, model: nn.Module, o: MoEOptions) -> nn.Module:
    """Set the capacity of this version in the model, and return the model."""
    for moe in mixtures(model):
        moe.capacity_factor = o.capacity_factor if name == "capacity" else None
    return model


def train(job: Job[MoEOptions], sent: RoutedBytes) -> Iterator[Tensor]:
    """Train with the experts spread over the ranks; yield the loss of each global batch."""
    model, group = job.model, job.group
    sent.exchanges[job.version] = expert_parallel(model, group)
    with_capacity(job.version, model, job.options)
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


def train_plain(job: Job[MoEOptions]) -> Iterator[Tensor]:
    """Train on one device, with the capacity of the version."""
    with_capacity(job.version, job.model, job.options)
    return one_device(job)


def lesson(loops: Mapping[str, Callable[..., Iterator[Tensor]]], sent: RoutedBytes) -> Lesson:
    """Return the lesson of these versions, whose training loops fill `sent`."""
    versions = {name: partial(loop, sent=sent) for name, loop in loops.items()}
    return Lesson("ep", versions, sent.step_bytes, run_bytes=sent.run_bytes, one_device=train_plain)


def main(rt: Runtime, o: MoEOptions) -> bool:
    """Prove the versions, or with --benchmark time them; then show the rows sent from rank to rank."""
    check(rt, o, VERSIONS)
    sent = RoutedBytes()
    right = (time_in_turn if o.benchmark else prove)(rt, o, lesson(dict.fromkeys(VERSIONS, train), sent))
    console(rt).print(rows_table(rt, o, sent))
    return right


if __name__ == "__main__":
    run(main, MoEOptions, versions=VERSIONS)
