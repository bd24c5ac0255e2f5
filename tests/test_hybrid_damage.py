"""Checkpoints when a disk is full, a file is damaged, a rank dies, or the model is another: none is lost."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import pickle
import resource
import shutil
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from placed import entries
from torch.distributed.checkpoint import ChunkStorageMetadata

from common import comm
from common.comm import Group
from common.comm.mesh import Mesh
from common.comm.placement import Shard, place
from common.errors import RankError, UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn

import hybrid_files
from hybrid_checkpoint import Checkpoints, SaveFailed
from hybrid_files import SUMS, Reader, fault, steps, sum_of
from hybrid_pieces import Entry

ALONE_MESH = Mesh(Group.alone("world"))
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@contextlib.contextmanager
def small_disk(active: bool) -> Iterator[None]:
    """Make files fail that grow beyond 3000 bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000 if active else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def full_disk(rt: Runtime, folder: Path, asynchronous: bool, large: bool) -> dict[str, Any]:
    """Save twice, the second time with a full disk on rank 1 alone, and then a third time.

    large: add a tensor that exceeds the file's buffer, so that torch.save itself fails on the full disk.
    """
    mesh = Mesh(rt.world, tp=2)
    checkpoints, mine = Checkpoints(folder, mesh, asynchronous=asynchronous), entries(mesh, False)
    if large:
        place(x := torch.zeros(4000), "tp", Shard(0))
        mine.insert(0, Entry("large", x, x))
    checkpoints.save(1, mine, {})
    checkpoints.finish()
    before, found = content(folder), {}
    with small_disk(rt.rank == 1):
        try:
            checkpoints.save(2, mine, {})
            found["save raised"] = False
            checkpoints.finish()
        except SaveFailed as error:
            found.setdefault("save raised", True)
            found["message"] = str(error)
    comm.barrier(rt.world)
    found["untouched"] = content(folder) == before
    comm.barrier(rt.world)
    checkpoints.save(2, mine, {})
    checkpoints.finish()
    found["after"] = steps(folder)
    return found


@pytest.mark.parametrize(("asynchronous", "large"), [(False, True), (True, False)])
def test_a_full_disk_loses_nothing(asynchronous: bool, large: bool, tmp_path: Path) -> None:
    for found in spawn(full_disk, 2, tmp_path, asynchronous, large):
        assert found["message"] == (
            f"checkpoint {tmp_path}/step-00000002 was not written: rank 1: File too large; "
            f"the newest is step-00000001"
        )
        assert found["save raised"] != asynchronous
        assert found["untouched"]
        assert found["after"] == ["step-00000001", "step-00000002"]


def saved(folder: Path, *at: int, keep: int = 9) -> Checkpoints:
    """Save checkpoints on one rank, with the step as the value of every element; return them."""
    with Checkpoints(folder, ALONE_MESH, keep) as checkpoints:
        for step in at:
            checkpoints.save(step, [Entry("w", w := torch.full((50, 50), float(step)), w)], {"seed": 5})
    return checkpoints


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def add_sum(place: Path, name: str) -> None:
    """Add a line to SHA256SUMS."""
    with (place / SUMS).open("a") as file:
        file.write(f"{64 * '0'}  {name}\n")


def pipe(file: Path) -> None:
    """Replace the file by a pipe to which nobody writes."""
    file.unlink()
    os.mkfifo(file)


