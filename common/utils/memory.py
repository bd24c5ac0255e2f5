"""Memory held by a piece of code, counted in tensors: no sampling, the same number on every run.

saved_bytes(lambda: loss(model(x)), model)        # kept by autograd from the forward for the backward pass
with LiveBytes() as live:                         # alive at once, gradients and temporaries included
    loss(model(x)).backward()
live.peak
peak_allocated(step)                              # with kernels' and libraries' memory, by torch's profiler
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def saved_bytes(forward: Callable[[], object], model: nn.Module) -> int:
    """Return the bytes that autograd saves in `forward()`: each storage once, without the model's parameters.

    Tensors are counted by their whole storage, as memory is. `forward` must return an object that holds the
    graph.
    """
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()  # addresses are unique while the graph holds them
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        graph = forward()
    del graph
    return sum(kept.values())


class LiveBytes(TorchDispatchMode):
    """Count of the storages that operations inside the `with` block make, until they are freed.

    `now` and `peak` are in bytes. The internal memory of kernels is not counted, nor that of a backward pass
    on a GPU, which runs in other threads: for these use `torch.cuda.max_memory_allocated`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            key = storage._cdata
            if key not in given and key not in self._known:  # neither a view nor in place
                self._known.add(key)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, key, storage.nbytes())
        return result


def _storages(values: object) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in tree_leaves(values) if isinstance(x, Tensor)]


def peak_allocated(call: Callable[[], object], device: str = "cpu") -> int:
    """Return the most bytes at once of the tensors that a call makes, on this rank.

    On the CPU torch's profiler notes every allocation, so the call is slow; do not time it.
    """
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports every start and stop on stderr
    with torch.profiler.profile(profile_memory=True) as profiler:
        call()
    recorded: Any = profiler.profiler
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    sizes = (e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(itertools.accumulate(sizes), default=0)
