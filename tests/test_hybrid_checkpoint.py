"""Checkpoints: from any mesh to any other, and nothing lost when a file, a disk or a rank fails."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hybrid_files
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ep_moe import expert_parallel
from hybrid_checkpoint import Checkpoints, SaveFailed, entries_of
from hybrid_files import Writer, fault, steps
from hybrid_pieces import Entry, boxes_of_run, pieces
from hybrid_training import HybridOptions, make_hybrid, mesh_step, one_device_step
from hypothesis import given
from hypothesis import strategies as st
from mpi.launch import need_module, run_worker
from placed import TENSORS, entries, spoil, whole, wrong
from torch import nn

from common import comm
from common.comm import Group
from common.mesh import Mesh
from common.models.configs import CONFIGS, mixtral
from common.models.transformer import Transformer
from common.placement import Run, Shard, place
from common.runtime import Runtime, UsageError
from common.spawn import RankError, spawn
from common.training import TrainingOptions, make_model

CONFIGS["checkpoint-moe"] = replace(
    mixtral(layers=2, width=12, heads=2, kv_heads=1, mlp_width=7, sequence=8, experts=4), router="sigmoid"
)
ALONE = Group("world", 0, 1, (0,))
ALONE_MESH = Mesh(ALONE)
Axes = dict[str, int]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_run_is_a_few_boxes(shape: list[int], data: st.DataObject) -> None:
    """In their order they hold the numbers of the run and no other."""
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    numbers, found = torch.arange(total).view(shape), list(boxes_of_run(shape, start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    inside = [numbers[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].flatten() for box in found]
    assert torch.cat([torch.arange(0), *inside]).tolist() == list(range(start, stop))


def test_the_boxes_of_the_picture() -> None:
    mesh, p = Mesh(Group("world", 3, 6, tuple(range(6))), dp=3, tp=2), torch.zeros(8)
    place(p, "tp", Shard(0, (4, 4)))
    place(p, "dp", Run(torch.Size((4, 6)), (8, 8, 8)))
    found = pieces(Entry("q", torch.arange(8, 16), p), mesh)
    assert [(tuple(x.offsets), x.tensor.tolist()) for x in found] == [
        ((5, 2), [[8, 9, 10, 11]]),
        ((6, 0), [[12, 13, 14, 15]]),
    ]
    with pytest.raises(ValueError, match="how does it lie"):
        pieces(Entry("m", torch.zeros(3), p), mesh)
    place(p, "ep", Shard(0))
    with pytest.raises(ValueError, match="after a run"):
        pieces(Entry("q", p, p), mesh)


# Each restores what the one before saved. True: with ZeRO along dp.
JOURNEY: list[tuple[int, list[tuple[Axes, bool]]]] = [
    (1, [({}, False)]),
    (2, [({"tp": 2}, False), ({"pp": 2}, True)]),
    (4, [({"dp": 4}, True), ({"ep": 2, "tp": 2}, False), ({"pp": 2, "dp": 2}, True)]),
    (
        8,
        [
            ({"dp": 2, "ep": 2, "tp": 2}, True),
            ({"pp": 2, "sp": 2, "tp": 2}, False),
            ({"tp": 8}, False),
            ({"dp": 8}, True),
            ({"pp": 2, "dp": 2, "ep": 2}, True),
        ],
    ),
    (1, [({}, True)]),
]


def travel(rt: Runtime, folder: Path, step: int, meshes: list[tuple[Axes, bool]]) -> list[list[str]]:
    """Restores checkpoint `step` and saves the next on each mesh; the names of what came out wrong."""
    bad = []
    for i, (axes, zero) in enumerate(meshes, step):
        mesh = Mesh(rt.world, **axes)
        checkpoints, mine = Checkpoints(folder, mesh, keep=2), spoil(entries(mesh, zero))
        if i == 0:
            assert checkpoints.restore(mine) is None
            mine = entries(mesh, zero)
        else:
            assert checkpoints.restore(mine) == {"step": i, "mesh": meshes_so_far()[i - 1][0]}
        bad.append(wrong(mine, mesh, zero))
        checkpoints.save(i + 1, mine, {"mesh": axes})
    return bad


def meshes_so_far() -> list[tuple[Axes, bool]]:
    return [mesh for _, meshes in JOURNEY for mesh in meshes]


def test_from_any_mesh_to_any_other(tmp_path: Path) -> None:
    """Bit for bit, over 12 meshes of 1 to 8 ranks; each number is written once; torch's own `load` reads it."""
    step = 0
    for world, meshes in JOURNEY:
        assert not any(any(bad) for bad in spawn(travel, world, tmp_path, step, meshes)), (world, meshes)
        step += len(meshes)
        newest = tmp_path / f"step-{step:08d}"
        assert steps(tmp_path)[-1] == newest.name
        metadata = dcp.FileSystemReader(newest).read_metadata()
        chunks = [c for x in metadata.state_dict_metadata.values() for c in x.chunks]
        numbers = sum(2 * math.prod(shape) + 1 for shape, _, _ in TENSORS.values())
        assert sum(math.prod(c.sizes) for c in chunks) == numbers
        on_disk = sum(file.stat().st_size for file in newest.glob("*.distcp"))
        assert on_disk < 8 * numbers + 1700 * len(chunks)  # torch.save's own bytes for each
    assert steps(tmp_path) == [f"step-{step - 1:08d}", f"step-{step:08d}"]
    by_the_library = {
        name: torch.zeros(shape, dtype=torch.float64) for name, (shape, _, _) in TENSORS.items()
    }
    dcp.load(by_the_library, checkpoint_id=newest)
    assert all(torch.equal(x, whole(name)) for name, x in by_the_library.items())
    if shutil.which("sha256sum"):
        done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=newest, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        assert len(done.stdout.splitlines()) == len(list(newest.iterdir())) - 1


