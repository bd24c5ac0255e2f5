"""The class of a moment of a trace: compute, exposed or hidden communication, idle."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.utils import timeline
from common.utils.timeline import Event, sweep

intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda p: (min(p), max(p))))


@given(intervals, intervals)
def test_sweep_is_set_arithmetic(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    points_a, points_b = ({t for start, end in s for t in range(start, end)} for s in (a, b))
    flags = {t: f for start, end, f in sweep(a, b) for t in range(int(start), int(end))}
    assert {t for t, f in flags.items() if f[0]} == points_a
    assert {t for t, f in flags.items() if f[1]} == points_b
    assert {t for t, f in flags.items() if all(f)} == points_a & points_b
    assert {t for t, f in flags.items() if any(f)} == points_a | points_b


def trace_of(*spans: tuple[str, str, int, float, float]) -> dict[str, Any]:
    """Return a Kineto trace of (category, name, thread, start, end) in microseconds, from 0 to 100."""
    events: list[Event] = [
        {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": start, "dur": end - start}
        for cat, name, tid, start, end in (("user_annotation", timeline.WINDOW, 1, 0, 100), *spans)
    ]
    return {"baseTimeNanoseconds": 5_000_000, "traceEvents": events}


def micros(trace: dict[str, Any]) -> tuple[float, ...]:
    s = timeline.read(trace)[0]
    return tuple(round(1e6 * t, 6) for t in (s.compute, s.exposed, s.hidden, s.idle))


OPERATOR, NOTE = "cpu_op", "user_annotation"


def test_a_wait_is_a_gap_while_gloo_works() -> None:
    launch = (OPERATOR, "c10d::allreduce_", 1, 20, 25)
    gloo = (NOTE, "gloo:all_reduce", 2, 22, 70)
    assert micros(trace_of((OPERATOR, "aten::mm", 1, 0, 20), launch, gloo)) == (20, 50, 0, 30)
    assert micros(trace_of((OPERATOR, "aten::mm", 1, 25, 60), launch, gloo)) == (35, 15, 35, 50)


def test_a_wait_inside_a_backward_node_is_not_compute() -> None:
    node = (OPERATOR, "autograd::engine::evaluate_function: _LinearBackward", 1, 0, 100)
    python = (OPERATOR, "_LinearBackward", 1, 0, 100)
    launch, gloo = (OPERATOR, "c10d::allreduce_", 1, 10, 12), (NOTE, "gloo:all_reduce", 2, 11, 90)
    assert micros(trace_of(node, python, launch, gloo, (OPERATOR, "aten::add", 1, 90, 95))) == (5, 80, 0, 15)


def test_what_a_collective_copies_is_not_compute() -> None:
    packing = [(OPERATOR, "c10d::_reduce_scatter_base_", 1, 10, 30), (OPERATOR, "aten::clone", 1, 11, 29)]
    assert micros(trace_of(*packing, (OPERATOR, "aten::copy_", 2, 40, 50))) == (0, 20, 0, 80)


def test_on_a_gpu_kernels_count_and_the_host_does_not() -> None:
    host = [
        (OPERATOR, "aten::mm", 1, 0, 5),
        (OPERATOR, "c10d::allreduce_", 1, 5, 9),
        (NOTE, "nccl:all_reduce", 1, 5, 99),
    ]
    device = [
        ("kernel", "sgemm_128x64", 7, 10, 50),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32", 20, 40, 80),
    ]
    assert micros(trace_of(*host, *device)) == (40, 30, 10, 30)


def test_only_the_window_counts() -> None:
    assert micros(trace_of((OPERATOR, "aten::mm", 1, -50, 10), (OPERATOR, "aten::mm", 1, 90, 500))) == (
        20,
        0,
        0,
        80,
    )
