"""Megatron's tensor parallelism: a Transformer split inside its layers, two messages per layer and pass.

                 attention                                        MLP
    x  R --enter--> q k v by columns, that is by heads --> o --leave--> R --enter--> up --gelu--> down --leave--> R
                    each rank attends with its own heads  rows                       columns      rows

                            enter                      leave
    plain                   copy       R -> R          reduce          P -> R     norms and residuals: on all ranks
    sequence_parallel       gather     S(1) -> R       reduce_scatter  P -> S(1)  norms and residuals: a slice each

A region is the part between `enter` and `leave`: a column-parallel layer, then operations on single numbers
or single heads, then a row-parallel layer. An all-reduce is a reduce-scatter and an all-gather; Megatron's
sequence parallelism puts the norms, residuals and dropouts between the two. It sends the same bytes, and each
of these activations is on one rank instead of on all (Korthikanti et al., "Reducing activation
recomputation", 2022, arXiv:2205.05198, section 4.2.2). Outside the regions each rank then sees different
tokens, so by the rule of placement.py the gradients of replicated parameters (norms, biases after `leave`,
positions) are partial over tp; `sum_gradients` sums them.

    tensor_parallel(model, mesh.group("tp"), sequence_parallel=True)
    total, targets = model.loss(model(tokens_BS), targets_BS)            # of logits that stay split

Cost, x of |x| = B S D numbers: 2 x 2 all-reduces of |x| per layer, 2 more for embedding and head, 3 numbers
per token for the loss. Memory: weights, their states, and the activations inside regions take 1/n;
activations outside regions are whole on every rank, or take 1/n with sequence_parallel. n must divide the
heads. n may exceed the key-value heads: then each rank computes those that its query heads read, from
replicated weights.

    python tp_megatron.py --nproc 4 --model llama-tiny      torchrun --nproc_per_node=4 tp_megatron.py --dropout 0.1
    mpirun -np 4 python tp_megatron.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.comm import Group, collectives, sizes_of
from common.comm.placement import split_tokens_along, sum_gradients
from common.errors import UsageError
from common.launch.command_line import Within
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson
from common.lesson.job import Job, total
from common.lesson.runner import run
from common.models.dropout import Dropout
from common.models.moe import MoE
from common.models.transformer import (
    Attention,
    Layer,
    Transformer,
    TransformerConfig,
    need_transformer,
    replace_linears,
)

from tp_column_parallel import ColumnParallelLinear
from tp_costs import megatron_bytes
from tp_row_parallel import RowParallelLinear
from tp_training import TensorOptions, lesson
from tp_vocabulary import split_vocabulary

VERSIONS = ("plain", "sequence-parallel")
SplitMLP = Callable[[nn.Module, "Region"], None]


class Region:
    """Entry and exit of the regions that are split over the group, for activations x_BSD; one object for all.

    With sequence_parallel, x is a slice of the sequence before `enter` and after `leave`.
    """

    def __init__(self, group: Group, sequence_parallel: bool) -> None:
        self.group, self.sequence_parallel, self.length = group, sequence_parallel, 0

    def note(self, positions_S: Tensor) -> None:
        """Store the length of the sequence with these positions; `enter` gathers that many tokens."""
        self.length = positions_S.shape[-1]

    def enter(self, x: Tensor) -> Tensor:
        """Make x replicated for a region: R or S(1) to R."""
        if not self.sequence_parallel:
            return collectives.copy(x, self.group)
        return collectives.gather(x, self.group, 1, "partial", sizes_of(self.length, self.group.size))

    def leave(self, x: Tensor) -> Tensor:
        """Sum a region's partial result over the ranks: P to R or S(1)."""
        if not self.sequence_parallel:
            return collectives.reduce(x, self.group)
        return collectives.reduce_scatter(x, self.group, 1)

    def begin_at(self, part: nn.Module) -> None:
        """Let x enter the region before the part, once for all of its projections."""
        part.register_forward_pre_hook(lambda _, given: (self.enter(given[0]), *given[1:]))

    def slice(self, positions_S: Tensor) -> Tensor:
        """Return the positions that this rank holds outside of the region."""
        if not self.sequence_parallel:
            return positions_S
        sizes = sizes_of(positions_S.shape[-1], self.group.size)
        begin = sum(sizes[: self.group.rank])
        return positions_S.narrow(-1, begin, sizes[self.group.rank])


