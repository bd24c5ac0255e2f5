"""The two ends of the model split along the vocabulary: the embedding, the head, and a loss that never gathers logits.

    -log softmax(z)[t]  =  log(sum over v of exp(z_v - m)) - (z_t - m),     m = max over v of z_v

                 rank 0: tokens 0 1 2        rank 1: tokens 3 4 5
    embedding    rows of 0 1 2; zeros        rows of 3 4 5; zeros         P -> R  all-reduce
                 for tokens of others        for tokens of others
    logits       z0 z1 z2                    z3 z4 z5                     S: never gathered
    m            max of mine                 max of mine                  all-reduce (max) of a number a token
    sum, z_t     of mine; z_t if I have t    of mine; z_t if I have t     all-reduce of two numbers a token
    gradient     softmax of mine, minus 1    softmax of mine, minus 1     S: nothing to send
                 at t if I have it           at t if I have it

Logits are the largest activation of a small model with a large vocabulary: LLaMA 3's have 128,256 numbers a token, 31
times its width of 4,096. This needs three numbers a token where gathering needs V (Shoeybi et al., 2019,
arXiv:1909.08053, section 3). A tied head is the embedding's own piece, used twice.

Cost, N tokens, n ranks: the loss 2(n-1)/n of 3 N numbers a rank; embedding and head an all-reduce of N D numbers each,
one forward, one backward. Memory: logits, their gradient and the softmax are N V/n numbers each.

    python tp_vocabulary.py --nproc 4     torchrun --nproc_per_node=4 tp_vocabulary.py
    mpirun -np 4 python tp_vocabulary.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn
from tp_training import TensorOptions, lesson, tp_group

from common import collectives, comm
from common.comm import Group, padded, sizes_of
from common.ledger import show_bytes
from common.lesson import console, run
from common.models.transformer import Transformer, cross_entropy_sum
from common.placement import shard
from common.runtime import Runtime
from common.training import Version
from common.utils.memory import peak_allocated

VERSIONS = ("gathered", "parallel")
Map = Callable[[Tensor], Tensor]


class VocabularyParallelEmbedding(nn.Module):
    """tokens_BS to x_BSD: this rank's rows for the tokens it has, zeros for the others, then `leave`, the sum.

    embedding: the whole table, the same on all ranks.
    """

    def __init__(self, embedding: nn.Embedding, group: Group, leave: Map | None = None) -> None:
        super().__init__()
        self.vocabulary, self.weight = embedding.num_embeddings, shard(embedding.weight, group, 0)
        self.begin = sum(sizes_of(embedding.num_embeddings, group.size)[: group.rank])
        self.leave = leave or (lambda x: collectives.reduce(x, group))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        _check(tokens_BS, self.vocabulary)
        mine_BS, inside_BS = _inside(tokens_BS, self.begin, self.weight.shape[0])
        return self.leave(torch.where(inside_BS[..., None], F.embedding(mine_BS, self.weight), 0))


def _check(tokens: Tensor, vocabulary: int) -> None:
    """A token that no rank has would count as zeros. On a GPU the look would wait for it, so there none is taken."""
    if tokens.device.type == "cpu" and tokens.numel() and not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise IndexError(f"tokens {tokens.min()} to {tokens.max()} of a vocabulary of {vocabulary}")


def _inside(tokens: Tensor, begin: int, length: int) -> tuple[Tensor, Tensor]:
    """(place of each token among this rank's, any place where it is another's; is it this rank's)."""
    inside = (tokens >= begin) & (tokens < begin + length)
    return torch.where(inside, tokens - begin, 0), inside


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy of each token, from this rank's part of its logits."""

    @staticmethod
    def forward(ctx: Any, logits_Nv: Tensor, targets_N: Tensor, begin: int, group: Group) -> Tensor:
        largest_N = logits_Nv.amax(-1)
        comm.all_reduce(largest_N, group, "max")
        shifted_Nv = logits_Nv - largest_N[:, None]
        mine_N, inside_N = _inside(targets_N, begin, logits_Nv.shape[1])
        at_target_N = torch.where(inside_N, shifted_Nv.gather(1, mine_N[:, None])[:, 0], 0)
        sums_2N = torch.stack([shifted_Nv.exp_().sum(-1), at_target_N])
        comm.all_reduce(sums_2N, group)
        softmax_Nv = shifted_Nv.div_(sums_2N[0][:, None])
        ctx.save_for_backward(softmax_Nv, mine_N, inside_N)
        return sums_2N[0].log() - sums_2N[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        softmax_Nv, mine_N, inside_N = ctx.saved_tensors
        (dloss_N,) = grads
        dlogits_Nv = softmax_Nv * dloss_N[:, None]
        dlogits_Nv.scatter_add_(1, mine_N[:, None], -(dloss_N * inside_N)[:, None])
        return dlogits_Nv, None, None, None


def cross_entropy_sum_parallel(
    logits_BSv: Tensor, targets_BS: Tensor, group: Group, vocabulary: int, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """`cross_entropy_sum` of logits that are split along the vocabulary, whole and the same on all ranks.

    vocabulary: the number of logits of all ranks together. Raises IndexError for other targets, on a CPU.
    """
    precise = torch.promote_types(logits_BSv.dtype, torch.float32)
    begin = sum(sizes_of(vocabulary, group.size)[: group.rank])
    targets_N = targets_BS.flatten()
    counted_N = targets_N != ignore_index
    _check(targets_N[counted_N], vocabulary)
    loss_N = _CrossEntropy.apply(logits_BSv.flatten(0, -2).to(precise), targets_N, begin, group)
    return torch.where(counted_N, loss_N, 0).sum(), counted_N.sum()


class Unembed:
    """The head's product x W^T on this rank's rows of W, after `enter`."""

    def __init__(self, enter: Map) -> None:
        self.enter, self.product = enter, F.linear

    def __call__(self, x_BSD: Tensor, weight_vD: Tensor) -> Tensor:
        return self.product(self.enter(x_BSD), weight_vD)


def split_vocabulary(
    model: Transformer, group: Group, enter: Map | None = None, leave: Map | None = None
) -> Transformer:
    """Embedding, head and loss of the model split along the vocabulary; the head's input passes `enter` first."""
    into = enter or (lambda x: collectives.copy(x, group))
    vocabulary = model.config.vocabulary
    pieces = VocabularyParallelEmbedding(model.embed_tokens, group, leave)
    model.embed_tokens = pieces  # type: ignore[assignment]
    if model.lm_head is not None:
        model.lm_head.weight = shard(model.lm_head.weight, group, 0)
    model.unembed = Unembed(into)
    model.loss = partial(cross_entropy_sum_parallel, group=group, vocabulary=vocabulary)
    return model


@dataclass
class VocabularyOptions(TensorOptions):
    """Model and batch of this lesson."""

    versions: tuple[str, ...] = VERSIONS
    """Which versions to run."""


def make_version(name: str, model: nn.Module, rt: Runtime, o: VocabularyOptions) -> Version:
    """gathered: logits all-gathered, then the plain loss. parallel: the loss on pieces."""
    assert isinstance(model, Transformer)
    group, sizes = tp_group(rt), sizes_of(model.config.vocabulary, rt.world_size)
    split_vocabulary(model, group)
    if name == "gathered":
        in_pieces = model.unembed
        model.unembed = lambda x, w: collectives.gather(in_pieces(x, w), group, -1, sizes=sizes)
        model.loss = cross_entropy_sum
    return Version(model, loss=model.loss)


def step_bytes(name: str, model: nn.Module, group: Group, o: VocabularyOptions) -> Fraction:
    """Bytes a rank sends in a step: the embedding's sum, the sum of the head's gradients, and the loss's."""
    assert isinstance(model, Transformer)
    c, n, size = model.config, group.size, next(model.parameters()).element_size()
    loss = padded(c.vocabulary, n) if name == "gathered" else 2 * 3
    return Fraction((n - 1) * o.batch * o.sequence * (2 * 2 * c.width + loss) * size, n)


def measure_memory(rt: Runtime, group: Group, tokens: int = 512, vocabulary: int = 8192) -> bool:
    """The most that the loss of N tokens holds, forward and backward, logits not counted; held against formulas.

    parallel: softmax and gradient, 2 N V/n numbers. gathered: more than 3 N V, the logits, their log-softmax and its
    gradient. The rest is a few numbers a token. True when the measured is the formula to 5 %.
    """
    generator = torch.Generator().manual_seed(group.rank)
    mine = sizes_of(vocabulary, group.size)[group.rank]
    logits_Nv = torch.randn(tokens, mine, generator=generator).to(rt.device).requires_grad_()
    targets_N = torch.arange(tokens, device=rt.device)

    def gathered() -> None:
        whole = collectives.gather(logits_Nv, group, -1, sizes=sizes_of(vocabulary, group.size))
        cross_entropy_sum(whole, targets_N)[0].backward()

    def parallel() -> None:
        cross_entropy_sum_parallel(logits_Nv, targets_N, group, vocabulary)[0].backward()

    table = Table(
        title=f"peak of the loss, {tokens} tokens, {vocabulary} logits, float32", title_justify="left"
    )
    for column in ("loss", "measured, rank 0", "formula"):
        table.add_column(column, justify="left" if column == "loss" else "right")
    peaks = {}
    for name, call in {"gathered": gathered, "parallel": parallel}.items():
        logits_Nv.grad = None
        call()  # what is made once
        logits_Nv.grad = None
        peaks[name] = peak_allocated(call, rt.device.type)
    formula = 2 * tokens * mine * 4
    table.add_row(
        "gathered", show_bytes(peaks["gathered"]), f"at least {show_bytes(3 * tokens * vocabulary * 4)}"
    )
    table.add_row("parallel", show_bytes(peaks["parallel"]), show_bytes(formula))
    console(rt).print(table)
    if (small := abs(peaks["parallel"] / formula - 1) <= 0.05) is False:
        console(rt).print("the loss holds MORE than the formula allows")
    return small


def main(rt: Runtime, o: VocabularyOptions) -> bool:
    """What comes first, then a Transformer; with --benchmark its time alone."""
    group = tp_group(rt)
    return lesson(rt, o, VERSIONS, make_version, step_bytes, lambda: measure_memory(rt, group))


if __name__ == "__main__":
    run(main, VocabularyOptions)
