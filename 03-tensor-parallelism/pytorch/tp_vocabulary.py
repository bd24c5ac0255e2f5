"""The two ends of the model split along the vocabulary: the embedding, the head, and a loss that never gathers logits.

    -log softmax(z)[t]  =  log(sum over v of exp(z_v - m)) - (z_t - m),     m = max over v of z_v

                 rank 0: tokens 0 1 2        rank 1: tokens 3 4 5
    embedding    rows of 0 1 2; zeros        rows of 3 4 5; zeros         P -> R  all-reduce
                 for tokens of others        for tokens of others
    logits       z0 z1 z2                    z3 z4 z5                     S: never gathered
    m            max of z0 z1 z2             max of z3 z4 z5              all-reduce (max), 1 number per token
    sum, z_t     of exp(z - m) over 0 1 2;   of exp(z - m) over 3 4 5;    all-reduce, 2 numbers per token
                 z_t - m if t is here        z_t - m if t is here
    gradient     softmax of z0 z1 z2,        softmax of z3 z4 z5,         S: nothing to send
                 minus 1 at t if here        minus 1 at t if here

P partial sums, R the same on all ranks, S shards. All else is whole on every rank and computes the same on the same
batch, so no gradient is summed. Shards differ by one token where n does not divide V.

Logits are the largest activation of a small model with a large vocabulary: LLaMA 3's have 128,256 numbers per
token, 31 times its width of 4,096. This loss reduces three numbers per token, where gathering the logits
sends V (n-1)/n (Shoeybi et al., 2019, arXiv:1909.08053, section 3). A tied head uses the embedding's shard a second
time.

Cost, N tokens, n ranks: per rank, the loss sends 2(n-1)/n of 3 N numbers. The embedding all-reduces N D numbers
forward, the head N D backward. `gathered` gathers the logits instead and cuts their gradient, which sends nothing.
Memory: logits, their gradient and the softmax are N V/n numbers each.

    python tp_vocabulary.py --nproc 4     torchrun --nproc_per_node=4 tp_vocabulary.py
    mpirun -np 4 python tp_vocabulary.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import comm
from common.comm import Group, collectives, sizes_of
from common.comm.ledger import show_bytes
from common.comm.placement import shard
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson
from common.lesson.job import Job, total
from common.lesson.runner import console, run
from common.models.transformer import Transformer, cross_entropy_sum
from common.utils.memory import peak_allocated

from tp_costs import vocabulary_bytes
from tp_training import TensorOptions, lesson, show, tp_group

VERSIONS = ("gathered", "parallel")
Map = Callable[[Tensor], Tensor]


class VocabularyParallelEmbedding(nn.Embedding):
    """Embedding split by tokens: maps tokens_BS to x_BSD, zeros for other ranks' tokens, then `leave`.

    embedding: the whole table, the same on all ranks. leave: by default the sum over ranks.
    """

    def __init__(self, embedding: nn.Embedding, group: Group, leave: Map | None = None) -> None:
        mine = shard(embedding.weight, group, 0)
        super().__init__(mine.shape[0], mine.shape[1], _weight=mine)
        self.vocabulary, self.weight = embedding.num_embeddings, mine
        self.begin = sum(sizes_of(embedding.num_embeddings, group.size)[: group.rank])
        self.leave = leave or (lambda x: collectives.reduce(x, group))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        _check(tokens_BS, self.vocabulary)
        row_BS, inside_BS = _inside(tokens_BS, self.begin, self.weight.shape[0])
        return self.leave(torch.where(inside_BS[..., None], F.embedding(row_BS, self.weight), 0))


def _check(tokens: Tensor, vocabulary: int) -> None:
    """Raise IndexError for a token that no rank has. Not on a GPU, where the check would synchronise."""
    if tokens.device.type == "cpu" and tokens.numel() and not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise IndexError(f"tokens {tokens.min()} to {tokens.max()} of a vocabulary of {vocabulary}")


def _inside(tokens: Tensor, begin: int, length: int) -> tuple[Tensor, Tensor]:
    """Return (index of each token in this rank's rows, 0 for other ranks' tokens; mask of its own)."""
    inside = (tokens >= begin) & (tokens < begin + length)
    return torch.where(inside, tokens - begin, 0), inside


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy of each token, from this rank's shard of the logits.

    Label smoothing would sum a third number, shifted_Nv.sum(-1) before exp_, and add -eps / V to dlogits.
    """

    @staticmethod
    def forward(ctx: Any, logits_Nv: Tensor, targets_N: Tensor, begin: int, group: Group) -> Tensor:
        largest_N = logits_Nv.amax(-1)
        comm.all_reduce(largest_N, group, "max")
        shifted_Nv = logits_Nv - largest_N[:, None]
        column_N, inside_N = _inside(targets_N, begin, logits_Nv.shape[1])
        at_target_N = torch.where(inside_N, shifted_Nv.gather(1, column_N[:, None])[:, 0], 0)
        sums_2N = torch.stack(
            [shifted_Nv.exp_().sum(-1), at_target_N]
        )  # exp_ in place: at_target_N is a copy
        comm.all_reduce(sums_2N, group)
        softmax_Nv = shifted_Nv.div_(sums_2N[0][:, None])
        ctx.save_for_backward(softmax_Nv, column_N, inside_N)
        return sums_2N[0].log() - sums_2N[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        softmax_Nv, column_N, inside_N = ctx.saved_tensors
        (dloss_N,) = grads
        dlogits_Nv = softmax_Nv * dloss_N[:, None]
        dlogits_Nv.scatter_add_(1, column_N[:, None], -(dloss_N * inside_N)[:, None])
        return dlogits_Nv, None, None, None


def cross_entropy_sum_parallel(
    logits_BSv: Tensor, targets_BS: Tensor, group: Group, vocabulary: int, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Return `cross_entropy_sum` of logits split along the vocabulary; all ranks get the same result.

    vocabulary: the number of logits of all ranks together. On a CPU, raises IndexError for targets that are
    neither in the vocabulary nor `ignore_index`.
    """
    precise = torch.promote_types(logits_BSv.dtype, torch.float32)
    begin = sum(sizes_of(vocabulary, group.size)[: group.rank])
    targets_N = targets_BS.flatten()
    counted_N = targets_N != ignore_index
    _check(targets_N[counted_N], vocabulary)
    loss_N = _CrossEntropy.apply(logits_BSv.flatten(0, -2).to(precise), targets_N, begin, group)
    return torch.where(counted_N, loss_N, 0).sum(), counted_N.sum()


def split_vocabulary(
    model: Transformer, group: Group, enter: Map | None = None, leave: Map | None = None
) -> Transformer:
    """Split embedding, head and loss along the vocabulary, in place.

    enter: applied to the head's input, by default `copy`; leave: to the embedding's result, by default the sum.
    """
    into = enter or (lambda x: collectives.copy(x, group))
    model.embed_tokens = VocabularyParallelEmbedding(model.embed_tokens, group, leave)
    if model.lm_head is not None:
        model.lm_head.weight = shard(model.lm_head.weight, group, 0)
    if model.unembed.bias is not None:
        model.unembed.bias = shard(model.unembed.bias, group, 0)
    model.unembed.register_forward_pre_hook(lambda _, given: (into(given[0]), *given[1:]))
    model.loss = partial(cross_entropy_sum_parallel, group=group, vocabulary=model.config.vocabulary)
    return model


def gather_logits(model: Transformer, group: Group) -> None:
    """Gather the logits' shards and use the plain loss, so that every rank holds all logits."""
    sizes = sizes_of(model.config.vocabulary, group.size)
    model.unembed.register_forward_hook(
        lambda _, given, logits_BSv: collectives.gather(logits_BSv, group, -1, sizes=sizes)
    )
    model.loss = cross_entropy_sum


def train(job: Job[TensorOptions]) -> Iterator[Tensor]:
    """Train with embedding, head and loss split along the vocabulary; yield the loss of each batch."""
    model, group = job.model, job.group
    split_vocabulary(model, group)
    if job.version == "gathered":
        gather_logits(model, group)
    optimizer = job.optimizer(model)  # SGD or AdamW: the runner's choice
    for batch in job.batches():  # the same on all ranks
        count = batch.count_targets()
        losses = []
        optimizer.zero_grad()
        for tokens_BS, targets_BS in batch:
            loss_sum, _ = model.loss(model(tokens_BS), targets_BS)
            loss = loss_sum / count
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        yield total(losses)


LESSON = Lesson("tp", dict.fromkeys(VERSIONS, train), vocabulary_bytes)


def measure_memory(rt: Runtime, tokens: int = 512, vocabulary: int = 8192) -> bool:
    """Show the loss's peak memory in both passes, beyond the shard of the logits, and by formula.

    parallel: softmax and gradient, 2 N V/n numbers. gathered: more than 3 N V, the logits, their log-softmax
    and its gradient. The rest is a few numbers per token. True if the peak of `parallel` is within 5 % of its
    formula.
    """
    group = tp_group(rt)
    sizes, targets_N = sizes_of(vocabulary, group.size), torch.arange(tokens, device=rt.device)
    logits_Nv = torch.randn(tokens, sizes[group.rank], device=rt.device, requires_grad=True)

    def gathered() -> None:
        whole_NV = collectives.gather(logits_Nv, group, -1, sizes=sizes)
        cross_entropy_sum(whole_NV, targets_N)[0].backward()

    def parallel() -> None:
        cross_entropy_sum_parallel(logits_Nv, targets_N, group, vocabulary)[0].backward()

    peaks = []
    for call in (gathered, parallel):
        call()  # warm up: some allocations happen only once
        logits_Nv.grad = None
        peaks.append(peak_allocated(call, rt.device.type))
    formula = 2 * tokens * sizes[group.rank] * 4
    rows = [
        ("gathered", show_bytes(peaks[0]), f"at least {show_bytes(3 * tokens * vocabulary * 4)}"),
        ("parallel", show_bytes(peaks[1]), show_bytes(formula)),
    ]
    title = f"peak of the loss, {tokens} tokens, {vocabulary} logits, float32"
    show(rt, title, ("loss", "measured, rank 0", "formula"), rows)
    right = abs(peaks[1] / formula - 1) <= 0.05
    if not right:
        console(rt).print("the loss does NOT hold what the formula says")
    return right


def main(rt: Runtime, o: TensorOptions) -> bool:
    """Measure the memory of the loss, then prove a Transformer; with --benchmark only time it."""
    return lesson(rt, o, LESSON, lambda: measure_memory(rt))


if __name__ == "__main__":
    run(main, TensorOptions, versions=VERSIONS)