class SharedRows(nn.Module):
    """Projection to heads that several ranks share: each has the whole weight and uses the `rows` it needs.

    Every rank contributes to the weight's gradient, so the weight passes through `copy`, whose adjoint sums.
    """

    rows: Tensor

    def __init__(self, linear: nn.Linear, rows: Tensor, group: Group) -> None:
        super().__init__()
        self.weight, self.bias, self.group = linear.weight, linear.bias, group
        on = rows if linear.weight.is_meta else rows.to(linear.weight.device)
        self.register_buffer("rows", on, persistent=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        weight_fD = collectives.copy(self.weight, self.group)[self.rows]
        bias_f = None if self.bias is None else collectives.copy(self.bias, self.group)[self.rows]
        return F.linear(x_BSD, weight_fD, bias_f)


def kv_heads_read(config: TransformerConfig, rank: int, ranks: int) -> list[int]:
    """Return the key-value heads that a rank computes: each once, if its query heads read all of them equally often."""
    mine = range(rank * config.heads // ranks, (rank + 1) * config.heads // ranks)
    read = [head * config.kv_heads // config.heads for head in mine]
    once = sorted(set(read))
    return once if all(read.count(head) == len(read) / len(once) for head in once) else read


def split_attention(attention: Attention, config: TransformerConfig, region: Region) -> None:
    """Split the heads over ranks; a rank computes the key-value heads that its query heads read."""
    group, kv_heads, width = region.group, config.kv_heads, config.head_width
    read = kv_heads_read(config, group.rank, group.size)
    rows = torch.cat([torch.arange(head * width, (head + 1) * width) for head in read])
    shared = () if kv_heads % group.size == 0 else ("k_proj", "v_proj")  # several ranks read the same heads
    replace_linears(attention, shared, lambda linear: SharedRows(linear, rows, group))
    replace_linears(attention, ("q_proj", "k_proj", "v_proj"), partial(columns, region=region))
    replace_linears(attention, ("o_proj",), partial(leaving, region=region))
    attention.weights_dropout.first_head = group.rank * config.heads // group.size
    region.begin_at(attention)


def columns(linear: nn.Linear, region: Region) -> ColumnParallelLinear:
    """Return the layer split by columns, whose input has entered the region."""
    return ColumnParallelLinear(linear, region.group, enter=lambda x: x)


def leaving(linear: nn.Linear, region: Region) -> RowParallelLinear:
    """Return the layer split by rows, whose output leaves the region."""
    layer = RowParallelLinear(linear, region.group, leave=region.leave)
    if layer.bias is not None and region.sequence_parallel:
        split_tokens_along(layer.bias, region.group.axis)
    return layer


def split_mlp(mlp: nn.Module, region: Region) -> None:
    """Split up and gate by columns, down by rows. Raises UsageError for a mixture of experts."""
    refuse_experts(len(mlp.router.weight) if isinstance(mlp, MoE) else 0)
    replace_linears(mlp, ("up_proj", "gate_proj"), partial(columns, region=region))
    replace_linears(mlp, ("down_proj",), partial(leaving, region=region))
    region.begin_at(mlp)


def split_layer(layer: Layer, config: TransformerConfig, region: Region, split: SplitMLP = split_mlp) -> None:
    """Turn attention and MLP into regions; the rest of the layer stays as it is."""
    split_attention(layer.attention, config, region)
    split(layer.mlp, region)
    layer.register_forward_pre_hook(lambda _, given: region.note(given[1]))


def stay_outside(model: Transformer, region: Region) -> None:
    """Give norms, residuals and positions this rank's slice of the sequence, whose gradients are partial.

    So too token types and the dense layer of a head for masked tokens.
    """
    in_regions = [layer.attention.weights_dropout for layer in model.layers if isinstance(layer, Layer)]
    with_places = [module for module in (model.embed_positions, model.embed_types) if module is not None]
    for module in model.modules():
        on_slices = isinstance(module, nn.LayerNorm | nn.RMSNorm) or module is model.transform
        if on_slices or module in with_places:
            for parameter in module.parameters():
                split_tokens_along(parameter, region.group.axis)
        if module in with_places or (isinstance(module, Dropout) and module not in in_regions):
            module.register_forward_pre_hook(lambda _, given: (*given[:-1], region.slice(given[-1])))


def tensor_parallel(
    model: Transformer, group: Group, sequence_parallel: bool = False, split: SplitMLP = split_mlp
) -> Region:
    """Split the model over the ranks of `group`, in place; the same whole model must be on all of them.

    model(tokens_BS) takes the same tokens on all ranks and returns logits_BSv, this rank's part of the
    vocabulary; `model.loss` sums their cross-entropies. Call `placement.sum_gradients` after the backward
    pass: with sequence_parallel some gradients are partial. split: the function that turns each MLP into a
    region; mixtures of experts need their own. Returns the region. Raises UsageError where the ranks do not
    divide the heads, TypeError for another model.
    """
    need_transformer(model, "tensor_parallel", "the layers, as examples/your_own_model.py does")
    config, region = model.config, Region(group, sequence_parallel)
    check_sizes(config, group.size)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        split_layer(layer, config, region, split)
    split_vocabulary(model, group, region.enter, region.leave)
    if sequence_parallel:
        stay_outside(model, region)
    return region


def check_split(config: TransformerConfig, n: int) -> None:
    """Raise UsageError for a model with experts, and where `check_sizes` does."""
    refuse_experts(config.experts)
    check_sizes(config, n)


def refuse_experts(experts: int) -> None:
    """Raise UsageError if there are experts."""
    if experts:
        raise UsageError(f"this splits one MLP a layer over tp, not {experts} experts; see chapter 06")


def check_sizes(config: TransformerConfig, n: int) -> None:
    """Raise UsageError where n ranks cannot hold whole heads, and parts of the vocabulary and of an MLP."""
    if config.heads % n:
        fits = ", ".join(str(k) for k in range(1, config.heads + 1) if config.heads % k == 0)
        raise UsageError(f"{config.heads} heads do not divide over {n} ranks along tp; {fits} would do")
    if n > min(config.vocabulary, config.mlp_width):
        raise UsageError(
            f"{n} ranks along tp are more than the MLP's width {config.mlp_width} or the vocabulary "
            f"{config.vocabulary}; at most {min(config.vocabulary, config.mlp_width)} would do"
        )


@dataclass
class MegatronOptions(TensorOptions):
    """Model and batch of this lesson."""

    dropout: Annotated[float, Within(0, 0.999999)] = 0.0
    """Share of numbers that training sets to zero; these are the same on every mesh."""

    def model_config(self) -> TransformerConfig:
        """Return the model's shape, with dropout."""
        return replace(super().model_config(), dropout=self.dropout)


def train(job: Job[MegatronOptions]) -> Iterator[Tensor]:
    """Train the split model, with or without sequence parallelism; yield the loss of each batch."""
    model, group = job.model, job.group
    tensor_parallel(model, group, sequence_parallel=job.version == "sequence-parallel")
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
        sum_gradients(model.parameters(), job.mesh)  # norms and biases that saw only this rank's tokens
        optimizer.step()
        yield total(losses)


LESSON = Lesson("tp", dict.fromkeys(VERSIONS, train), megatron_bytes)


def main(rt: Runtime, o: MegatronOptions) -> bool:
    """Prove the split Transformer; with --benchmark only time it."""
    check_split(o.model_config(), rt.world_size)
    return lesson(rt, o, LESSON)


if __name__ == "__main__":
    run(main, MegatronOptions, versions=VERSIONS)