DAMAGE = {
    "a bit": (lambda at: flip(at / "__0_0.distcp"), "__0_0.distcp is not as SHA256SUMS says"),
    "cut short": (
        lambda at: os.truncate(at / "__0_0.distcp", 5000),
        "__0_0.distcp is not as SHA256SUMS says",
    ),
    "missing": (lambda at: (at / "__0_0.distcp").unlink(), "__0_0.distcp: No such file or directory"),
    "metadata": (lambda at: flip(at / ".metadata"), ".metadata is not as SHA256SUMS says"),
    "about": (lambda at: flip(at / "about.json"), "about.json is not as SHA256SUMS says"),
    "no sums": (lambda at: (at / "SHA256SUMS").unlink(), "SHA256SUMS: No such file or directory"),
    "fewer sums": (lambda at: os.truncate(at / "SHA256SUMS", 0), "SHA256SUMS is not a list of all files"),
    "a path": (lambda at: add_sum(at, "/dev/zero"), "SHA256SUMS is not a list of all files"),
    "the folder above": (lambda at: add_sum(at, ".."), "..: Not a regular file"),
    "no name": (lambda at: add_sum(at, "a\0b"), "SHA256SUMS is not a list of all files"),
    "a long name": (lambda at: add_sum(at, 256 * "a"), "SHA256SUMS is not a list of all files"),
    "sums are a pipe": (lambda at: pipe(at / "SHA256SUMS"), "SHA256SUMS: Not a regular file"),
    "metadata is a pipe": (lambda at: pipe(at / ".metadata"), ".metadata: Not a regular file"),
    "a folder": (lambda at: shutil.rmtree(at) or at.touch(), "SHA256SUMS: Not a directory"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_the_one_before_is_used(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = saved(tmp_path, 1, 2, 3)
    damage, message = DAMAGE[name]
    damage(tmp_path / "step-00000003")
    w = torch.zeros(50, 50)
    assert checkpoints.restore([Entry("w", w, w)]) == {"step": 2, "seed": 5}
    assert w.eq(2.0).all()
    said = capsys.readouterr().err
    assert said.startswith(f"warning: {tmp_path}/step-00000003 is damaged: {message}")
    assert said.count("\n") == 1
    saved(tmp_path, 3)  # in its place
    assert checkpoints.restore([Entry("w", w, w)]) == {"step": 3, "seed": 5}
    assert w.eq(3.0).all()


def test_no_bit_of_the_sums_can_flip_unseen(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    place = tmp_path / "step-00000001"
    file = place / "SHA256SUMS"
    data = file.read_bytes()
    (place / "notes.txt").touch()  # a foreign file is ignored
    assert fault(place) is None
    for at in range(len(data)):
        other = bytearray(data)
        other[at] ^= 1 << at % 8
        file.write_bytes(other)
        assert fault(place), at


def damaged_on_ranks(rt: Runtime, folder: Path) -> tuple[Any, str, str]:
    """Restore with the newest checkpoint damaged in a file that rank 1 alone reads; then the older, too."""
    mesh = Mesh(rt.world, dp=2)
    checkpoints, mine = Checkpoints(folder, mesh), entries(mesh, True)
    checkpoints.save(1, mine, {})
    checkpoints.save(2, mine, {})
    if rt.rank == 0:
        flip(folder / "step-00000002" / "__0_0.distcp")
    comm.barrier(rt.world)
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        about = checkpoints.restore(mine)
        comm.barrier(rt.world)
        if rt.rank == 0:
            flip(folder / "step-00000001" / "about.json")
        comm.barrier(rt.world)
        try:
            checkpoints.restore(mine)
        except UsageError as error:
            return about, err.getvalue(), str(error)
    return about, err.getvalue(), ""


def test_all_ranks_agree_on_what_is_damaged(tmp_path: Path) -> None:
    for rank, (about, said, message) in enumerate(spawn(damaged_on_ranks, 2, tmp_path)):
        assert about == {"step": 1}
        assert ("__0_0.distcp" in said) == (rank == 0)
        assert message.startswith(
            f"all checkpoints in {tmp_path} are damaged: step-00000002 (__0_0.distcp is"
        )
        assert "step-00000001 (about.json is" in message


def test_an_old_one_that_cannot_go_is_no_failure_of_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def held(path: Path, target: Path) -> Path:
        if target.suffix == ".removed":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", held)
    saved(tmp_path, 1, 2, keep=1)
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]


def test_the_last_k_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 30, 100000000, keep=2)
    assert steps(tmp_path) == ["step-00000030", "step-100000000"]
    saved(tmp_path, 40, keep=1)  # a later one, which was perhaps found damaged, does not push it out
    assert steps(tmp_path) == ["step-00000040", "step-100000000"]
    with pytest.raises(UsageError, match="at least 1"):
        saved(tmp_path, keep=0)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("w", torch.zeros(50, 51)), r"'w' is \[50, 50\] float32 there and \[50, 51\] float32 here"),
        (("w", torch.zeros(50, 50).double()), r"'w' is \[50, 50\] float32 there and \[50, 50\] float64 here"),
        (("v", torch.zeros(50, 50)), r"'v' is missing there and \[50, 50\] float32 here"),
    ],
)
def test_another_model_is_refused(entry: tuple[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    name, x = entry
    with pytest.raises(UsageError, match="step-00000001 is of another model or optimizer: " + message):
        saved(tmp_path, 1).restore([Entry(name, x, x)])


class Hostile:
    """Object that creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def forged(name: Any = "w", at: str = "", **changed: Any) -> Any:
    """Return a function that forges `.metadata`: a tensor of this name and these fields, in file `at`."""

    def content(marker: Path) -> bytes:
        metadata = Reader(marker.with_name("step-00000001")).read_metadata()
        metadata.state_dict_metadata = {name: replace(metadata.state_dict_metadata["w"], **changed)}
        for info in metadata.storage_data.values():
            info.relative_path = at or info.relative_path
        return pickle.dumps(metadata)

    return content


def forge(place: Path, name: str, content: bytes) -> None:
    """Replace a checkpoint's file, with its right sum in SHA256SUMS."""
    sums = (place / SUMS).read_text().replace(sum_of(place / name), hashlib.sha256(content).hexdigest())
    (place / name).write_bytes(content)
    (place / SUMS).write_text(sums)
    assert fault(place) is None


CHANGES_A_CLASS = (  # TensorStorageMetadata.__init__ = torch.Size
    b"ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n(N}S'__init__'\nctorch\nSize\nstb."
)
HALF = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([25, 50]))
NOT_FILLED = "step-00000001 was not read: rank 0: ValueError: the boxes of 'w' do not fill it"
FORGED: list[tuple[str, Any, str]] = [
    (".metadata", lambda marker: pickle.dumps(Hostile(marker)), "asks for 'pathlib.*Path"),
    (".metadata", lambda _: b"cos\nsystem\n(S'exit'\ntR.", "asks for 'os.system'"),
    (".metadata", lambda _: b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.", "asks for 'torch.os.system'"),
    (".metadata", lambda _: pickle.dumps(torch.Size([2])), "has no attribute 'state_dict_metadata'"),
    (".metadata", lambda _: b"", "is not checkpoint metadata: EOFError"),
    (".metadata", lambda _: CHANGES_A_CLASS, "it changes a class or a function"),
    (".metadata", forged(5), "the name of a tensor is no text"),
    (".metadata", forged(None), "the name of a tensor is no text"),
    (
        ".metadata",
        forged("a\n\x1b" + 200000 * "b"),
        r"optimizer: 'a\\n\\x1bb{0,73} is \[50, 50\] float32 there",
    ),
    (".metadata", forged(size=[200000 * "b"]), r"optimizer: 'w' is \['b{0,78} there"),
    (".metadata", forged(at="../pipe"), "asks for the file '../pipe'"),
    (".metadata", forged(at="/dev/zero"), "asks for the file '/dev/zero'"),
    (".metadata", forged(at=5), "expected string"),
    (".metadata", forged(chunks=[]), NOT_FILLED),
    (".metadata", forged(chunks=None), NOT_FILLED),
    (".metadata", forged(chunks=[HALF]), NOT_FILLED),
    (
        "about.json",
        lambda _: b'{"step": 9000000000}',
        "is not that of step-00000001: it is of step 9000000000",
    ),
    ("about.json", lambda _: b'{"seed": 5}', "is not that of step-00000001: 'step'"),
    ("about.json", lambda _: b"[" * 100000, "is not that of step-00000001"),
]


@pytest.mark.parametrize(("name", "content", "message"), FORGED)
def test_a_forged_checkpoint_runs_no_code(name: str, content: Any, message: str, tmp_path: Path) -> None:
    checkpoints, marker, w = saved(tmp_path, 1), tmp_path / "marker", torch.zeros(50, 50)
    forge(tmp_path / "step-00000001", name, content(marker))
    with pytest.raises(UsageError, match=message) as error:
        checkpoints.restore([Entry("w", w, w)])
    assert "\n" not in str(error.value)
    assert not marker.exists()
    assert not w.any()


def held_by(rt: Runtime, folder: Path, ends: bool) -> str:
    """Return the error if another run holds the folder. If `ends`, die: the folder must become free."""
    try:
        Checkpoints(folder, Mesh(rt.world, dp=rt.world_size))
    except UsageError as error:
        return str(error)
    if ends:
        os.kill(os.getpid(), signal.SIGKILL)
    return ""


def test_one_run_at_a_time_has_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="SIGKILL"):
        spawn(held_by, 1, tmp_path, True)
    assert spawn(held_by, 2, tmp_path, False) == ["", ""]
    message = f"{tmp_path} is in use by process {os.getpid()} on {socket.gethostname()}; give another folder"
    with Checkpoints(tmp_path, ALONE_MESH), Checkpoints(tmp_path, ALONE_MESH):
        for said in spawn(held_by, 2, tmp_path, False):
            assert said.startswith(message)
    assert spawn(held_by, 1, tmp_path, False) == [""]


def killed(rt: Runtime, folder: Path) -> None:
    """Save, and die when everything is written except the checkpoint's final name."""
    with patch.object(hybrid_files, "sync", lambda _: os.kill(os.getpid(), signal.SIGKILL)):
        saved(folder, 2)


def test_a_rank_killed_while_it_saves_loses_nothing(tmp_path: Path) -> None:
    checkpoints, w = saved(tmp_path, 1), torch.zeros(50, 50)
    with pytest.raises(RankError, match="SIGKILL"):
        spawn(killed, 1, tmp_path)
    left = tmp_path / "step-00000002.partial"
    assert (left / "SHA256SUMS").exists()
    assert checkpoints.restore([Entry("w", w, w)]) == {"step": 1, "seed": 5}
    saved(tmp_path, 2)
    assert not left.exists()
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]


