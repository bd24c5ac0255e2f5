r"""Data parallelism by hand: each rank holds the model and a part of the batch; gradients are summed.

    gradient of the loss over the global batch  =  sum over ranks of the gradients of their parts

                     rank 0                rank 1                rank 2
    batch            samples 0 1 2         samples 3 4 5         samples 6 7 8 9     (parts may differ)
    backward         d(sum of losses)/T    d(sum of losses)/T    d(sum of losses)/T  T: targets of ALL ranks
                        \___________________ all-reduce ____________________/
    gradients        the same on all ranks, so the same step of the optimizer, so the same weights

Three versions, all with the same results:
    naive      one all-reduce for each parameter, after the backward pass; each waits for the one before
    bucketed   gradients join buckets as they become ready; full buckets are sent while backward goes on
    ddp        torch.nn.parallel.DistributedDataParallel, the library's bucketed version

Cost of a step: 2(n-1)/n bytes per byte of gradient and rank, whatever the version. Memory: a bucket beside the
gradients, or a second copy of them with accumulation. Given enough tokens, the backward pass hides the time of all
buckets but the last.

    python dp_basic.py --nproc 4      torchrun --nproc_per_node=4 dp_basic.py      mpirun -np 4 python dp_basic.py
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common import comm
from common.comm import Group
from common.launch.runtime import Runtime
from common.lesson.comparison import Lesson, prove, time_in_turn
from common.lesson.job import Job, one_device, total
from common.lesson.runner import run
from common.models.transformer import cross_entropy_sum

from dp_costs import basic_start, basic_step
from dp_training import DataParallelOptions, check


def broadcast_model(model: nn.Module, group: Group) -> None:
    """Give every rank the parameters and buffers of rank 0. Sends (n-1)/n of the model's bytes."""
    for tensor in (*model.parameters(), *model.buffers()):
        comm.broadcast(tensor.data, group)


