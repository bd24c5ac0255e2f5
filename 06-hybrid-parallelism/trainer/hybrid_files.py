"""Checkpoint files: written whole or not at all, with a checksum of every file.

    step-00000200/   __0_0.distcp ... __7_0.distcp   a file of each rank, which holds boxes of whole tensors
                     .metadata                       names, shapes, and the file of each box
                     about.json                      the step and the caller's metadata
                     SHA256SUMS                      of all these; `sha256sum -c SHA256SUMS` checks them by hand

torch.distributed.checkpoint writes the files, so its own `load` can read them. They are written to
step-N.partial; each file is synced to the disk before the next stage, SHA256SUMS is the last, and then one
rename makes the checkpoint. A failure before the rename leaves a folder that is never taken for a checkpoint;
the next save removes it. If any rank fails, all ranks raise an error with its rank and reason, and earlier
checkpoints stay.

Checksums are computed from the bytes on their way to the disk. They detect damage by disks and copies, not
forgery: against that, sign SHA256SUMS. In one second one core here computes SHA-256 of 0.4 GB of its rank's
file, or zlib's crc32 of 0.7 GB; SHA-256 is used because every machine has a command for it.

A forged checkpoint holds wrong numbers, but runs no code: `.metadata` is a pickle, which may call any function, so
`Reader` creates only the classes that the library writes; tensors are read with weights_only=True.
One run at a time uses a folder: `hold` locks it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import socket
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, ClassVar, cast

import torch
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    SavePlan,
    SavePlanner,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import _get_layout

from common.errors import UsageError

SUMS, LOCK = "SHA256SUMS", ".lock"
CLASSES = (
    Metadata,
    TensorStorageMetadata,
    TensorProperties,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
)
IN_METADATA: dict[tuple[str, str], Any] = {
    **{(x.__module__, x.__qualname__): x for x in (*CLASSES, _StorageInfo, _MEM_FORMAT_ENCODING, torch.Size)},
    **{
        ("torch", str(x).removeprefix("torch.")): x
        for x in vars(torch).values()
        if isinstance(x, torch.dtype)
    },
    ("torch.serialization", "_get_layout"): _get_layout,
}
HELD: dict[tuple[int, int], IO[str]] = {}  # locks of this process


def hold(folder: Path) -> str:
    """Lock a folder for this process until `release` or its end; return who else holds the lock, or "".

    A folder that cannot be written, or that lies on a disk without locks, is left unlocked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError:
        return ""
    if (key := inode(file.fileno())) in HELD:
        file.close()
        return ""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        HELD[key] = file
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    except OSError as error:
        file.seek(0)
        return (file.read(200).strip() or "another process") if isinstance(error, BlockingIOError) else ""
    return ""


def release(folder: Path) -> None:
    """Unlock a folder."""
    with suppress(OSError, KeyError):
        HELD.pop(inode(folder / LOCK)).close()


def inode(file: Path | int) -> tuple[int, int]:
    """Return (device, inode number), which identify a file whatever its name is. Raises OSError."""
    status = os.stat(file)
    return status.st_dev, status.st_ino