def killed_between_names(rt: Runtime, folder: Path) -> None:
    """Save an existing step again, and die after the old one is renamed and before the new one is."""
    rename = Path.rename

    def last(path: Path, target: Path) -> Path:
        renamed = rename(path, target)
        if target.suffix == ".replaced":
            os.kill(os.getpid(), signal.SIGKILL)
        return renamed

    with patch.object(Path, "rename", last):
        saved(folder, 1)


def test_a_rank_killed_between_two_names_loses_nothing(tmp_path: Path) -> None:
    checkpoints, w = saved(tmp_path, 1), torch.zeros(50, 50)
    with pytest.raises(RankError, match="SIGKILL"):
        spawn(killed_between_names, 1, tmp_path)
    assert steps(tmp_path) == []
    assert checkpoints.restore([Entry("w", w, w)]) == {"step": 1, "seed": 5}
    with pytest.raises(RankError, match="SIGKILL"):
        spawn(killed_between_names, 1, tmp_path)
    saved(tmp_path, 2)  # without a look at what is there
    assert steps(tmp_path) == ["step-00000001", "step-00000002"]
    assert sorted(path.name for path in tmp_path.glob("*")) == [".lock", *steps(tmp_path)]


def test_what_was_to_be_replaced_is_put_back_when_the_other_is_damaged(tmp_path: Path) -> None:
    checkpoints, w, one = saved(tmp_path, 1), torch.zeros(50, 50), tmp_path / "step-00000001"
    shutil.copytree(one, one.with_suffix(".replaced"))
    flip(one / "about.json")
    (tmp_path / "step-best.replaced").mkdir()  # somebody else's
    assert checkpoints.restore([Entry("w", w, w)]) == {"step": 1, "seed": 5}
    assert sorted(path.name for path in tmp_path.glob("step*")) == ["step-00000001", "step-best.replaced"]
