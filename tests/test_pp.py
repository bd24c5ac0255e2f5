"""Pipelines in PyTorch: every schedule equal to one device at every world size, in the order of its lists."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from beside_one_device import Case, alone, equal_to_one_device, on_ranks
from mpi.launch import refused
from torch import nn

from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.comparison import Lesson
from common.lesson.equality import compare
from common.models.configs import CONFIGS, gpt2, llama
from common.models.transformer import Linear

import pp_1f1b
import pp_gpipe
import pp_interleaved
import pp_training
import pp_zero_bubble
from pp_checker import held
from pp_costs import step_bytes
from pp_deferred import Deferred
from pp_schedule import COMPUTE
from pp_schedules import KINDS
from pp_training import PipelineOptions, lesson, pipeline, timed_job

CONFIGS["pp-gpt2"] = replace(gpt2(layers=8, width=16, heads=2, sequence=16), dropout=0.2)
CONFIGS["pp-llama"] = llama(layers=9, width=16, heads=2, kv_heads=1, mlp_width=24, sequence=16)
CONFIGS["pp-deep"] = gpt2(layers=16, width=16, heads=2, sequence=16)
CONFIGS["pp-short"] = gpt2(layers=3, width=16, heads=2, sequence=64)


def case(version: str, model: str, micro_batches: int, **more: Any) -> Case:
    o = PipelineOptions(model=model, batch=7, sequence=6, steps=2, micro_batches=micro_batches, **more)
    return Case(version, o)


CASES = {
    "gpipe, gpt2": case("gpipe", "pp-gpt2", 3),
    "1f1b, gpt2": case("1f1b", "pp-gpt2", 7),
    "1f1b, llama": case("1f1b", "pp-llama", 1),
    "interleaved, gpt2": case("interleaved", "pp-gpt2", 5),
    "interleaved, llama": case("interleaved", "pp-llama", 4, chunks=1),
    "zb-h1, gpt2": case("zb-h1", "pp-gpt2", 5, checkpointing=True),
    "zb-h1, llama": case("zb-h1", "pp-llama", 2),
    "zb-v, gpt2": case("zb-v", "pp-gpt2", 4),
    "zb-v, llama": case("zb-v", "pp-llama", 7, checkpointing=True),
    "1f1b, deep": case("1f1b", "pp-deep", 4),
    "zb-v, deep": case("zb-v", "pp-deep", 7),
}
# all but the deep ones on 2 ranks; with more ranks than cores, what depends on their number
NAMES = {
    1: ["gpipe, gpt2", "interleaved, gpt2", "zb-h1, llama"],
    2: [name for name in CASES if "deep" not in name],
    3: ["1f1b, gpt2", "interleaved, gpt2", "zb-h1, gpt2", "zb-v, gpt2"],
    4: ["1f1b, gpt2", "interleaved, llama", "zb-v, gpt2", "zb-v, llama"],
    8: ["1f1b, deep", "zb-v, deep"],
}


FILES = {
    "gpipe": pp_gpipe,
    "1f1b": pp_1f1b,
    "interleaved": pp_interleaved,
    "zb-h1": pp_zero_bubble,
    "zb-v": pp_zero_bubble,
}
LESSON = Lesson(
    "pp", {name: partial(FILES[name].train, kind=kind) for name, kind in KINDS.items()}, step_bytes(KINDS)
)


def lesson_of(case: Case) -> Lesson:
    return LESSON


@pytest.mark.parametrize("world", NAMES)
def test_equal_to_one_device(world: int) -> None:
    equal_to_one_device(world, lesson_of, {name: CASES[name] for name in NAMES[world]})


def observe(rt: Runtime, names: list[str]) -> list[bool]:
    """Return three checks of each schedule on this rank.

    It computed in the order of its list, its peak of held activations is the checker's, and nothing is left.
    """
    seen = []
    for name in names:
        o = PipelineOptions(model="pp-gpt2", batch=7, sequence=6, micro_batches=5)
        job = timed_job(rt, o, name)
        pipe = pipeline(job, KINDS[name].schedule(rt.world_size, o.micro_batches))
        executor, most = pipe.executor, 0
        compute = executor.compute

        def watched(i: Any, compute: Any = compute, executor: Any = executor) -> None:
            nonlocal most
            compute(i)
            waiting = {k for k in executor.put_off if k not in executor.outputs}
            most = max(most, len(executor.outputs) + len(waiting) + (i.op in ("B", "W")))

        executor.compute = watched  # type: ignore[method-assign]
        batch = next(job.batches())
        pipe.run(batch.parts, 1 / batch.count_targets(), batch.begin)
        order = [e.instruction for e in executor.events]
        seen.append(order == [i for i in pipe.schedule.lists[rt.rank] if i.op in COMPUTE])
        seen.append(most == held(pipe.schedule, rt.rank))
        left = (executor.here, executor.arriving, executor.inputs, executor.outputs, executor.put_off)
        seen.append(not any(left))
    return seen


@pytest.mark.parametrize("world", [2, 4])
def test_instructions_run_in_the_order_of_the_list_and_hold_what_it_says(world: int) -> None:
    for seen in spawn(observe, world, list(KINDS) if world == 2 else ["interleaved", "zb-v"]):
        assert all(seen), seen


def test_deferred_weight_gradients_are_the_same() -> None:
    torch.manual_seed(0)
    plain, split = (nn.Sequential(Linear(3, 5), nn.GELU(), Linear(5, 2)).double() for _ in range(2))
    split.load_state_dict(plain.state_dict())
    x, dy = torch.randn(2, 4, 3).double(), torch.randn(2, 4, 2).double()
    deferred = Deferred()
    deferred.replace(split)
    for _ in range(2):
        plain(x).backward(dy)
        with deferred.collect() as waiting:
            split(x).backward(dy)
        assert len(waiting) == 2
        for work in reversed(waiting):
            work()
    assert not any(p.grad.requires_grad for p in split.parameters()), "a gradient keeps a graph"
    split(x).backward(dy)  # outside of collect, at once
    plain(x).backward(dy)
    for a, b in zip(plain.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-12, atol=1e-13)


def cut_by_cost(rt: Runtime) -> list[float]:
    """Train one step with stages of 1, 2 and 5 layers; return this rank's layer count and the differences."""
    o = PipelineOptions(model="pp-gpt2", batch=3, sequence=6, micro_batches=3, steps=1, balance="cost")
    reference, _ = alone(rt, o, LESSON, "1f1b", "sgd")
    with patch.object(pp_training, "measured_costs", lambda *_: ([8, 4, 4, *[1] * 5], 0, 0)):
        followed, job = on_ranks(rt, o, LESSON, "1f1b", "sgd")
    return [len(job.model.layers), *(d.value for d in compare(reference, followed).values())]