def steps(folder: Path) -> list[str]:
    """List the checkpoints of a folder by name, the oldest first."""
    found = [path.name for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(found, key=lambda name: int(name[5:]))


def remove(path: Path) -> None:
    """Remove a folder, or a file in a checkpoint's place; leave it if that fails."""
    with suppress(OSError):
        folder = path.is_dir() and not path.is_symlink()
        shutil.rmtree(path, ignore_errors=True) if folder else path.unlink()


def put_back(folder: Path) -> None:
    """Restore each checkpoint that a save was replacing, unless its replacement is complete and undamaged.

    Raises OSError.
    """
    for left in folder.glob("step-*.replaced"):
        there = left.with_suffix("")
        if not re.fullmatch(r"step-\d{8,}", there.name):
            continue
        if fault(there) is None:
            remove(left)
        else:
            remove(there)
            left.rename(there)


def fault(place: Path, part: int = 0, parts: int = 1) -> str | None:
    """Return a description of a checkpoint's damage, or None. Read every `parts`-th file, from `part` on."""
    try:
        with opened(place / SUMS) as file:
            lines = file.read().splitlines()
        found = [re.fullmatch(rb"([0-9a-f]{64})  ([\w.-]{1,255})", line) for line in lines]
        sums = {line[2].decode(): line[1].decode() for line in found if line}
        needed = {".metadata", "about.json", *(file.name for file in place.glob("*.distcp"))}
        if not all(found) or needed - sums.keys():
            return f"{SUMS} is not a list of all files and their sums"
        for name in sorted(sums)[part::parts]:
            if sum_of(place / name) != sums[name]:
                return f"{name} is not as {SUMS} says"
    except OSError as error:
        return f"{Path(error.filename or place).name}: {error.strerror}"
    return None


def opened(path: Path) -> IO[bytes]:
    """Open a regular file. Raises OSError for any other: reading a pipe or a device may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return path.open("rb")


def sum_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    total = hashlib.sha256()
    with opened(path) as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


class Summed(io.IOBase):
    """Stream into a file that also computes the SHA-256 of the bytes written."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sum = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write data and add it to the checksum; return the number of bytes written."""
        self.sum.update(data)
        return self.file.write(data)

    def tell(self) -> int:
        """Return the position in the file, in bytes."""
        return self.file.tell()


class SummedFiles(FileSystem):
    """File system that syncs each file to the disk when it is closed, and then knows its SHA-256 by name."""

    def __init__(self) -> None:
        self.sums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Yield a new file; at the end sync it and record its checksum."""
        with open(path, mode) as file:
            stream = Summed(cast(IO[bytes], file))
            yield stream
            file.flush()
            os.fsync(file.fileno())
        self.sums[Path(path).name] = stream.sum.hexdigest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file and its checksum."""
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class Writer(FileSystemWriter):
    """The library's writer, into step-N.partial, which is renamed to step-N once every rank has written."""

    def __init__(self, folder: Path, step: int, about: str, keep: int) -> None:
        self.final, self.about, self.keep = folder / f"step-{step:08d}", about, keep
        super().__init__(self.final.with_suffix(".partial"), sync_files=False)
        self.fs: SummedFiles = SummedFiles()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Create the folder on the coordinator, before any rank writes; others must see it, or fail."""
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            self.final.parent.mkdir(parents=True, exist_ok=True)
            put_back(self.final.parent)
            for ending in ("partial", "removed"):
                for left in self.final.parent.glob(f"step-*.{ending}"):
                    remove(left)
            Path(self.path).mkdir()

    def storage_meta(self) -> StorageMeta:
        """Return the checkpoint's name. The library stores a path, in a class that some Pythons lack."""
        return StorageMeta(self.final.name)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged: the coordinator has created the folder."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's file. The last of the results holds its checksum."""
        try:
            results = super().write_data(plan, planner).value()
        except RuntimeError as error:  # torch.save hides the file's own error
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        results.append(WriteResult(MetadataIndex(SUMS), 0, self.fs.sums))
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata and checksums on one rank, at the end; rename the folder, remove old checkpoints."""
        folder = self.final.parent
        for of_rank in results:
            self.fs.sums.update(of_rank.pop().storage_data)
        super().finish(metadata, results)
        self._write("about.json", self.about)
        self._write(SUMS, "".join(f"{total}  {name}\n" for name, total in sorted(self.fs.sums.items())))
        sync(Path(self.path))
        replaced = self.final.with_suffix(".replaced")
        if self.final.exists():
            self.final.rename(replaced)
        Path(self.path).rename(self.final)
        sync(folder)
        remove(replaced)
        before = [name for name in steps(folder) if int(name[5:]) <= int(self.final.name[5:])]
        for name in before[: -self.keep]:
            removed = (folder / name).with_suffix(".removed")
            with suppress(OSError):  # an old checkpoint that cannot be removed stays
                (folder / name).rename(removed)  # atomic: half of it is never taken for a checkpoint
                remove(removed)

    def _write(self, name: str, text: str) -> None:
        with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
            cast(Summed, stream).write(text.encode())


def build(unpickler: Any) -> None:
    """Set the attributes of an object. Raises UnpicklingError for a class or a function, which all objects share."""
    if callable(unpickler.stack[-2]):
        raise pickle.UnpicklingError("it changes a class or a function")
    pickle._Unpickler.dispatch[pickle.BUILD[0]](unpickler)


class MetadataUnpickler(pickle._Unpickler):  # its BUILD can be replaced, the C unpickler's cannot
    """Unpickler of `.metadata` files, which refuses any other class or function before it can be called."""

    dispatch: ClassVar = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: build}

    def find_class(self, module: str, name: str) -> Any:
        """Return the class, function or dtype if it is on the list. Raises UnpicklingError."""
        if (module, name) not in IN_METADATA:
            raise pickle.UnpicklingError(f"it asks for {f'{module}.{name}'!a:.80}")
        return IN_METADATA[module, name]


class Reader(FileSystemReader):
    """The library's reader, without running code from a file. `tensors`: shapes and types by name."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata: which file holds each tensor. Raises UsageError for a file that is no such metadata."""
        path = Path(self.path) / ".metadata"
        try:
            with opened(path) as file:
                metadata: Metadata = MetadataUnpickler(file).load()
            named = cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)
            if not all(isinstance(name, str) for name in named):
                raise TypeError("the name of a tensor is no text")
            self.tensors = {name: describe(x.size, x.properties.dtype) for name, x in named.items()}
            for at in metadata.storage_data.values():
                if not re.fullmatch(r"[\w.-]+\.distcp", at.relative_path):  # `fault` has read all of these
                    raise ValueError(f"it asks for the file {at.relative_path!a:.80}")
        except Exception as error:  # an invalid pickle may raise any exception
            why = ascii(str(error) or type(error).__name__)[1:-1]  # it may quote the file
            raise UsageError(f"{path} is not checkpoint metadata: {why:.200}") from None
        return metadata

    def about(self) -> dict[str, Any]:
        """Return about.json: the step and the caller's metadata. Raises UsageError."""
        path = Path(self.path) / "about.json"
        try:
            about = json.loads(path.read_text())
            if about["step"] != int(path.parent.name[5:]):
                raise ValueError(f"it is of step {about['step']!a:.40}")
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise UsageError(f"{path} is not that of {path.parent.name}: {error}") from None
        return cast(dict[str, Any], about)


def describe(shape: torch.Size, dtype: torch.dtype) -> str:
    """Describe a tensor for a message: [8, 6] float64."""
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def sync(folder: Path) -> None:
    """Sync a folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
