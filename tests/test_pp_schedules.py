"""Schedules without a model: checked, simulated against their formulas; and errors that the checker finds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UsageError

from pp_checker import ScheduleError, check, held
from pp_schedule import COMPUTE, Instruction, Schedule, connect, settled
from pp_schedules import KINDS, make_schedule
from pp_simulator import simulate
from pp_stages import by_cost, evenly

NAMES = tuple(KINDS)
sizes = {"ranks": st.integers(1, 8), "micro_batches": st.integers(1, 16), "chunks": st.integers(1, 4)}


def drawn(**strategies: st.SearchStrategy) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return hypothesis' `given` with 60 examples and no deadline, for busy machines."""
    return lambda test: settings(deadline=None, max_examples=60)(given(**strategies)(test))


def times(F: Fraction, I: Fraction, W: Fraction) -> Callable[[Instruction], Fraction]:  # noqa: E741
    """Return the time of a computation, given those of a forward and of the two halves of a backward."""
    return lambda i: {"F": F, "B": I + W, "I": I, "W": W}[i.op]


def read(text: str) -> tuple[tuple[Instruction, ...], ...]:
    """Return the lists of a schedule that was written as text."""
    rows = [[item.split() for item in line.split(";")] for line in text.splitlines()]
    return tuple(tuple(Instruction(op, int(s), int(m)) for op, s, m in row) for row in rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
@drawn(**sizes)
def test_every_schedule_is_right(name: str, ranks: int, micro_batches: int, chunks: int) -> None:
    """Every schedule passes its check, ends with varying times and messages, and survives as text."""
    schedule = make_schedule(name, ranks, micro_batches, chunks)
    assert read(str(schedule)) == schedule.lists
    line = simulate(schedule, lambda i: 1 + (7 * i.stage + 3 * i.micro) % 5, message=2)
    assert len(line.events) == sum(i.op in COMPUTE for row in schedule.lists for i in row)


@pytest.mark.parametrize("name", NAMES)
@drawn(**sizes)
def test_the_bubble_is_the_formulas(name: str, ranks: int, micro_batches: int, chunks: int) -> None:
    """With enough micro-batches the bubble is the formula's; only ZB schedules need equal times for this."""
    formula = KINDS[name].bubble(ranks, micro_batches, chunks)
    schedule = make_schedule(name, ranks, micro_batches, chunks)
    if formula is not None:
        assert simulate(schedule).bubble == formula
        if not name.startswith("zb"):
            assert simulate(schedule, times(Fraction(2), Fraction(3), Fraction(7))).bubble == formula


@drawn(ranks=st.integers(2, 8), more=st.integers(0, 8))
def test_zb_h1_waits_a_third_and_holds_no_more(ranks: int, more: int) -> None:
    ours, plain = (make_schedule(name, ranks, ranks + more) for name in ("zb-h1", "1f1b"))
    waits, plain_waits = (simulate(s).length - 3 * (ranks + more) for s in (ours, plain))
    assert 3 * waits == plain_waits == 3 * (ranks - 1)
    assert max(held(ours, r) for r in range(ranks)) == max(held(plain, r) for r in range(ranks)) == ranks
    F, I, W = Fraction(5), Fraction(4), Fraction(3)  # noqa: E741
    assert simulate(ours, times(F, I, W)).length == (ranks + more) * (F + I + W) + (ranks - 1) * (F + I - W)


@drawn(ranks=st.integers(1, 8), more=st.integers(0, 8))
def test_what_ranks_hold(ranks: int, more: int) -> None:
    """Ranks store p - r micro-batches in 1F1B, all in GPipe, 2p chunks of half the size in ZB-V."""
    M = 2 * ranks + more
    everyone = range(ranks)
    for name, each in (("gpipe", M), ("zb-h1", ranks), ("zb-v", 2 * ranks)):
        assert [held(make_schedule(name, ranks, M), r) for r in everyone] == [each] * ranks
    assert [held(make_schedule("1f1b", ranks, M), r) for r in everyone] == [ranks - r for r in everyone]
    ahead = 2 * (ranks - 1) + ranks + 1
    assert held(make_schedule("interleaved", ranks, ranks * (2 + more), 2), 0) == ahead


@pytest.mark.parametrize("name", NAMES)
@drawn(ranks=st.integers(2, 6), micro_batches=st.integers(1, 12))
def test_what_shows_that_a_send_is_over(name: str, ranks: int, micro_batches: int) -> None:
    """Sends that `settled` reports as over have been read when the receive is used, for varying times."""
    schedule = make_schedule(name, ranks, micro_batches)
    line = simulate(schedule, lambda i: 1 + (13 * i.stage + 5 * i.micro) % 7, message=1)
    begins = {e.instruction: e.start for e in line.events}
    readers = {schedule.needs(i): i for row in schedule.lists for i in row if i.op in COMPUTE}
    for rank in range(ranks):
        for receive, sends in settled(schedule, rank).items():
            for send in sends:
                kind, step = ("RX", 1) if send.op == "SX" else ("RG", -1)
                read_there = readers[Instruction(kind, send.stage + step, send.micro)]  # type: ignore[arg-type]
                assert begins[read_there] < begins[readers[receive]]


def changed(schedule: Schedule, rank: int, edit: dict[int, Instruction | None]) -> Schedule:
    """Return the schedule with some of a rank's instructions replaced, or removed by None."""
    row = [edit.get(at, i) for at, i in enumerate(schedule.lists[rank])]
    lists = list(schedule.lists)
    lists[rank] = tuple(i for i in row if i)
    return Schedule("changed", schedule.micro_batches, schedule.owner, tuple(lists))


def place(schedule: Schedule, rank: int, text: str) -> int:
    return [str(i) for i in schedule.lists[rank]].index(text)


@pytest.mark.parametrize(
    ("rank", "take", "put", "says"),
    [
        (0, "B 0 1", None, "rank 0, stage 0, micro-batch 1 has F; F B or F I W is needed"),
        (1, "F 1 0", None, "rank 1, stage 1, micro-batch 0 has B; F B or F I W is needed"),
        (1, "B 1 1", "B 1 0", "rank 1 has 'B 1 0' twice"),
        (0, "B 0 1", "B 1 1", "rank 0, stage 0, micro-batch 1 has F"),
        (0, "SX 0 1", None, "rank 0 never sends 'SX 0 1'"),
        (1, "RX 1 1", None, "rank 1 computes 'F 1 1' and never received what it needs before"),
        (0, "F 0 0", "W 0 0", "rank 0, stage 0, micro-batch 0 has B W"),
    ],
)
def test_the_checker_names_what_is_wrong(rank: int, take: str, put: str | None, says: str) -> None:
    right = make_schedule("1f1b", 2, 3)
    instead = read(put)[0][0] if put else None
    with pytest.raises(ScheduleError, match=says):
        check(changed(right, rank, {place(right, rank, take): instead}))


def test_messages_that_cross_are_caught() -> None:
    """Receives in another order than the sends are refused: gloo and NCCL would deliver the wrong ones."""
    right = make_schedule("gpipe", 2, 3)
    first, second = (place(right, 1, f"RX 1 {m}") for m in (0, 1))
    row = right.lists[1]
    with pytest.raises(
        ScheduleError, match=r"from rank 0 to 1, message 0: 'SX 0 0' is sent, 'SX 0 1' expected"
    ):
        check(changed(right, 1, {first: row[second], second: row[first]}))


def test_a_deadlock_is_caught() -> None:
    """A deadlock is reported: rank 0 waits for a gradient that depends on an activation it has not sent."""
    F, B = (lambda s, m: Instruction("F", s, m)), (lambda s, m: Instruction("B", s, m))
    lists = [[F(0, 0), B(0, 0), F(0, 1), B(0, 1)], [F(1, 0), F(1, 1), B(1, 0), B(1, 1)]]
    with pytest.raises(
        ScheduleError, match="ranks wait for one another for ever: rank 0 at 'B 0 0', rank 1 at 'F 1 1'"
    ):
        check(connect("stuck", 2, (0, 1), lists))


def test_the_generators_need_no_torch() -> None:
    """The generators import no torch: the C++ executors call them, which must not take seconds."""
    folder = Path(sys.modules["pp_schedules"].__file__ or "").parent
    code = "import pp_schedules as s, sys; assert 'torch' not in sys.modules; print(s.make_schedule('1f1b', 2, 1))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "RG 0 0;F 0 0;SX 0 0;B 0 0\nRX 1 0;F 1 0;B 1 0;SG 1 0\n"


@drawn(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    stages=st.integers(1, 5),
    before=st.integers(0, 9),
    after=st.integers(0, 9),
)
def test_cuts(costs: list[int], stages: int, before: int, after: int) -> None:
    """Cuts hold all layers in order, none is empty, and no other cut has a faster slowest stage."""
    if len(costs) < stages:
        with pytest.raises(UsageError, match=f"at most {len(costs)} stages would do"):
            by_cost(costs, stages)
        return

    def slowest(cuts: list[range]) -> float:
        work = [sum(costs[i] for i in cut) for cut in cuts]
        work[0] += before
        work[-1] += after
        return max(work)

    found = by_cost(costs, stages, before, after)
    assert [i for cut in found for i in cut] == list(range(len(costs)))
    assert all(found)
    best = min(slowest([range(a, b) for a, b in cut]) for cut in every_cut(0, len(costs), stages))
    assert slowest(found) == best <= slowest(evenly(len(costs), stages))


def every_cut(begin: int, end: int, parts: int) -> list[list[tuple[int, int]]]:
    if parts == 1:
        return [[(begin, end)]]
    return [
        [(begin, at), *rest]
        for at in range(begin + 1, end - parts + 2)
        for rest in every_cut(at, end, parts - 1)
    ]