@contextlib.contextmanager
def small_disk(active: bool) -> Iterator[None]:
    """A file that grows beyond 3000 bytes fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000 if active else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def full_disk(rt: Runtime, folder: Path, asynchronous: bool, large: bool) -> dict[str, Any]:
    """Saves twice, the second time on a disk that is full for rank 1 alone, and then a third time.

    large: a tensor that the file does not buffer; then it is torch.save that meets the full disk.
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
    """Checkpoints of one rank, each with its step as the value of every number."""
    checkpoints = Checkpoints(folder, ALONE_MESH, keep)
    for step in at:
        checkpoints.save(step, [Entry("w", w := torch.full((50, 50), float(step)), w)], {"seed": 5})
    return checkpoints


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


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
    (place / "notes.txt").touch()  # what somebody else left there is nothing to us
    assert fault(place) is None
    for at in range(len(data)):
        other = bytearray(data)
        other[at] ^= 1 << at % 8
        file.write_bytes(other)
        assert fault(place), at


def damaged_on_ranks(rt: Runtime, folder: Path) -> tuple[Any, str, str]:
    """Of two checkpoints the newer is damaged in what rank 1 alone reads; then the older is, too."""
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
        (("w", torch.zeros(50, 51)), r"w is \[50, 50\] float32 there and \[50, 51\] float32 here"),
        (("w", torch.zeros(50, 50).double()), r"w is \[50, 50\] float32 there and \[50, 50\] float64 here"),
        (("v", torch.zeros(50, 50)), r"v is missing there and \[50, 50\] float32 here"),
    ],
)
def test_another_model_is_refused(entry: tuple[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    name, x = entry
    with pytest.raises(UsageError, match="step-00000001 is of another model or optimizer: " + message):
        saved(tmp_path, 1).restore([Entry(name, x, x)])


def killed(rt: Runtime, folder: Path) -> None:
    """A save that ends when everything is written but the checkpoint's name."""
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
    """A save of a step that is there already, which ends when the old one has lost its name and the new has none."""
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
    assert sorted(path.name for path in tmp_path.iterdir()) == steps(tmp_path)


def test_what_was_to_be_replaced_is_put_back_when_the_other_is_damaged(tmp_path: Path) -> None:
    checkpoints, w, one = saved(tmp_path, 1), torch.zeros(50, 50), tmp_path / "step-00000001"
    shutil.copytree(one, one.with_suffix(".replaced"))
    flip(one / "about.json")
    (tmp_path / "step-best.replaced").mkdir()  # somebody else's
    assert checkpoints.restore([Entry("w", w, w)]) == {"step": 1, "seed": 5}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-best.replaced"]


def asynchronously(rt: Runtime, folder: Path) -> dict[str, Any]:
    """A checkpoint whose writing is held up until the weights are others, and training has talked meanwhile."""
    mesh, found = Mesh(rt.world, tp=2, dp=2), {}
    checkpoints, mine = Checkpoints(folder, mesh, asynchronous=True), entries(mesh, True)
    for step in (1, 2):
        go, original = threading.Event(), Writer.write_data

        def later(self: Writer, *given: Any, go: threading.Event = go, original: Any = original) -> Any:
            go.wait()
            return original(self, *given)

        with patch.object(Writer, "write_data", later):
            checkpoints.save(step, mine, {})
            comm.barrier(rt.world)
            found[f"there {step}"] = steps(folder)
            spoil(mine)
            comm.all_reduce(torch.ones(10), rt.world)
            comm.barrier(rt.world)
            go.set()
            checkpoints.finish()
        assert checkpoints.restore(mine) == {"step": step}
        found[f"wrong {step}"] = wrong(mine, mesh, True)
    return found


def test_asynchronous_is_what_there_was_at_the_call(tmp_path: Path) -> None:
    for found in spawn(asynchronously, 4, tmp_path):
        assert found == {"there 1": [], "wrong 1": [], "there 2": ["step-00000001"], "wrong 2": []}


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)


# model, optimizer, and the meshes on which two steps each are done
RESUMED: list[tuple[str, str, list[dict[str, Any]]]] = [
    ("gpt2-nano", "adamw", [{"pp": 2, "zero": 1}, {"zero": 3}, {"tp": 2, "sp": 2}]),
    ("checkpoint-moe", "sgd", [{"zero": 2}, {"ep": 2, "tp": 2}, {"pp": 2, "ep": 2, "schedule": "gpipe"}]),
]


def resumed(rt: Runtime, folder: Path, model_name: str, optimizer_name: str, meshes: Any) -> list[float]:
    """Largest differences of the losses to those of one device; from mesh to mesh, each time out of other weights."""
    o, checkpoints = HybridOptions(model=model_name, batch=8, sequence=8, micro_batches=2), None
    model = make_model(o, rt.device)
    optimizer, step = optimizer_of(optimizer_name, model.parameters()), one_device_step(model, rt, o)
    differences = []
    for t in range(2 * len(meshes)):
        optimizer.zero_grad()
        expected = step(t).item()
        optimizer.step()
        if t % 2 == 0:
            on = replace(o, **meshes[t // 2])
            mesh = on.mesh(rt)
            hybrid = make_hybrid(rt, replace(on, seed=t), mesh)
            mine, checkpoints = optimizer_of(optimizer_name, hybrid.parameters()), Checkpoints(folder, mesh)
            if t:
                assert checkpoints.restore(entries_of(hybrid.model, mine, hybrid)) == {"step": t}
                if hybrid.zero:
                    hybrid.zero.changed()
            on_mesh = mesh_step(hybrid, rt, on)
        mine.zero_grad()
        differences.append(abs(on_mesh(t).item() - expected) / expected)
        mine.step()
        if t % 2:
            checkpoints.save(t + 1, entries_of(hybrid.model, mine, hybrid), {})
    return differences


def resume_all(rt: Runtime, folder: Path) -> list[list[float]]:
    return [resumed(rt, folder / case[0], *case) for case in RESUMED]


def test_training_goes_on_where_it_was_on_another_mesh(tmp_path: Path) -> None:
    for found in spawn(resume_all, 4, tmp_path):
        for case, differences in zip(RESUMED, found, strict=True):
            assert max(differences) <= 1e-12, (case, differences)


def experts_and_buffers(rt: Runtime, folder: Path) -> tuple[list[bool], list[str]]:
    """Experts over ep, and a buffer that is part of the model; then all of it on one device."""
    o = TrainingOptions(model="checkpoint-moe", batch=4, sequence=8)
    mesh, model = Mesh(rt.world, ep=2), make_model(o, rt.device)
    assert isinstance(model, Transformer)
    for name, b in model.named_buffers():
        if "choice_bias" in name:
            b.copy_(torch.arange(4.0))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    expert_parallel(model, mesh.group("ep"))
    Checkpoints(folder, mesh).save(1, entries_of(model), {})
    other = make_model(replace(o, seed=3), rt.device)
    Checkpoints(folder, ALONE_MESH).restore(entries_of(other))
    after = other.state_dict()
    return [torch.equal(after[name], x) for name, x in before.items()], list(before)


def test_experts_and_buffers(tmp_path: Path) -> None:
    for equal, names in spawn(experts_and_buffers, 2, tmp_path):
        assert all(equal)
        assert sum("choice_bias" in name for name in names) == 2


def test_states_are_made_without_a_trace() -> None:
    """Also for a parameter that no step has used yet, beside one that has a state."""
    for name in ("sgd", "adamw"):
        used, unused = (nn.Parameter(torch.randn(3, 2)) for _ in range(2))
        optimizer = optimizer_of(name, [used, unused])
        used.grad = torch.randn(3, 2)
        optimizer.step()
        optimizer.zero_grad()
        model = nn.ParameterDict({"used": used, "unused": unused})
        before = [used.clone(), unused.clone(), *(x.clone() for x in optimizer.state[used].values())]
        found = {e.name: e.tensor for e in entries_of(model, optimizer)}
        after = [used, unused, *optimizer.state[used].values()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        states = [x for key, x in found.items() if key.startswith("optimizer") and key.endswith(".unused")]
        assert states
        assert not any(x.any() for x in states)
        assert used.grad is None
        assert unused.grad is None


def test_over_mpi(tmp_path: Path) -> None:
    need_module("fived_c10d")
    assert run_worker(2, "hybrid_checkpoint_worker.py", tmp_path, str(tmp_path / "checkpoints")) == []
    assert fault(tmp_path / "checkpoints" / "step-00000002") is None
