"""Experts under tensor parallelism: a rank holds, of each expert at its place along ep, one slice along tp.

    y_t = sum over tp of  sum over the k chosen experts e of  w_te down_e[:, mine] act(up_e[mine] x_t)

The mixture is a region, as an MLP is (tp_megatron.py): tokens enter replicated, and the outputs are summed
over the ranks once, after the choices are weighted. All ranks along tp see the same tokens and so make the
same choices; over ep they then exchange rows with ranks at the same place along tp. A weight w_te multiplies
a partial result of the expert, so the gradient of the router is partial over tp, as is that of a bias of
which each rank adds 1/n.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from common.comm.placement import shard, split_tokens_along
from common.errors import UsageError
from common.models.moe import Linears, MoE
from common.models.transformer import replace_linears

from tp_megatron import Region, columns, split_mlp
from tp_row_parallel import RowParallelLinear


def split(mlp: nn.Module, region: Region) -> None:
    """Split an MLP or a mixture of experts over tp, in place, as a region; for `tensor_parallel`.

    Raises UsageError for shared experts with biases.
    """
    if not isinstance(mlp, MoE):
        return split_mlp(mlp, region)
    group = region.group
    region.begin_at(mlp)
    for name, part in mlp.experts.named_children():
        assert isinstance(part, Linears)
        inside = name != "down_proj"  # weight_EOI: rows are O, columns are I
        part.weight = shard(part.weight, group, 1 if inside else 2)
        if part.bias is not None and inside:
            part.bias = shard(part.bias, group, 1)
        elif part.bias is not None:
            part.bias_share = 1 / group.size
            split_tokens_along(part.bias, group.axis)
    split_tokens_along(mlp.router.weight, group.axis)
    if mlp.shared is not None:
        _split_shared(mlp.shared, region)
    mlp.register_forward_hook(lambda _, given, y_BSD: region.leave(y_BSD))


def _split_shared(shared: nn.Module, region: Region) -> None:
    """Split the shared experts. Their output is partial, too, and is summed together with the experts'."""
    if any(name.endswith("bias") for name, _ in shared.named_parameters()):
        raise UsageError("shared experts with biases cannot be split along tp; give a model with bias=False")
    replace_linears(shared, ("up_proj", "gate_proj"), partial(columns, region=region))
    rows = partial(RowParallelLinear, group=region.group, leave=lambda y: y)
    replace_linears(shared, ("down_proj",), rows)
