"""Compression as a communication hook of torch's DDP: our compressors, and torch's own PowerSGD."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from common.comm import Group
from common.comm.checked import declare

from dp_basic import Bucket
from dp_compressor import Compressor
from dp_training import joined

Future = torch.futures.Future[Tensor]


def ddp_hook(
    compressor: Compressor, parameters: Sequence[Tensor]
) -> Callable[[object, dist.GradBucket], Future]:
    """Return `compressor` as a communication hook of torch's DDP.

    The hook sums gradients, so losses under DDP must be scaled for a sum, not for a mean.
    """
    number = {p: i for i, p in enumerate(parameters)}

    def hook(state: object, bucket: dist.GradBucket) -> Future:
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        views = {number[p]: declare(g, dp="P") for p, g in pairs}  # copies that DDP made, in C++
        compressor(Bucket(bucket.buffer(), views)).wait()
        arrived: Future = torch.futures.Future()
        arrived.set_result(bucket.buffer())
        return arrived

    return hook


def torch_hook(
    group: Group, rank: int, parameters: Sequence[Tensor], first: Callable[[int, Tensor], Tensor]
) -> Callable[[object, dist.GradBucket], Future]:
    """Return torch's powerSGD_hook with the settings of our PowerSGD.

    first(i, matrix): the first Q of parameter i, as our PowerSGD has it.
    """
    state = PowerSGDState(group.pg, rank, start_powerSGD_iter=2, min_compression_rate=1)
    number = {p: i for i, p in enumerate(parameters)}

    def hook(_: object, bucket: dist.GradBucket) -> Future:
        index = bucket.index()
        if state.iter >= 2 and index not in state.q_memory_dict:
            by_shape: dict[torch.Size, list[Tensor]] = {}  # torch's order
            for p in bucket.parameters():
                if p.dim() > 1:
                    by_shape.setdefault(p.flatten(1).shape, []).append(p)
            matrices = [(number[p], p.flatten(1)) for same in by_shape.values() for p in same]
            q = [first(i, m) for i, m in matrices]
            state.q_memory_dict[index] = joined(q)
            state.p_memory_dict[index] = bucket.buffer().new_empty(
                sum(m.shape[0] * f.shape[1] for (_, m), f in zip(matrices, q, strict=True))
            )
        return powerSGD_hook(state, bucket)

    return hook
