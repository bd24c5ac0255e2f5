"""Checkpoints: written whole or not at all, by any mesh for any other, and believed only when their sums are right.

    checkpoints = Checkpoints(folder, mesh, keep=3, asynchronous=True)
    about = checkpoints.restore(entries_of(model, optimizer))          # None where there is none; then begin anew
    ...
    checkpoints.save(step, entries_of(model, optimizer), {"seed": 0})  # returns when the numbers are copied
    checkpoints.finish()                                               # at the end

hybrid_pieces.py says which numbers are written and read by which rank, hybrid_files.py how they get to the disk.

Asynchronous: the numbers are copied, then a thread of each rank writes them while training goes on. Threads of
different ranks must talk at any time, among them while the ranks themselves compute and talk in another order; so they
have a group of their own, on gloo, since NCCL and MPI would mix up two threads' messages on one communicator.
torch's async_save is not used: it copies what other ranks will write, too, and a checkpoint has no name when it ends.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hybrid_files import Reader, Writer, describe, fault, hold, put_back, release, steps
from hybrid_pieces import Entry, LoadPieces, Piece, SavePieces, pieces, writes
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from common import comm
from common.equality import Named
from common.errors import UsageError
from common.mesh import Mesh

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one rank needs no group, and knows it


class SaveFailed(UsageError):
    """A checkpoint was not written, on all ranks alike; those before it are as they were. Training may go on."""


def entries_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, owner: Named | None = None
) -> list[Entry]:
    """All that a run must have again: parameters, buffers that are saved, the optimizer's states.

    owner: who has the parameters that the optimizer steps on, if not the model. Those of a Zero are its pieces:
    call its `changed` after a restore. A state that the optimizer has not made yet is made, of zeros, so that it can
    be restored.
    """
    named = {**dict(model.named_parameters()), **dict((owner or model).named_parameters())}
    saved = set(model.state_dict())
    named_buffers = [(name, b) for name, b in model.named_buffers() if name in saved]
    entries = [Entry(name, x, x) for name, x in (*named.items(), *named_buffers)]
    if optimizer is not None:
        make_states(optimizer)
        names = {id(p): name for name, p in named.items()}
        for p in stepped(optimizer):
            states = {key: x for key, x in optimizer.state[p].items() if isinstance(x, Tensor)}
            entries += [Entry(f"optimizer.{key}.{names[id(p)]}", x, p) for key, x in states.items()]
    return entries


def stepped(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters on which it steps."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def make_states(optimizer: torch.optim.Optimizer) -> None:
    """States of zeros where there are none: those that a step with lr = 0 makes, for which no weight changes."""
    fresh = [p for p in stepped(optimizer) if not optimizer.state.get(p)]
    if not fresh:
        return
    gradients, rates = [p.grad for p in stepped(optimizer)], [g["lr"] for g in optimizer.param_groups]
    for p in stepped(optimizer):
        p.grad = None
    for p in fresh:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for p, gradient in zip(stepped(optimizer), gradients, strict=True):
        p.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for p in fresh:
        for x in optimizer.state[p].values():
            if isinstance(x, Tensor):
                x.zero_()


class Checkpoints:
    """The checkpoints in one folder, which all ranks of the mesh must see.

    keep: how many there are at the most. All ranks make one and call its methods alike. No other process can have the
    folder until rank 0's ends or a `with` block around this one does: two runs would remove each other's partial saves.
    Raises UsageError when another has it.
    """

    def __init__(self, folder: Path, mesh: Mesh, keep: int = 3, asynchronous: bool = False) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep} checkpoints: at least 1 is needed to resume")
        self.folder, self.mesh, self.keep, self.asynchronous = folder, mesh, keep, asynchronous
        if who := comm.everyones(hold(folder) if mesh.world.rank == 0 else "", mesh.world)[0]:
            raise UsageError(
                f"{folder} is in use by {who}; give another folder, or wait until that run has ended"
            )
        self.pg = mesh.world.pg
        if asynchronous and self.pg is not None:
            self.pg = dist.new_group(list(mesh.world.ranks), mesh.timeout, "gloo")
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[None] | None = None
        self.host: dict[MetadataIndex, Tensor] = {}

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        release(self.folder)

    def save(self, step: int, entries: Iterable[Entry], about: Mapping[str, Any]) -> None:
        """Write a checkpoint; `about` is kept with it as JSON. Then all but the last `keep` are removed.

        Asynchronous: returns when the numbers are copied; waits for the save before.
        Raises SaveFailed on all ranks when any could not write, and for the save before when that could not.
        """
        self.finish()
        mine = [p for entry in entries if writes(entry, self.mesh) for p in pieces(entry, self.mesh)]
        text = json.dumps({"step": step, **about}, indent=1) + "\n"
        if self.asynchronous:
            self.pending = self.thread.submit(self._write, step, self._copied(mine), text)
        else:
            self._write(step, mine, text)

    def finish(self) -> None:
        """Return when nothing is being written. Raises SaveFailed on all ranks when that went wrong."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()

    def restore(self, entries: Iterable[Entry]) -> dict[str, Any] | None:
        """Fill the entries from the newest good checkpoint, whichever mesh wrote it; returns what `save` was told.

        None when there is no checkpoint. One that is damaged is named by rank 0, and the one before it is tried.
        Raises UsageError when all are damaged, or when it is that of another model.
        """
        self.finish()
        world, damaged = self.mesh.world, []
        for name in reversed(self.names()):
            faults = comm.everyones(fault(self.folder / name, world.rank, world.size), world)
            found = next(filter(None, faults), None)
            if found is None:
                return self._read(self.folder / name, list(entries))
            damaged.append(f"{name} ({found})")
            if world.rank == 0:
                print(f"warning: {self.folder / name} is damaged: {found}", file=sys.stderr)
        if damaged:
            raise UsageError(
                f"all checkpoints in {self.folder} are damaged: {', '.join(damaged)}; "
                f"give another folder to begin anew"
            )
        return None

    def names(self) -> list[str]:
        """The checkpoints that rank 0 sees, the oldest first."""
        if self.mesh.world.rank == 0:
            try:
                put_back(self.folder)
            except OSError as error:
                print(f"warning: {error.filename}: {error.strerror}", file=sys.stderr)
        return comm.everyones(steps(self.folder), self.mesh.world)[0]

    def _copied(self, mine: list[Piece]) -> list[Piece]:
        """The same pieces in memory that training does not touch, used again by the next save; pinned for a GPU."""
        copies = []
        for piece in mine:
            x = piece.tensor
            if piece.index not in self.host:
                self.host[piece.index] = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
            there = self.host[piece.index].copy_(x, non_blocking=True)
            copies.append(Piece(piece.name, piece.whole, piece.offsets, there))
        if any(piece.tensor.is_cuda for piece in mine):
            torch.cuda.synchronize()
        return copies

    def _write(self, step: int, mine: list[Piece], about: str) -> None:
        writer = Writer(self.folder, step, about, self.keep)
        try:
            dcp.save(
                {},
                storage_writer=writer,
                planner=SavePieces(mine),
                process_group=self.pg,
                no_dist=self.pg is None,
            )
        except CheckpointException as failure:
            if self.mesh.world.rank == 0:
                shutil.rmtree(writer.path, ignore_errors=True)
                with suppress(OSError):
                    put_back(self.folder)
            before = steps(self.folder)
            there = f"the newest is {before[-1]}" if before else "there is none yet"
            raise SaveFailed(
                f"checkpoint {writer.final} was not written: {reason(failure)}; {there}"
            ) from None

    def _read(self, place: Path, entries: list[Entry]) -> dict[str, Any]:
        reader = Reader(place)
        about = reader.about()
        reader.read_metadata()
        self._check_model(place, reader.tensors, entries)
        mine = [p for entry in entries for p in pieces(entry, self.mesh)]
        pg = self.mesh.world.pg
        try:
            dcp.load(
                {}, storage_reader=reader, planner=LoadPieces(mine), process_group=pg, no_dist=pg is None
            )
        except CheckpointException as failure:
            raise UsageError(f"{place} was not read: {reason(failure)}") from None
        return about

    def _check_model(self, place: Path, there: dict[str, str], entries: list[Entry]) -> None:
        """Raises UsageError that names the first tensor which is not the same there and here."""
        mine = {
            e.name: describe(e.whole(self.mesh), e.tensor.dtype)
            for e in entries
            if e.whole(self.mesh).numel()
        }
        here = {name: x for rank in comm.everyones(mine, self.mesh.world) for name, x in rank.items()}
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                raise UsageError(
                    f"{place} is of another model or optimizer: {name!a:.80} is "
                    f"{there.get(name, 'missing')!s:.80} there and "
                    f"{here.get(name, 'missing')} here; give the options it was made with, or another folder"
                )


def reason(failure: CheckpointException) -> str:
    """The first rank that failed, and why, in one line."""
    rank, (error, _) = min(failure.failures.items())
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"rank {rank}: {error.strerror}{where}"
    return f"rank {rank}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
