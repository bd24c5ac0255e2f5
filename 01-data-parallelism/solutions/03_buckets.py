"""Buckets: a hook per parameter counts down its bucket; complete buckets leave in order, finish() copies them back."""

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group


class Buckets:
    """Sum of a model's gradients over the ranks, in buckets of at most `limit` elements."""

    def __init__(self, model: nn.Module, group: Group, limit: int) -> None:
        """Cut the buckets, and register a hook on every parameter."""
        self.group, self.sending = group, False
        self.buckets: list[list[nn.Parameter]] = [[]]
        for p in list(model.parameters())[::-1]:
            if self.buckets[-1] and sum(q.numel() for q in self.buckets[-1]) + p.numel() > limit:
                self.buckets.append([])
            self.buckets[-1].append(p)
            p.register_post_accumulate_grad_hook(self.ready)

    def begin(self) -> None:
        """Let the next backward pass send; the passes before it only accumulate."""
        self.sending = True
        self.missing = [{id(p) for p in bucket} for bucket in self.buckets]
        self.flats: list[Tensor] = []
        self.pending: list[comm.Pending] = []

    def ready(self, p: Tensor) -> None:
        """Send the buckets that are complete with p, in order."""
        if not self.sending:
            return
        for missing in self.missing:
            missing.discard(id(p))
        while (i := len(self.pending)) < len(self.buckets) and not self.missing[i]:
            self.flats.append(torch.cat([q.grad.flatten() for q in self.buckets[i]]))
            self.pending.append(comm.all_reduce(self.flats[i], self.group, async_op=True))

    def finish(self) -> None:
        """Wait for all buckets; afterwards every p.grad is the sum over the ranks."""
        for bucket, flat, pending in zip(self.buckets, self.flats, self.pending, strict=True):
            pending.wait()
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad.copy_(part.view_as(p))
        self.sending = False