def all_reduce_gradients(model: nn.Module, group: Group) -> None:
    """Sum each gradient over the group, one after the other, in place: the naive version.

    A parameter that no rank used keeps None as its gradient, as on one device: AdamW decays weights with a
    zero gradient but skips those with None. So the first message holds one number per parameter: 1 if this
    rank used it.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    used = torch.stack([p.new_tensor(float(p.grad is not None)) for p in parameters])
    comm.all_reduce(used, group)
    for p, ranks in zip(parameters, used.tolist(), strict=True):
        if ranks:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            comm.all_reduce(p.grad, group)


class Arriving(Protocol):
    """Messages in flight."""

    def wait(self) -> None:
        """Block until the sum over the ranks has arrived."""


@dataclass
class Bucket:
    """Flat buffer that holds the gradients of some parameters and is sent as one message."""

    flat: Tensor
    views: dict[int, Tensor]  # parameter index: view of its gradient in `flat`
    missing: set[int] = field(default_factory=set)
    pending: Arriving | None = None


Exchange = Callable[[Bucket], Arriving]


class DataParallel:
    """Bucketed data parallelism: gradients are all-reduced while the backward pass goes on.

        dp = DataParallel(model, group)
        with dp.no_sync():                  # all micro-batches but the last
            loss(...).backward()
        loss(...).backward()                # buckets are all-reduced while this runs
        dp.finish()                         # p.grad is the sum over ranks; clip and step as on one device

    Losses are sums over targets divided by the targets of the whole global batch, so gradients are summed,
    never averaged, and ranks may hold unequal parts, or none.

    Clear every gradient before the next step, those outside the optimizer too: a gradient that is left would
    be summed again. p.grad is a view into a bucket; clone it to keep it. Layers that mix samples (BatchNorm)
    see only their rank's part. Use one DataParallel at a time for a model; it stops when it is deleted.

    exchange: starts the communication of a bucket, in place of the all-reduce of `flat`. All ranks call it
    for the same buckets in the same order, and wait in that order once all have started; then `flat` must
    hold the sum.

    Raises RuntimeError when a second backward runs before finish(), since its gradients would join buckets
    that were sent, and when parameters were unfrozen or replaced; ValueError when none requires a gradient.
    """

    def __init__(
        self, model: nn.Module, group: Group, bucket_mb: float = 8.0, exchange: Exchange | None = None
    ) -> None:
        broadcast_model(model, group)
        self.exchange = exchange or (lambda bucket: comm.all_reduce(bucket.flat, group, async_op=True))
        self.model, self.group, self.bucket_bytes = model, group, bucket_mb * 2**20
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError("no parameter of the model requires a gradient; there is nothing to sum")
        self.synchronising, self.order_known = True, False
        # backward runs through the layers from the last to the first
        self._make_buckets(reversed(range(len(self.parameters))))
        me = weakref.ref(self)  # a hook that held self would keep it alive and go on sending

        def hook(index: int, p: Tensor) -> None:
            if dp := me():
                dp._ready(index, p)

        for index, p in enumerate(self.parameters):
            p.register_post_accumulate_grad_hook(partial(hook, index))

    def _make_buckets(self, order: Iterable[int]) -> None:
        """Cut the parameters, in the order in which gradients come, into buckets of `bucket_bytes`.

        The last bucket ends with one number for each parameter: how many ranks used it.
        """
        groups: list[list[int]] = [[]]
        size = 0.0
        for index in order:
            p = self.parameters[index]
            if groups[-1] and (size >= self.bucket_bytes or p.dtype != self.parameters[groups[-1][0]].dtype):
                groups.append([])
                size = 0.0
            groups[-1].append(index)
            size += p.numel() * p.element_size()
        self.buckets = []
        for members in groups:
            sizes = [self.parameters[i].numel() for i in members]
            tail = len(self.parameters) if members is groups[-1] else 0
            flat = self.parameters[members[0]].new_zeros(sum(sizes) + tail)
            pieces = torch.split(flat, [*sizes, tail])
            views = {i: v.view_as(self.parameters[i]) for i, v in zip(members, pieces[:-1], strict=True)}
            self.buckets.append(Bucket(flat, views))
        self.used = pieces[-1]
        self.place = {index: bucket for bucket in self.buckets for index in bucket.views}
        self._reset()

    def _reset(self) -> None:
        self.order: list[int] = []
        self.launched = 0
        for bucket in self.buckets:
            bucket.missing, bucket.pending = set(bucket.views), None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate only: backward passes inside send nothing."""
        before, self.synchronising = self.synchronising, False
        try:
            yield
        finally:
            self.synchronising = before

    def _ready(self, index: int, p: Tensor) -> None:
        """Hook that autograd calls once p.grad holds this backward's gradient, earlier ones included."""
        if not self.synchronising:
            return
        bucket = self.place[index]
        if index not in bucket.missing:
            raise RuntimeError(
                "backward ran twice before finish(): put all micro-batches but the last in no_sync() "
                "(reentrant checkpointing also runs it more than once: use use_reentrant=False)"
            )
        self._fill(index)
        self.order.append(index)
        # gradients may come in different orders on different ranks; messages must match, so buckets are sent
        # in the order of the list. The last one waits for finish(), when the used parameters are known.
        while self.launched < len(self.buckets) - 1 and not self.buckets[self.launched].missing:
            self._launch()

    @torch.no_grad()
    def _fill(self, index: int) -> None:
        """Make p.grad a view into the bucket, so that from now on autograd accumulates there."""
        p, bucket = self.parameters[index], self.place[index]
        view = bucket.views[index]
        if p.grad is not None and p.grad.layout != torch.strided:
            raise RuntimeError(f"a gradient of layout {p.grad.layout} cannot lie in a bucket; make it dense")
        if p.grad is None:
            view.zero_()  # unused here; another rank may have used it
        elif p.grad.data_ptr() != view.data_ptr():
            view.copy_(p.grad)
            p.grad = view
        bucket.missing.discard(index)

    def _launch(self) -> None:
        bucket = self.buckets[self.launched]
        bucket.pending = self.exchange(bucket)
        self.launched += 1

    def finish(self) -> None:
        """Send the other buckets, wait for all; then p.grad is the sum over ranks, or None if unused."""
        known = set(map(id, self.parameters))
        if not all(id(p) in known for p in self.model.parameters() if p.requires_grad):
            raise RuntimeError("parameters were unfrozen or replaced: make a new DataParallel for the model")
        for bucket in self.buckets:
            for index in sorted(bucket.missing):  # unused in this backward: earlier micro-batches may count
                self._fill(index)
        self.used.copy_(torch.tensor([float(p.grad is not None) for p in self.parameters]))
        while self.launched < len(self.buckets):
            self._launch()
        for bucket in self.buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
        for index, ranks in enumerate(self.used.tolist()):
            self.parameters[index].grad = self.place[index].views[index] if ranks else None
        self._settle_order()

    def _settle_order(self) -> None:
        """After the first backward pass, cut the buckets anew in the order of rank 0, on all ranks."""
        if not self.order_known:
            seen = set(self.order)
            order = self.order + [i for i in reversed(range(len(self.parameters))) if i not in seen]
            agreed = torch.tensor(order, device=self.parameters[0].device)
            comm.broadcast(agreed, self.group)
            self._make_buckets(agreed.tolist())
            for index in order:
                self._fill(index)  # into the new buckets, so that the old ones are freed
            self.order_known = True
        self._reset()