def test_stages_of_different_lengths() -> None:
    found = spawn(cut_by_cost, 3)
    assert [int(length) for length, *_ in found] == [1, 2, 5]
    assert all(max(values) < 1e-12 for _, *values in found)


def every_lesson(rt: Runtime, o: PipelineOptions) -> None:
    lesson(rt, o, pp_1f1b.train, KINDS.values())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"micro_batches": 12}, "--batch 11 cannot be cut into 12 micro-batches; give between 1 and 11"),
        (
            {"model": "pp-short"},
            "or a model with more layers: gpt2-deep, ",
        ),
        ({"versions": ("2f2b",)}, "--versions '2f2b' is unknown; choose from gpipe, 1f1b"),
    ],
)
def test_bad_input_is_one_line(given: dict[str, Any], says: str) -> None:
    options = PipelineOptions(**{"versions": ("interleaved",), **given})
    assert says in refused(every_lesson, 2, options)


def lessons(rt: Runtime, o: PipelineOptions) -> bool:
    return lesson(rt, o, pp_zero_bubble.train, [KINDS["1f1b"], KINDS["zb-v"]])


def test_the_lesson_proves() -> None:
    assert all(spawn(lessons, 2, PipelineOptions(model="pp-gpt2", sequence=6, steps=1)))
