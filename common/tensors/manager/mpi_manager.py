"""The ranks of a program as one object: who am I, and what ranks say to one another.

    mpi = MPIManager()                   # starts the process group, ends it with the program
    if mpi.is_master_process():
        print(mpi.get_size())

Every rank calls the same methods in the same order. Objects travel pickled; tensors travel as they are.
"""

from __future__ import annotations

import atexit
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from common import comm
from common.errors import RankError, UsageError
from common.launch.program import show_on_stderr
from common.launch.runtime import Runtime, runtime


class MPIManager:
    """The ranks that mpirun or torchrun started, or one rank without either.

    rt: a runtime that exists already. timeout: the longest that any wait may last, in seconds. An exception that
    a program does not catch ends all ranks, with exit code 2 for bad input and 1 for anything else.
    """

    def __init__(self, rt: Runtime | None = None, device: str = "auto", timeout: float = 60.0) -> None:
        self._stack = ExitStack()
        if rt is None:
            try:
                rt = self._stack.enter_context(runtime(device, timeout=timeout))
            except UsageError as error:
                show_on_stderr(f"error: {error}")
                sys.exit(2)
            atexit.register(self.close)
            sys.excepthook = self._failed
        self.runtime, self.world, self.device = rt, rt.world, rt.device

    def close(self) -> None:
        """Wait for the other ranks and end the process group. A program's end calls it."""
        self._stack.close()

    def __enter__(self) -> MPIManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, where)

    def _failed(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if isinstance(error, UsageError) and self.get_size() == 1:
            show_on_stderr(f"error: {error}")
            sys.exit(2)
        sys.__excepthook__(kind, error, where) if self.get_size() == 1 else self.__exit__(kind, error, where)

    @contextmanager
    def _call(self, name: str, root: int | None = None) -> Iterator[None]:
        """Check the rank `root`, and name this rank and the call in whatever fails inside."""
        try:
            if root is not None and not 0 <= root < self.get_size():
                raise UsageError(
                    f"{name}: rank {root} of {self.get_size()}; give one from 0 to {self.get_size() - 1}"
                )
            yield
        except (UsageError, RankError):
            raise
        except Exception as error:
            raise RuntimeError(f"rank {self.get_rank()}, {name}: {error}") from error

    def get_rank(self) -> int:
        """Return this rank's number, from 0."""
        return self.world.rank

    def get_size(self) -> int:
        """Return the number of ranks: mpirun's -n."""
        return self.world.size

    def get_gpu_id(self) -> int:
        """Return the GPU of this rank, its number on this host modulo the GPUs; -1 without a GPU."""
        return self.device.index if self.device.type == "cuda" else -1

    def is_master_process(self) -> bool:
        """Return True on rank 0."""
        return self.get_rank() == 0

    def barrier(self) -> None:
        """Wait until every rank is here."""
        with self._call("barrier"):
            comm.barrier(self.world)

    def synchronize(self) -> None:
        """Wait for the GPU, where there is one, and then for every rank."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.barrier()

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the object of rank `root` on every rank."""
        with self._call("broadcast", root):
            return comm.everyones(value if self.get_rank() == root else None, self.world)[root]

    def scatter(self, values: Sequence[Any] | None, root: int = 0) -> Any:
        """Return object i of the list of rank `root` on rank i; the others give None."""
        every = self.broadcast(list(values) if values is not None else None, root)
        if every is None or len(every) != self.get_size():
            given = "None" if every is None else f"{len(every)} objects"
            raise UsageError(
                f"scatter: rank {root} gives {given} for {self.get_size()} ranks; give one for each"
            )
        return every[self.get_rank()]

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return the objects of all ranks on rank `root`, None elsewhere."""
        with self._call("gather", root):
            every = comm.everyones(value, self.world)
            return every if self.get_rank() == root else None

    def allgather(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in their order."""
        with self._call("allgather"):
            return comm.everyones(value, self.world)

    def allreduce(self, value: float, op: str = "sum") -> Any:
        """Return the sum, max or min of a number of each rank; whole numbers stay whole."""
        every = self.allgather(value)
        return {"sum": sum(every), "max": max(every), "min": min(every)}[_known(op)]

    def reduce(self, value: float, op: str = "sum", root: int = 0) -> Any:
        """Return the sum, max or min on rank `root`, None elsewhere."""
        with self._call("reduce", root):
            total = self.allreduce(value, op)
            return total if self.get_rank() == root else None

    def broadcast_tensor(self, x: Tensor | None, root: int = 0) -> Tensor:
        """Return the tensor of rank `root` on every rank; the others give None. Sends (n-1)/n |x|."""
        shape, dtype = self.broadcast(None if x is None else (x.shape, x.dtype), root) or (None, None)
        if shape is None:
            raise UsageError(f"broadcast_tensor: rank {root} gives no tensor")
        with self._call("broadcast_tensor"):
            mine = x is not None and self.get_rank() == root
            out = (
                x.to(self.device).contiguous()
                if mine and x is not None
                else torch.empty(shape, dtype=dtype, device=self.device)
            )
            comm.broadcast(torch.view_as_real(out) if out.is_complex() else out, self.world, root)
            return out

    def reduce_tensor(self, x: Tensor, op: str = "sum", root: int = 0) -> Tensor | None:
        """Return the sum, max or min of equal shapes on rank `root`, None elsewhere; x stays as it is.

        Sends 2 (n-1)/n |x|, as an all-reduce.
        """
        with self._call("reduce_tensor", root):
            total = self.allreduce_tensor(x, op)
            return total if self.get_rank() == root else None

    def allreduce_tensor(self, x: Tensor, op: str = "sum") -> Tensor:
        """Return the sum, max or min of equal shapes on every rank; x stays as it is. Sends 2(n-1)/n |x|."""
        with self._call("allreduce_tensor"):
            total = x.clone(memory_format=torch.contiguous_format)
            comm.all_reduce(
                torch.view_as_real(total) if total.is_complex() else total, self.world, _known(op)
            )
            return total

    def allgather_tensor(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return the pieces of all ranks joined along `dim`; their lengths there may differ."""
        lengths = self.allgather(x.shape[dim])
        with self._call("allgather_tensor"):
            return comm.all_gather(x, self.world, dim, lengths)

    def send(self, value: Any, dest: int, tag: int = 0) -> None:
        """Send an object to rank `dest`, which calls recv. Returns once it is on its way or has arrived."""
        with self._call(f"send to rank {dest}", dest):
            data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
            comm.send(torch.tensor([len(data)]), self.world, dest, tag)
            comm.send(data, self.world, dest, tag)

    def recv(self, source: int, tag: int = 0) -> Any:
        """Return the object that rank `source` sends."""
        with self._call(f"recv from rank {source}", source):
            length = torch.zeros(1, dtype=torch.int64)
            comm.recv(length, self.world, source, tag)
            data = torch.empty(int(length), dtype=torch.uint8)
            comm.recv(data, self.world, source, tag)
            return pickle.loads(data.numpy().tobytes())

    def sendrecv(self, value: Any, dest: int, source: int) -> Any:
        """Send an object to rank `dest` and return that of rank `source`, both at once: no order can hang."""
        with self._call(f"sendrecv to rank {dest} from rank {source}", dest):
            lengths = self.allgather(len(packed := pickle.dumps(value)))
            data = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
            out = torch.empty(lengths[source], dtype=torch.uint8)
            if self.get_size() == 1:
                out = data
            comm.exchange(data, out, self.world, dest, source)
            return pickle.loads(out.numpy().tobytes())

    def ring_neighbours(self) -> tuple[int, int]:
        """Return the ranks before and after this one in a ring."""
        return (self.get_rank() - 1) % self.get_size(), (self.get_rank() + 1) % self.get_size()

    def print_master(self, *values: object) -> None:
        """Print on rank 0."""
        if self.is_master_process():
            print(*values, flush=True)

    def print_all(self, *values: object) -> None:
        """Print what each rank gives, in the order of the ranks, each line with its rank."""
        text = " ".join(map(str, values))
        for rank, line in enumerate(self.gather(text) or []):
            print(f"[rank {rank}] {line}", flush=True)


def _known(op: str) -> str:
    if op not in ("sum", "max", "min"):
        raise UsageError(f"operation {op!r} is unknown; choose one of sum, max, min")
    return op