def train_naive(job: Job[DataParallelOptions]) -> Iterator[Tensor]:
    """Train on this rank's samples, with an all-reduce per parameter; yield the loss of each global batch."""
    model, group = job.model, job.group
    broadcast_model(model, group)
    optimizer = job.optimizer(model)  # SGD or AdamW: the runner's choice
    for batch in job.batches():
        count, losses = batch.count_targets(group), []  # of all ranks: an all-reduce of 8 bytes
        optimizer.zero_grad()
        for tokens_BS, targets_BS in batch:
            loss_sum, _ = cross_entropy_sum(model(tokens_BS), targets_BS)
            loss = loss_sum / count
            loss.backward()
            losses.append(loss.detach())
        all_reduce_gradients(model, group)
        optimizer.step()
        yield total(losses, group)


def train(job: Job[DataParallelOptions]) -> Iterator[Tensor]:
    """Train likewise, in buckets that are sent during the last micro-batch's backward pass."""
    model, group = job.model, job.group
    dp = DataParallel(model, group, job.options.bucket_mb)
    optimizer = job.optimizer(model)
    for batch in job.batches():
        count, losses = batch.count_targets(group), []
        optimizer.zero_grad()
        for i, (tokens_BS, targets_BS) in enumerate(batch, 1):
            with dp.no_sync() if i < len(batch) else nullcontext():
                loss_sum, _ = cross_entropy_sum(model(tokens_BS), targets_BS)
                loss = loss_sum / count
                loss.backward()
            losses.append(loss.detach())
        dp.finish()
        optimizer.step()
        yield total(losses, group)


def train_ddp(job: Job[DataParallelOptions]) -> Iterator[Tensor]:
    """Train likewise with torch's DDP, which divides the sum of the gradients by the number of ranks."""
    model, group = job.model, job.group
    if group.size == 1:  # one rank, which needs no DDP
        return (yield from one_device(job))
    ddp = DistributedDataParallel(model, process_group=group.pg, bucket_cap_mb=job.options.bucket_mb)
    optimizer = job.optimizer(model)
    for batch in job.batches():
        count, losses = batch.count_targets(group), []
        optimizer.zero_grad()
        for i, (tokens_BS, targets_BS) in enumerate(batch, 1):
            with ddp.no_sync() if i < len(batch) else nullcontext():
                loss_sum, _ = cross_entropy_sum(ddp(tokens_BS), targets_BS)
                loss = loss_sum / count
                (loss * group.size).backward()
            losses.append(loss.detach())
        optimizer.step()
        yield total(losses, group)


VERSIONS = {"naive": train_naive, "bucketed": train, "ddp": train_ddp}
LESSON = Lesson("dp", VERSIONS, basic_step, start_bytes=basic_start, unseen=("ddp",))


def main(rt: Runtime, o: DataParallelOptions) -> bool:
    """Prove equality of the versions with one device, or with --benchmark time them."""
    check(rt, tuple(VERSIONS), o)
    return (time_in_turn if o.benchmark else prove)(rt, o, LESSON)


if __name__ == "__main__":
    run(main, DataParallelOptions)
