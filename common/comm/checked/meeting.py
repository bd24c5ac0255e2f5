"""Before a collective the ranks of its group meet: each posts what it is about to do, and reads the others' posts.

Posts go through the store that the process group was made with; the ledger does not count them. Two rules hold.

    meet     all post the same call, shape, dtype and arguments: no rank hangs or reads garbage
    equal    a tensor that is said to be the same on all ranks, and the replicated parameters that this rank has used
             since the last post, are equal within rounding; three sums of each tensor travel, not its values
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.weak import WeakIdKeyDictionary

from common.comm.checked.report import Absent, Report
from common.comm.checked.table import Table
from common.comm.frames import line_of_user
from common.comm.group import Group
from common.comm.travel import blocked_in

RUNS = itertools.count()
Sums = tuple[float, float, float]


@lru_cache(64)
def weights_of(n: int) -> Tensor:
    """Return n numbers that differ by position."""
    return torch.arange(1.0, n + 1, dtype=torch.float64).cos()


def fingerprint(x: Tensor) -> Sums:
    """Return (sum of magnitudes, sum, sum with weights that differ by position) of x, in float64."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        flat = x.detach().double().flatten().cpu()
        return flat.abs().sum().item(), flat.sum().item(), (flat @ weights_of(len(flat))).item()


def unlike(a: Sequence[float], b: Sequence[float], epsilon: float) -> bool:
    """Return True if two fingerprints differ by more than rounding."""
    most = math.sqrt(epsilon) * max(a[0], b[0])
    return any(abs(x - y) > most or math.isnan(x) != math.isnan(y) for x, y in zip(a, b, strict=True))


class Meeting:
    """Posts of this rank, and their comparison. timeout: seconds that it waits for another rank."""

    def __init__(self, table: Table, report: Report, timeout: float) -> None:
        self.table, self.report, self.timeout = table, report, timeout
        self.run, self.numbers = next(RUNS), dict[tuple[int, ...], int]()
        self.used = WeakIdKeyDictionary()  # parameter: (sums at its first use in this step, axes compared)
        self.messages = self.bytes = 0

    def use(self, p: Tensor) -> None:
        """Remember the values of a parameter that this step uses; one that ZeRO's stage 3 has freed has none."""
        if p not in self.used and p.untyped_storage().nbytes() >= p.nbytes:
            self.used[p] = fingerprint(p), set()

    def call(
        self,
        name: str,
        group: Group,
        axes: tuple[str, ...] = (),
        x: Tensor | None = None,
        details: Sequence[object] = (),
        replica: bool = False,
    ) -> Callable[[], None]:
        """Post a call; return the function that compares it with those of the others.

        axes: those of the group, if it has all of their ranks. replica: x is said to be the same on all ranks.
        """
        number = self.numbers[group.ranks] = self.numbers.get(group.ranks, 0) + 1
        mine = {
            "call": name,
            "line": line_of_user(),
            "given": said(name, x, details),
            "replica": fingerprint(x) if replica and x is not None else None,
            "epsilon": torch.finfo(x.dtype).eps if x is not None and x.is_floating_point() else 1e-9,
            "parameters": self._replicas(axes) if axes else {},
        }
        keys = [f"checked/{self.run}/{group.axis}/{group.ranks}/{number}/{r}" for r in range(group.size)]
        store, packed = _get_default_store(), json.dumps(mine)
        self.messages, self.bytes = self.messages + 1, self.bytes + len(packed)
        store.set(keys[group.rank], packed)
        tensor = "nothing" if x is None else self.table.describe(x)
        axis = "+".join(axes) or group.axis
        return partial(self._compare, store, keys, json.loads(packed), group, axis, tensor)

    def _replicas(self, axes: tuple[str, ...]) -> dict[str, tuple[Sums, float]]:
        """Return the sums of the parameters used in this step that are the same along these axes."""
        found = {}
        for p, (sums, done) in self.used.items():
            same = all(self.table.kinds(p)[axis].letter in "IR" for axis in axes)
            if same and axes not in done and p in self.table.names:
                found[self.table.names[p]] = sums, torch.finfo(p.dtype).eps
                done.add(axes)
        return found

    def _compare(self, store: Any, keys: list[str], mine: Any, group: Group, axis: str, tensor: str) -> None:
        call, wrong = mine["call"], partial(self.report.wrong, axis=axis)
        for rank, key in zip(group.ranks, keys, strict=True):
            blocked_in.update(op=call, axis=axis, since=time.perf_counter())
            try:
                store.wait([key], timedelta(seconds=self.timeout))
            except Exception:
                text = f"waits in {call}, but rank {rank} does not come within {self.timeout:g} s"
                return wrong("meet", tensor, text=text, kind=Absent)
            blocked_in.clear()
            theirs = json.loads(store.get(key))
            for word in ("call", "given"):
                if theirs[word] != mine[word]:
                    text = f"is in {mine[word]}, but rank {rank} at {theirs['line']} is in {theirs[word]}"
                    wrong("meet", tensor, text=text)
            if mine["replica"] and unlike(mine["replica"], theirs["replica"], mine["epsilon"]):
                text = f"is said to be replicated in {call}, but differs from that of rank {rank} at {theirs['line']}"
                wrong("equal", tensor, text=text)
            for name, (sums, epsilon) in mine["parameters"].items():
                if name in theirs["parameters"] and unlike(sums, theirs["parameters"][name][0], epsilon):
                    wrong("equal", name, text=f"is replicated, but differs from that of rank {rank}")


def said(name: str, x: Tensor | None, details: Sequence[object]) -> dict[str, object]:
    """Return what all ranks of a call must give alike."""
    if x is None:
        return {}
    shape = [x.numel()] if "gather" in name else list(x.shape)
    if name == "all_to_all_into":  # each rank has its own numbers of rows
        shape, details = list(x.shape[1:]), ()
    if name in ("exchange", "all_to_all_views"):  # blocks that go round may differ
        shape = []
    return {"shape": shape, "dtype": str(x.dtype), "details": list(details)}
