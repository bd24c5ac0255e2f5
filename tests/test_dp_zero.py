"""ZeRO by hand: equal to one device at every stage, bytes and memory by formula, and refused uses."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from small_models import Branches
from steps import Version, follow, whole_step
from torch import Tensor, nn
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend
from torch.utils.checkpoint import checkpoint

from common import comm
from common.comm import Group
from common.comm.ledger import Ledger
from common.comm.listen import Listener
from common.comm.mesh import Mesh
from common.errors import RankError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import OPTIMIZERS, compare, unequal_replicas
from common.lesson.job import Job
from common.lesson.training import Batches, make_model, timed_adamw
from common.utils.memory import peak_allocated

import dp_fsdp
import dp_zero
from dp_basic import DataParallel
from dp_memory import bytes_of
from dp_training import DataParallelOptions
from dp_zero import VERSIONS, Zero

STAGES = (1, 2, 3)
SMALL = DataParallelOptions(versions=tuple(VERSIONS), sequence=8, micro_batches=2, steps=2)


@pytest.mark.parametrize(
    ("n", "options"),
    [
        (1, replace(SMALL, batch=3)),
        (2, replace(SMALL, model="llama-tiny", batch=5, micro_batches=1, steps=3)),
        (3, replace(SMALL, batch=7, micro_batches=3, steps=3)),
        (4, replace(SMALL, model="gpt2-nano", batch=9, versions=("zero2", "zero3"))),
        (8, replace(SMALL, model="llama-nano", batch=11, micro_batches=1, versions=("zero1", "zero3"))),
    ],
)
def test_lesson(n: int, options: DataParallelOptions) -> None:
    """The lesson proves equality with SGD and AdamW, bytes sent = formula, bytes held within 1 % of it."""
    assert all(spawn(dp_zero.main, n, options))


def test_the_library_beside_it() -> None:
    versions = (*dp_fsdp.LIBRARY, "zero3")
    options = DataParallelOptions(model="gpt2-nano", batch=7, sequence=8, steps=2, versions=versions)
    assert all(spawn(dp_fsdp.main, 3, options))


class Layered(nn.Module):
    """Model with two layers that share a parameter, branches that only some samples use, and a buffer."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double() for _ in range(3))
        self.layers[2][0].bias = self.layers[0][0].bias
        self.layers[1][0].weight.requires_grad_(False)
        self.branches = Branches()
        self.register_buffer("shift", torch.full((3,), 0.1, dtype=torch.float64))
        self.recompute = recompute

    def forward(self, x_BI: Tensor) -> Tensor:
        h_BI = x_BI + self.shift
        for layer in self.layers:
            h_BI = checkpoint(layer, h_BI, use_reentrant=False) if self.recompute else layer(h_BI)
        return self.branches(h_BI) + self.branches(x_BI)


def part(t: int, rank: int, micro_batch: int) -> Tensor:
    """Return samples whose sign changes with step, rank and micro-batch, so that branches differ."""
    generator = torch.Generator().manual_seed(100 * t + 10 * rank + micro_batch)
    sign = 1.0 if (t + rank + micro_batch) % 2 else -1.0
    return sign * torch.rand(2 + rank, 3, generator=generator, dtype=torch.float64)


def branches(rt: Runtime, stage: int, recompute: bool) -> list[float]:
    """Return the largest difference from one device under each optimizer.

    Some parameters are used by few samples or none, some are shared, and NumPy arrays share memory of others.
    """
    mesh, largest = Mesh(rt.world, dp=rt.world_size), []
    arrays: list[object] = []  # memory that a NumPy array shares cannot be resized
    for optimizer in OPTIMIZERS:
        alone = Layered()

        def on_one(t: int, model: nn.Module = alone) -> Tensor:
            losses = [model(part(t, r, m)) for r in range(rt.world_size) for m in range(2)]
            torch.stack(losses).sum().backward()
            return torch.stack(losses).sum().detach()

        reference = follow(alone, optimizer, 4, on_one)
        model = Layered(recompute)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rt.rank)  # the broadcast must mend this
        zero = Zero(model, model.layers, mesh.group("dp"), stage)
        model.layers[2].register_forward_pre_hook(lambda m, *_: arrays.append(m[0].weight.detach().numpy()))

        def on_all(t: int, model: nn.Module = model, zero: Zero = zero) -> Tensor:
            arrays.extend(piece.detach().numpy() for _, piece in zero.named_parameters())
            assert unequal_replicas(zero.named_parameters(), mesh) == []
            loss = torch.zeros((), dtype=torch.float64)
            for m in range(2):
                if stage == 1 and m == 0:
                    with zero.no_sync():
                        one = model(part(t, rt.rank, m))
                        one.backward()
                else:
                    one = model(part(t, rt.rank, m))
                    one.backward()
                loss += one.detach()
            zero.finish()
            with torch.no_grad():  # looking at the model between a backward pass and its step changes nothing
                model(part(t, 0, 0))
            comm.all_reduce(loss, rt.world)
            return loss

        found = follow(zero, optimizer, 4, on_all, mesh)
        trained = {name for name, p in alone.named_parameters() if p.requires_grad}
        reference.weights = {name: w for name, w in reference.weights.items() if name in trained}
        assert "branches.never.weight" not in found.gradients[0]
        largest.append(max(d.value for d in compare(reference, found).values()))
    return largest


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_branches_shared_parameters_and_recomputation(stage: int, recompute: bool) -> None:
    for largest in spawn(branches, 3, stage, recompute):
        assert max(largest) <= 1e-12


