"""Types on ranks: what misplaces a tensor is caught with no reference run, and the right version passes in silence."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from check_everything import ROOT, Run, check_lesson, check_meshes, runs
from forgotten_sum import partial_gelu
from torch import Tensor, nn

from common import comm
from common.comm import collectives, ledger
from common.comm.checked import RULES, Misplaced, checked, declare
from common.comm.checked.asked import asking
from common.comm.checked.report import Absent
from common.comm.frames import is_users
from common.comm.mesh import Mesh
from common.comm.placement import shard, sum_gradients
from common.errors import RankError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.launch.watchdog import Watchdog
from common.lesson.equality import OPTIMIZERS

from hybrid_rows import of_meshes

Found = dict[str, tuple[str, str, str]]  # exhibit: rule, axis, file; empty if nothing was said

# by museum (and ranks) and exhibit: the rule that catches it, the axis, and the file of the line that is named
CAUGHT: Mapping[str, Found] = {
    "tp": {
        "the missing f": ("mix", "tp", "tp_column_parallel.py"),
        "the sum that is summed again": ("sum", "tp", "test_museum_tp.py"),
        "the all-reduce on what autograd saved": ("sum", "tp", "test_museum_tp.py"),
        "norms that drift apart": ("linear", "tp", "steps.py"),
        "the norm that counts norms n times": ("once", "tp", "test_museum_tp.py"),
        "shared heads, not summed": ("mix", "tp", "test_museum_tp.py"),
        "right": ("", "", ""),
        "right, sequence parallel": ("", "", ""),
        "right, clipped": ("", "", ""),
        "right, shared heads": ("", "", ""),
    },
    "dp": {
        "the hook that averages weights": ("linear", "dp", "steps.py"),
        "the hook that sees the last micro-batch": ("linear", "dp", "steps.py"),
        "the clip before the reduction": ("linear", "dp", "test_museum_dp.py"),
        "right, clipped": ("", "", ""),
    },
    "dp_step": {
        "the clip of each micro-batch": ("linear", "dp", "test_museum_dp_step.py"),
        "right, clipped": ("", "", ""),
    },
    "dp_zero": {
        "the norm of a shard": ("root", "dp", "test_museum_dp_zero.py"),
        "the gather that was forgotten": ("equal", "dp", "dp_unit.py"),
        "right, clipped, stage 1": ("", "", ""),
        "right, clipped, stage 3": ("", "", ""),
    },
    "dp_compression": {"memory behind the sum": ("step", "dp", "steps.py")},
    "ep": {
        "experts taken for replicas": ("sum", "ep", "test_museum_ep.py"),
        "right, auxiliary loss with capacity": ("", "", ""),
    },
    "dp_matrices": {
        "rows without a sum": ("mix", "world", "test_museum_dp_matrices.py"),
        "columns without a sum": ("mix", "world", "test_museum_dp_matrices.py"),
        "a gather of the wrong adjoint": ("mix", "world", "test_museum_dp_matrices.py"),
    },
    "pp": {
        "a tied embedding whose two copies drift": ("step", "pp", "test_museum_pp.py"),
        "right": ("", "", ""),
    },
    "pp, 4 ranks": {
        "replicas synchronised one micro-batch early": ("step", "dp", "test_museum_pp.py"),
        "right, replicas": ("", "", ""),
    },
    "sp": {"right, zigzag": ("", "", "")},
    "hybrid_trainer": {
        "masks different over tp": ("equal", "tp", "tp_megatron.py"),
        "right over tp, its tokens in slices": ("", "", ""),
    },
    "hybrid, 4 ranks": {
        "expert gradients summed over ep": ("sum", "ep", "test_museum_hybrid.py"),
        "the norm counts replicas": ("once", "ep", "test_museum_hybrid.py"),
        "the norm misses experts": ("once", "ep", "test_museum_hybrid.py"),
        "each stage clips by its own norm": ("linear", "pp", "test_museum_hybrid.py"),
        "routers taken for complete along tp": ("mix", "tp", "moe.py"),
        "a tied head's gradient is not summed": ("step", "pp", "hybrid_training.py"),
        "right, a tied head": ("", "", ""),
    },
}


class Reference:
    """Run on one device that nothing is compared with."""

    def __init__(self) -> None:
        self.losses = [self] * 99

    def __sub__(self, other: float) -> float:
        return 0.0


def tour(rt: Runtime, museum: str, names: list[str]) -> Found:
    """Visit exhibits under the checker, without their reference; return what it says."""
    rooms, found = importlib.import_module(f"test_museum_{museum.partition(',')[0]}"), Found()
    for name in ("one_device", "plain", "alone"):
        if hasattr(rooms, name):
            setattr(rooms, name, lambda *given, **options: Reference())
    rooms.compare = lambda *given: {}  # type: ignore[attr-defined]
    with asking(30.0):
        for name in names:
            found[name] = ("", "", "")
            try:
                rooms.visit(rt, *(rooms.EXHIBITS[name][:2] if museum == "dp_matrices" else (name, "sgd")))
            except Misplaced as wrong:
                print(f"\n{name}: {wrong}", end="")
                found[name] = wrong.rule, wrong.axis, wrong.line.partition(":")[0]
    return found


@pytest.mark.parametrize("museum", CAUGHT)
def test_exhibits_that_misplace_a_tensor_are_caught(museum: str) -> None:
    ranks = 4 if museum.endswith("4 ranks") else 2
    for found in spawn(tour, ranks, museum, [*CAUGHT[museum]]):
        assert found == CAUGHT[museum]


def split(weight: Tensor, mesh: Mesh, dim: int) -> nn.Parameter:
    return shard(nn.Parameter(weight), mesh.group("tp"), dim)


def forgotten_copy(rt: Runtime, mesh: Mesh) -> None:
    x = F.rms_norm(torch.ones(3, 4), (4,), nn.Parameter(torch.ones(4)))
    F.linear(x, split(torch.ones(4, 4), mesh, 0))


def gelu_of_a_term(rt: Runtime, mesh: Mesh) -> None:
    F.gelu(F.linear(torch.ones(3, 2), split(torch.ones(4, 4), mesh, 1)))


def bias_of_every_rank(rt: Runtime, mesh: Mesh) -> None:
    with torch.no_grad():
        y = F.linear(torch.ones(3, 2), split(torch.ones(4, 4), mesh, 1))
        y + nn.Parameter(torch.ones(4))


def norm_of_a_shard(rt: Runtime, mesh: Mesh) -> None:
    1 / torch.linalg.vector_norm(split(torch.ones(4, 4), mesh, 0))


def sum_of_replicas(rt: Runtime, mesh: Mesh) -> None:
    comm.all_reduce(nn.Parameter(torch.ones(4)).detach() * 1, mesh.group("tp"))


def copy_of_a_shard(rt: Runtime, mesh: Mesh) -> None:
    collectives.copy(declare(torch.ones(4), tp="S"), mesh.group("tp"))


def another_call(rt: Runtime, mesh: Mesh) -> None:
    comm.all_reduce(torch.ones(4), mesh.group("tp"), "sum" if rt.rank else "max")


def replicas_apart(rt: Runtime, mesh: Mesh) -> None:
    collectives.copy(torch.full((4,), 1.0 + rt.rank), mesh.group("tp"))


def step_without_sum(rt: Runtime, mesh: Mesh) -> None:
    norm = nn.Parameter(torch.ones(4))
    norm.token_axes = ("tp",)  # type: ignore[attr-defined]
    optimizer = OPTIMIZERS["sgd"]([norm])
    F.rms_norm(torch.ones(3, 4), (4,), norm).sum().backward()
    optimizer.step()


BROKEN: Mapping[str, Callable[[Runtime, Mesh], None]] = {
    "mix": forgotten_copy,
    "linear": gelu_of_a_term,
    "once": bias_of_every_rank,
    "root": norm_of_a_shard,
    "sum": sum_of_replicas,
    "call": copy_of_a_shard,
    "meet": another_call,
    "equal": replicas_apart,
    "step": step_without_sum,
}


def break_rules(rt: Runtime) -> dict[str, tuple[str, str]]:
    """Return, for each mistake, the rule that catches it, and that which does when this rule is off."""
    mesh, found = Mesh(rt.world, tp=rt.world_size), {}
    for rule, mistake in BROKEN.items():
        said = []
        for rules in (RULES, [other for other in RULES if other != rule]):
            said.append("")
            try:
                with checked(mesh, timeout=20, rules=rules):
                    mistake(rt, mesh)
            except Misplaced as wrong:
                here = (wrong.rank, wrong.axis, wrong.line[:16]) == (rt.rank, "tp", "test_checked.py:")
                said[-1] = wrong.rule if here else str(wrong)
        found[rule] = said[0], said[1]
    return found


def test_each_rule_is_needed() -> None:
    assert set(BROKEN) == set(RULES)
    for found in spawn(break_rules, 2):
        assert found == {rule: (rule, "") for rule in RULES}


def test_docs_show_what_the_example_prints() -> None:
    with pytest.raises(RankError) as error:
        spawn(partial_gelu, 2)
    line = str(error.value).splitlines()[-1].partition(": ")[2].replace("rank 1", "rank 0")
    assert line in (ROOT / "docs/types-on-ranks.md").read_text().splitlines()


def one_leaves(rt: Runtime) -> None:
    """Rank 1 has left the step, and waits in a call of equality.py, which the checker does not see."""
    with checked(rt.world, timeout=1.0):
        if rt.rank == 0:
            comm.all_reduce(torch.ones(4), rt.world)
        with ledger.uncounted():
            comm.barrier(rt.world)


def test_a_rank_that_does_not_come_is_named_with_its_place() -> None:
    with pytest.raises(RankError) as error:
        spawn(one_leaves, 2, timeout=20)
    said = str(error.value)
    assert "waits in all_reduce, but rank 1 does not come within 1 s" in said
    assert "rank 1 stood in barrier over 'world'" in said
    assert re.search(r"in all_reduce over .world. for .*test_checked.py:\d+ \(one_leaves\)", said)


def test_a_report_says_who_gave_up_waiting() -> None:
    """The checker, after its own timeout, or the collective, after that of the runtime."""
    watchdog = Watchdog(dist.HashStore(), 0, 1, print)
    watchdog.timeout = 1.0
    absent = Absent(
        "meet", "x", "world", 0, "program.py:3", "waits for rank 1, which does not come within 2 s"
    )
    comm.blocked_in.update(op="all_reduce", axis="world", since=time.perf_counter() - 2)
    try:
        assert "does not come within 2 s" in watchdog._roll_call(absent)
        assert "timed out after 1 s" in watchdog._roll_call(RuntimeError("connection closed"))
    finally:
        comm.blocked_in.clear()


@pytest.mark.parametrize(
    ("file", "users"),
    [
        ("/somewhere/program.py", True),
        (str(ROOT / "03-tensor-parallelism/tp_linear.py"), True),
        (str(ROOT / "common/models/gpt.py"), True),
        (str(ROOT / "common/tensors/examples/mean.py"), True),
        (str(ROOT / "common/tensors_of_a_user/program.py"), True),
        (str(ROOT / "common/tensors/manager/functions.py"), False),
        (str(ROOT / "common/comm/checked/report.py"), False),
        (str(ROOT / "common/lesson/runner.py"), False),
        (torch.nn.functional.__file__, False),
        (os.__file__, False),
        ("/usr/lib/python3/dist-packages/numpy/linalg.py", False),
        ("<frozen runpy>", False),
    ],
)
def test_whose_a_frame_is(file: str, users: bool) -> None:
    assert is_users(file) == users


def lessons_in_turn(rt: Runtime, chosen: list[Run]) -> list[str]:
    return [check_lesson(rt, run) for run in chosen]


LESSONS = "dp_compression dp_local_sgd dp_matrix_multiply pp_zero_bubble tp_summa sp_library ep_layer ep_switch_router"
MESHES = ("pp=2 dp=2 zero=1", "dp=2 sp=2 zero=3", "ep=2 tp=2", "pp=4")


def test_right_lessons_are_silent() -> None:
    chosen = [run for name in LESSONS.split() for run in runs(name) if run.ranks == 2]
    assert len(chosen) == len(LESSONS.split())
    for line in spawn(lessons_in_turn, 2, chosen)[0]:
        assert line.startswith("checked: nothing misplaced; ")


def test_right_meshes_are_silent() -> None:
    for sent in spawn(check_meshes, 4, of_meshes(MESHES)[4]):
        assert min(sent) > 0


@pytest.mark.parametrize(("ranks", "says"), [(1, "give --nproc 2"), (2, "has nothing to check here")])
def test_a_lesson_with_nothing_to_check_says_so(ranks: int, says: str) -> None:
    with pytest.raises(RankError, match=says):
        spawn(check_lesson, ranks, Run("pp_by_hand", {}, ranks))


def test_lessons_that_others_carry_refuse_the_option() -> None:
    refused = set(
        "dp_languages pp_languages pp_memory tp_languages tp_memory sp_languages sp_memory hybrid_languages".split()
    )
    assert {name for name in refused if next(runs(name), None)} == set()


def right_step(rt: Runtime) -> tuple[int, bool]:
    """Return the bytes of the checker's messages in a right step, and True if all hooks are gone after it."""
    mesh, norm = Mesh(rt.world, tp=rt.world_size), nn.Parameter(torch.ones(4))
    norm.token_axes = ("tp",)  # type: ignore[attr-defined]
    optimizer = OPTIMIZERS["sgd"]([norm])
    with checked(mesh) as checker:
        F.rms_norm(torch.ones(3, 4), (4,), norm).sum().backward()
        sum_gradients([norm], mesh)
        optimizer.step()
    step_without_sum(rt, mesh)
    return checker.meeting.bytes, not norm._post_accumulate_grad_hooks


def test_a_right_step_is_silent_and_leaves_nothing() -> None:
    for sent, clean in spawn(right_step, 2):
        assert clean
        assert 0 < sent < 2000
