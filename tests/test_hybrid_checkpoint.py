"""Checkpoints: from any mesh to any other, synchronous or asynchronous, and training resumes from them."""

from __future__ import annotations

import math
import shutil
import subprocess
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from mpi.launch import need_module, run_worker
from placed import TENSORS, entries, spoil, whole, wrong
from torch import nn

from common import comm
from common.comm import Group
from common.comm.mesh import Mesh
from common.comm.placement import FlatShard, Shard, place
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.job import one_device
from common.lesson.training import Batches, TrainingOptions, make_model
from common.models.configs import CONFIGS, mixtral
from common.models.transformer import Transformer

from ep_moe import expert_parallel
from hybrid_checkpoint import Checkpoints, entries_of
from hybrid_files import Writer, fault, steps
from hybrid_layout import HybridOptions
from hybrid_pieces import Entry, boxes_of_run, pieces
from hybrid_training import alone, make_hybrid

CONFIGS["checkpoint-moe"] = replace(
    mixtral(layers=2, width=12, heads=2, kv_heads=1, mlp_width=7, sequence=8, experts=4), router="sigmoid"
)
Axes = dict[str, int]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_run_is_a_few_boxes(shape: list[int], data: st.DataObject) -> None:
    """The boxes of a run hold the run's elements in order, and no others."""
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
    place(p, "dp", FlatShard(torch.Size((4, 6)), (8, 8, 8)))
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
    """Restore checkpoint `step` and save the next on each mesh; return the names that came out wrong."""
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
    """Checkpoints move bitwise over 12 meshes of 1 to 8 ranks; elements are stored once; torch reads them."""
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


def asynchronously(rt: Runtime, folder: Path) -> dict[str, Any]:
    """Save asynchronously; hold up the writing until weights change and ranks communicate; restore."""
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
    """Train across meshes, resuming from other weights each time; return relative loss differences."""
    o = HybridOptions(model=model_name, batch=8, sequence=8, steps=2 * len(meshes))
    make = partial(optimizer_of, optimizer_name)
    expected = one_device(alone(rt, o, make_model(o, rt.device), make))
    differences = []
    for t in range(o.steps):
        if t % 2 == 0:
            on = replace(o, **meshes[t // 2])
            mesh = on.mesh(rt)
            hybrid = make_hybrid(rt, replace(on, seed=t), mesh)
            mine, checkpoints = make(hybrid.parameters()), Checkpoints(folder, mesh)
            batches = Batches(on, hybrid.samples, rt.device)
            if t:
                assert checkpoints.restore(entries_of(hybrid.model, mine, hybrid)) == {"step": t}
                if hybrid.zero:
                    hybrid.zero.changed()
        mine.zero_grad()
        tokens_BS, targets_BS = map(torch.cat, zip(*batches.parts(t), strict=True))
        loss, right = hybrid.step(tokens_BS, targets_BS).item(), next(expected).item()
        differences.append(abs(loss - right) / right)
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
    """Save experts sharded over ep and a buffer, restore all on each rank; return equality and names."""
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
    Checkpoints(folder, Mesh(rt.world, dp=2)).restore(entries_of(other))
    after = other.state_dict()
    return [torch.equal(after[name], x) for name, x in before.items()], list(before)


def test_experts_and_buffers(tmp_path: Path) -> None:
    for equal, names in spawn(experts_and_buffers, 2, tmp_path):
        assert all(equal)
        assert sum("choice_bias" in name for name in names) == 2


def test_states_are_made_without_a_trace() -> None:
    """Creating optimizer states changes nothing, also for a parameter that no step has used yet."""
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
