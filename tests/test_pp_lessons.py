"""Lessons of chapter 02: proofs, output, and refused options."""

from __future__ import annotations

from pathlib import Path

import pytest
from beside_one_device import here
from mpi.launch import refusal, refused

from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.models.configs import CONFIGS, gpt2

import pp_languages
import pp_manual
import pp_memory
import pp_torch
from pp_checker import held
from pp_memory import MemoryOptions, kept
from pp_mlp import MLPOptions
from pp_schedules import KINDS
from pp_torch import TorchOptions
from pp_training import PipelineOptions, pipeline, timed_job

CONFIGS["pp-four"] = gpt2(layers=4, width=16, heads=2, sequence=16)
CHAPTER = Path(__file__).resolve().parents[1] / "02-pipeline-parallelism/pytorch"
SMALL = {"model": "pp-four", "sequence": 6, "steps": 1}


def manual(rt: Runtime, o: PipelineOptions) -> bool:
    return pp_manual.main(rt, o)


def memory(rt: Runtime, o: MemoryOptions) -> bool:
    return pp_memory.main(rt, o)


def beside_torch(rt: Runtime, o: TorchOptions) -> bool:
    return pp_torch.main(rt, o)


def test_two_stages_by_hand(tmp_path: Path) -> None:
    plot = tmp_path / "manual.png"
    o = PipelineOptions(**SMALL, batch=5, micro_batches=3, plot=plot)
    assert all(spawn(manual, 2, o))
    assert plot.stat().st_size > 10_000


def test_torchs_schedules_give_the_same() -> None:
    assert all(spawn(beside_torch, 2, TorchOptions(**SMALL, batch=6, micro_batches=3)))


def test_memory_is_measured() -> None:
    assert all(spawn(memory, 2, MemoryOptions(model="pp-four", sequence=6, micro_batches=4)))


def test_memory_is_that_of_the_largest_micro_batch() -> None:
    found = []
    for batch, micro_batches in ((5, 2), (6, 2), (4, 2)):  # the larger micro-batch of 5 samples has 3
        o = MemoryOptions(model="pp-four", sequence=6, batch=batch, micro_batches=micro_batches)
        job = timed_job(here(), o, "gpipe")
        found.append(kept(pipeline(job, KINDS["gpipe"].schedule(1, micro_batches)), job))
    uneven, of_three, of_two = found
    assert uneven == of_three > of_two


@pytest.mark.parametrize("name", KINDS)
def test_held_by_formula(name: str) -> None:
    known = 0
    for p in range(1, 7):
        for M in range(1, 15):
            schedule = KINDS[name].schedule(p, M, 3)
            for rank in range(p):
                formula = KINDS[name].holds(rank, p, M, 3)
                known += formula is not None
                assert formula in (None, held(schedule, rank))
    assert known > 60


@pytest.mark.parametrize(
    ("lesson", "ranks", "options", "says"),
    [
        (manual, 3, PipelineOptions(), "two stages need 2 ranks, here are 3; pp_gpipe.py takes any number"),
        (
            beside_torch,
            2,
            TorchOptions(batch=10),
            "--batch 10: torch wants equal micro-batches; 8 divides into 8",
        ),
        (beside_torch, 2, TorchOptions(versions=("zb-h2",)), "--versions 'zb-h2' is unknown"),
        (memory, 2, MemoryOptions(micro_batches=17), "--batch 16 cannot be cut into 17 micro-batches"),
    ],
)
def test_bad_input_is_one_line(lesson: object, ranks: int, options: PipelineOptions, says: str) -> None:
    assert says in refused(lesson, ranks, options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--schedule", "1f2b"], "choose from gpipe, 1f1b, interleaved, zb-h1, zb-v"),
        (["--model", "llama-deep"], "pp_libtorch has GPT-2 alone"),
        (["--versions", "pp_rust"], "'pp_rust' is unknown"),
    ],
)
def test_languages_refuse(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(pp_languages.main, MLPOptions, capsys, *options)