def evaluate(rt: Runtime, stage: int) -> tuple[list[bool], int]:
    """Compare logits with plain weights before training and after a step; return the bytes held, too."""
    o = DataParallelOptions(batch=4, sequence=8)
    model = make_model(o, rt.device)
    zero = Zero(model, model.layers, Mesh(rt.world, dp=rt.world_size).group("dp"), stage)
    plain, batches = make_model(o, rt.device), Batches(o, rt.world, rt.device)
    dp = DataParallel(plain, rt.world)
    equal = []
    version = Version(model, finish=zero.finish, owner=zero)
    steps = [whole_step(version, batches, rt.world)]
    steps.append(whole_step(Version(plain, dp.no_sync, dp.finish), batches, rt.world))
    o.micro_batches = 1
    for _ in range(2):
        tokens_BS = batches.parts(0)[0][0]
        with torch.no_grad():
            equal.append(torch.allclose(model(tokens_BS), plain(tokens_BS), rtol=1e-11, atol=1e-13))
        for step in steps:
            step()
    return equal, bytes_of(model.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_sees_the_weights_of_the_last_step(stage: int) -> None:
    for equal, held in spawn(evaluate, 2, stage):
        assert equal == [True, True]
        assert (held == 0) == (stage == 3)


def order_of_events(rt: Runtime) -> list[str]:
    """Return the events in order: the all-gathers of units, and the forward and backward passes of layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    zero = Zero(model, list(model), rt.world, 3)
    events: list[str] = []
    for i, unit in enumerate(zero.units):

        def gather(i: int = i, original: Callable[[], None] = unit.gather) -> None:
            here = zero.units[i].here or zero.units[i].arriving is not None
            original()
            if not here:
                events.append(f"gather {i}")

        unit.gather = gather  # type: ignore[method-assign]
        model[i].register_forward_pre_hook(lambda *_, i=i: events.append(f"forward {i}"))
        model[i].register_full_backward_pre_hook(lambda *_, i=i: events.append(f"backward {i}"))
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    zero.finish()
    return events


def test_the_next_layer_travels_while_this_one_computes() -> None:
    for events in spawn(order_of_events, 2):
        for i in range(3):
            assert events.index(f"gather {i + 1}") < events.index(f"forward {i}")
        backward = events[events.index("forward 3") + 1 :]
        for i in range(3, 0, -1):
            assert backward[backward.index(f"gather {i - 1}") + 1] == f"backward {i - 1}"


def peak(name: str) -> int:
    """Return the peak bytes of rank 0 of 2 over two steps, on a model whose activations are small.

    The process group is a fake that moves no data, so that a transport's own buffers are not counted.
    """
    o = DataParallelOptions(model="gpt2-10m", batch=2, sequence=4, micro_batches=1, dtype="float32")
    world = Group("world", 0, 2, (0, 1), dist.group.WORLD)
    rt = Runtime(0, 2, 0, 2, "none", torch.device("cpu"), "fake", 60.0, world)

    def life() -> None:
        mesh, model = Mesh(world, dp=2), make_model(o, rt.device)
        job = Job(rt, o, name, model, mesh, "dp", timed_adamw, steps=2)
        collections.deque(dp_zero.VERSIONS[name](job), maxlen=0)

    return peak_allocated(life)


def test_what_a_stage_drops_is_gone() -> None:
    """Memory on 2 ranks: of 16 bytes per parameter stage 1 saves 4, stages 2 and 3 save 2 more each."""
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        of_stage = {name: peak(name) / (4 * 10_844_160) for name in dp_zero.VERSIONS}
    finally:
        dist.destroy_process_group()
    assert 4.0 < of_stage["bucketed"] < 4.2
    assert of_stage["zero1"] < 3.25  # 3, and a layer's gradients
    assert of_stage["zero2"] < 2.9  # 2.5, and the gradients of two layers
    assert of_stage["zero3"] < 2.7  # 2, and the weights and gradients of some of the 6 layers


def refused(rt: Runtime, what: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(1, 2)
    if what == "types":
        model[0].bias = nn.Parameter(torch.ones(2, dtype=torch.float64))
    if what == "frozen":
        model.requires_grad_(False)
    zero = Zero(model, list(model), rt.world, {"stage": 4, "no_sync": 2}.get(what, 1))
    if what == "no_sync":
        with zero.no_sync():
            pass
    model(x).sum().backward()
    model(x).sum().backward()


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("stage", "ZeRO has the stages 1, 2 and 3, and 0 for none, not 4"),
        ("types", "0.bias is torch.float64 in a unit of torch.float32: give one type a unit"),
        ("frozen", "no parameter of the model requires a gradient"),
        ("no_sync", "stage 2 holds no whole gradients; it reduces those of each micro-batch"),
        ("twice", "backward ran twice before finish"),
    ],
)
def test_refused(what: str, says: str) -> None:
    with pytest.raises(RankError, match=says):
        spawn(refused, 2, what)


def heard(rt: Runtime) -> tuple[list[tuple[str, float]], list[tuple[str, float]], str]:
    """Return our calls by the ledger and by the listener, and the listener's error for an unknown call."""
    x, whole = torch.ones(6), torch.ones(6 * rt.world_size)
    with Listener(rt.world) as theirs, Ledger() as ours:
        comm.all_reduce(x, rt.world)
        comm.broadcast(x, rt.world)
        comm.all_gather_into(whole, x, rt.world)
        comm.reduce_scatter_into(x, whole, rt.world)
        comm.all_reduce(torch.ones(3, dtype=torch.int64), rt.world)
        comm.barrier(rt.world)
    said = ""
    try:
        with Listener(rt.world):
            comm.all_to_all(x, rt.world, [0, 2, 4], [2 * rt.rank] * rt.world_size)
    except NotImplementedError as error:
        said = str(error)
    rows = [[(r.op, float(r.bytes)) for r in ledger.rows if r.bytes] for ledger in (ours, theirs)]
    return rows[0], rows[1], said


def test_the_listener_counts_as_the_ledger_does() -> None:
    for ours, theirs, said in spawn(heard, 3):
        assert len(ours) == 5
        assert [("all_to_all" if op == "reduce_scatter" else op, sent) for op, sent in ours] == theirs
        assert "cannot count torch.ops.c10d.alltoall_base_" in said


class Tied(nn.Module):
    """Model whose head is the last layer's weight: the weight belongs to a layer and is used outside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(3))
        self.head, self.skip = self.layers[2].weight, False

    def forward(self, x_BI: Tensor) -> Tensor:
        h_BI = x_BI @ self.head
        for layer in self.layers[: 1 if self.skip else 3]:
            h_BI = torch.tanh(layer(h_BI))
        return h_BI.square().sum()


def awkward(rt: Runtime, stage: int) -> tuple[float, list[str]]:
    """Train with a weight shared by a layer and the head, and with layers skipped in evaluation.

    Return the largest difference from one device, and [output after the pieces are overwritten, error of
    finish() after a backward pass that fails].
    """
    mesh, said = Mesh(rt.world, dp=rt.world_size), []
    alone, model = Tied(), Tied()

    def one(t: int) -> Tensor:
        loss = sum((alone(part(t, r, 0)) for r in range(rt.world_size)), torch.zeros(()))
        loss.backward()
        return loss.detach()

    reference = follow(alone, "adamw", 3, one)
    zero = Zero(model, model.layers, mesh.group("dp"), stage)

    def step(t: int) -> Tensor:
        loss = model(part(t, rt.rank, 0))
        loss.backward()
        zero.finish()
        model.skip = True
        with torch.no_grad():  # gathers a layer ahead that nobody uses
            model(part(t, 0, 0))
        model.skip = False
        total = loss.detach()
        comm.all_reduce(total, rt.world)
        return total

    largest = max(d.value for d in compare(reference, follow(zero, "adamw", 3, step, mesh)).values())
    with torch.no_grad():
        for _, piece in zero.named_parameters():
            piece.fill_(0.25)
        zero.changed()
        said.append(f"{model(torch.ones(1, 3, dtype=torch.float64)).item():.12f}")

    def fail(_: Tensor) -> None:
        raise ArithmeticError("in the middle of a backward pass")

    handle = model.layers[0].weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        model(part(0, rt.rank, 0)).backward()
    handle.remove()
    with pytest.raises(RuntimeError, match="a backward pass ended with an error") as error:
        zero.finish()
    said.append(str(error.value))
    return largest, said


@pytest.mark.parametrize("stage", [0, *STAGES])
def test_awkward_models_and_failed_passes(stage: int) -> None:
    found = spawn(awkward, 2, stage)
    for largest, said in found:
        assert largest <= 1e-12
        assert said == found[0][1]
