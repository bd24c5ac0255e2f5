"""Count of the messages of libraries that do not go through common/comm/calls.py: DDP, FSDP2, DTensor, pipelining.

    with Listener(group) as ledger:
        ddp(x).sum().backward()
    ledger.bytes("all_reduce")

torch hands every collective to its dispatcher before the backend sees it, and a dispatch mode sees all that goes
through there on its thread. Each call counts by the formula of calls.py, whatever the backend then sends: gloo's
own reduce-scatter sends twice as much. Our own calls are heard too, so inside a listener a ledger and the listener
agree, in bytes: our reduce-scatter on gloo is heard as the all-to-all that carries it. Integers that a library
broadcasts, gathers or sends (DDP checks the shapes of parameters and agrees on buckets, once) are its bookkeeping and
stand in a row of that name. Rows carry the axis of the group given here, whichever group a call was for; its number of
ranks is its own.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.comm import Group, ledger
from common.comm.ledger import Ledger, Row

# c10d's name: our name, multiple of (n-1)/n that is sent, index of the argument with the whole tensor
COLLECTIVES: dict[str, tuple[str, int, int]] = {
    "allreduce_": ("all_reduce", 2, 0),
    "allreduce_coalesced_": ("all_reduce", 2, 0),
    "broadcast_": ("broadcast", 1, 0),
    "reduce_": ("reduce", 1, 0),
    "allgather_": ("all_gather", 1, 0),
    "_allgather_base_": ("all_gather", 1, 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 1, 0),
    "reduce_scatter_": ("reduce_scatter", 1, 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 1),
    "alltoall_base_": ("all_to_all", 1, 1),
}
# the same for functional collectives; True if the argument is the whole tensor, False if it is a piece
FUNCTIONAL: dict[str, tuple[str, int, bool]] = {
    "all_reduce": ("all_reduce", 2, True),
    "all_reduce_": ("all_reduce", 2, True),
    "all_gather_into_tensor": ("all_gather", 1, False),
    "reduce_scatter_tensor": ("reduce_scatter", 1, True),
}
SILENT = (
    "barrier",
    "monitored_barrier_",
    "wait_tensor",
    "_wrap_tensor_autograd",
    "recv_",
    "recv_any_source_",
)


class Listener(TorchDispatchMode):
    """Dispatch mode that adds a row to `ledger` for each collective and each message.

    Raises NotImplementedError for one that it cannot count.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group, self.ledger = group, Ledger()

    def __enter__(self) -> Ledger:
        super().__enter__()
        return self.ledger

    def __torch_dispatch__(
        self, call: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "device_mesh") for kind in types):
            return NotImplemented  # a DTensor dispatches again, with its local tensors
        packet = getattr(call, "overloadpacket", call)
        namespace, _, name = str(packet).rpartition(".")
        if namespace in ("c10d", "_c10d_functional") and name not in SILENT and not ledger.paused:
            self.ledger.rows.append(self._row(namespace, name, args))
        return call(*args, **(kwargs or {}))

    def _row(self, namespace: str, name: str, args: Any) -> Row:
        known = COLLECTIVES if namespace == "c10d" else FUNCTIONAL
        if name == "send":
            (x,) = args[0]
            kind = "send" if x.is_floating_point() else "bookkeeping"
            return Row(kind, self.group.axis, Fraction(x.numel() * x.element_size()), 0.0)
        if namespace == "_c10d_functional" and name == "all_to_all_single":
            return Row("all_to_all", self.group.axis, Fraction(to_others(args)), 0.0)
        uneven = name == "alltoall_base_" and len(set(args[4])) > 1
        if name not in known or uneven:
            raise NotImplementedError(f"the listener cannot count torch.ops.{namespace}.{name}")
        if name == "alltoall_":  # a list of places, a list of pieces, the group
            pieces = list(args[1])
            del pieces[dist.ProcessGroup.unbox(args[2]).rank()]
            return Row("all_to_all", self.group.axis, Fraction(sum(x.nbytes for x in pieces)), 0.0)
        n, (op, times, _) = ranks_of(args), known[name]
        whole = COLLECTIVES[name][2] if namespace == "c10d" else 0
        tensors = [x for x in tree_leaves(args[whole]) if isinstance(x, Tensor)]
        size = sum(x.numel() * x.element_size() for x in tensors)
        if namespace != "c10d" and not FUNCTIONAL[name][2]:
            size *= n
        if times == 1 and not any(x.is_floating_point() for x in tensors):
            op = "bookkeeping"
        return Row(op, self.group.axis, Fraction(times * (n - 1) * size, n), 0.0)


def to_others(args: Any) -> int:
    """Return the bytes that a functional all-to-all sends to other ranks: (x, rows received, rows sent, group)."""
    x, _, rows, name = args
    return int((sum(rows) - rows[_resolve_process_group(name).rank()]) * x[:1].numel() * x.element_size())


def ranks_of(args: Any) -> int:
    """Return the size of the call's process group: an object in c10d, a name in functional collectives."""
    for x in args:
        if isinstance(x, torch.ScriptObject):
            return dist.ProcessGroup.unbox(x).size()
    name: Any = [x for x in args if isinstance(x, str)][-1]
    return _resolve_process_group(name).size()
