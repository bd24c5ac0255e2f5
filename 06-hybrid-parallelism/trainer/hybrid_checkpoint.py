"""Checkpoints: written whole or not at all, readable on any mesh, restored only if their checksums match.

    checkpoints = Checkpoints(folder, mesh, keep=3, asynchronous=True)
    about = checkpoints.restore(entries_of(model, optimizer))          # None if there is no checkpoint
    ...
    checkpoints.save(step, entries_of(model, optimizer), {"seed": 0})  # returns when the numbers are copied
    checkpoints.finish()                                               # at the end

hybrid_pieces.py assigns the numbers to the ranks that write and read them; hybrid_files.py writes and reads
the files.

Asynchronous: the numbers are copied, then a thread of each rank writes them while training goes on. The
threads communicate at any time, also while the main threads communicate in another order. They therefore have
a group of their own, on gloo: NCCL and MPI would mix up two threads' messages on one communicator. torch's
async_save is not used: it also copies what other ranks write, and the checkpoint does not have its final name
when it ends.
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
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from common import comm
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.lesson.equality import Named

from hybrid_files import Reader, Writer, describe, fault, hold, put_back, release, steps
from hybrid_pieces import Entry, LoadPieces, Piece, SavePieces, pieces, writes

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one rank needs no process group


class SaveFailed(UsageError):
    """Error on all ranks: a checkpoint was not written. Earlier ones are unchanged; training may go on."""


def entries_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, owner: Named | None = None
) -> list[Entry]:
    """List the state that a run needs to resume: parameters, saved buffers, optimizer states.

    owner: the holder of the parameters that the optimizer steps on, if not the model. Those of a Zero are its
    shards: call its `changed` after a restore. An optimizer state that does not exist yet is created, filled
    with zeros, so that it can be restored.
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
    """Return the parameters that the optimizer steps on."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Create missing optimizer states, filled with zeros, by a step with lr = 0, which changes no weight."""
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

    keep: the largest number of checkpoints in the folder. All ranks construct this object and call its
    methods alike. Rank 0 locks the folder until its process ends, or a `with` block around this object: two
    runs would remove each other's partial saves. Raises UsageError if another process holds the lock.
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
        """Write a checkpoint, with `about` beside it as JSON; then remove all but the last `keep`.

        Asynchronous: wait for the previous save, copy the numbers and return while a thread writes them.
        Raises SaveFailed on all ranks if any rank could not write, and for the previous save if that failed.
        """
        self.finish()
        mine = [p for entry in entries if writes(entry, self.mesh) for p in pieces(entry, self.mesh)]
        text = json.dumps({"step": step, **about}, indent=1) + "\n"
        if self.asynchronous:
            self.pending = self.thread.submit(self._write, step, self._copied(mine), text)
        else:
            self._write(step, mine, text)

    def finish(self) -> None:
        """Wait for the save in progress. Raises SaveFailed on all ranks if it failed."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()

    def restore(self, entries: Iterable[Entry]) -> dict[str, Any] | None:
        """Fill the entries from the newest good checkpoint of any mesh; return its step and `about`.

        Returns None if there is no checkpoint. Rank 0 names each damaged checkpoint, and the one before it is
        tried. Raises UsageError if all are damaged, or if the checkpoint is of another model.
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
        """Put replaced checkpoints back; return the names of those that rank 0 sees, the oldest first."""
        if self.mesh.world.rank == 0:
            try:
                put_back(self.folder)
            except OSError as error:
                print(f"warning: {error.filename}: {error.strerror}", file=sys.stderr)
        return comm.everyones(steps(self.folder), self.mesh.world)[0]

    def _copied(self, mine: list[Piece]) -> list[Piece]:
        """Copy the pieces to host memory apart from training's, reused by each save; pinned for a GPU."""
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
        check_model(place, reader.tensors, entries, self.mesh)
        mine = [p for entry in entries for p in pieces(entry, self.mesh)]
        pg = self.mesh.world.pg
        try:
            dcp.load(
                {}, storage_reader=reader, planner=LoadPieces(mine), process_group=pg, no_dist=pg is None
            )
        except CheckpointException as failure:
            raise UsageError(f"{place} was not read: {reason(failure)}") from None
        return about


def check_model(place: Path, there: Mapping[str, str], entries: Iterable[Entry], mesh: Mesh) -> None:
    """Check that names, shapes and types agree. Raises UsageError with the first tensor that differs."""
    mine = {e.name: describe(e.whole(mesh), e.tensor.dtype) for e in entries if e.whole(mesh).numel()}
    here = {name: x for rank in comm.everyones(mine, mesh.world) for name, x in rank.items()}
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            raise UsageError(
                f"{place} is of another model or optimizer: {name!a:.80} is "
                f"{there.get(name, 'missing')!s:.80} there and {here.get(name, 'missing')} here; "
                f"give the options it was made with, or another {'folder' if place.is_dir() else 'file'}"
            )


def reason(failure: CheckpointException) -> str:
    """Return the first rank that failed, and its error, in one line."""
    rank, (error, _) = min(failure.failures.items())
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"rank {rank}: {error.strerror}{where}"
    return f"rank {rank}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
