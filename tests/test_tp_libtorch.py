"""tp_libtorch: the Python module against the plain Transformer on gloo and on MPI; the program; bad input."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi.launch import mpirun, need_binary, on_gloo, refused_by
from mpi.programs import proved, timed, trained

from common.lesson.equality import OPTIMIZERS
from common.models.transformer import Transformer, config


def check(found: list[dict[str, Any]]) -> None:
    """Check every rank's outcomes."""
    n = len(found)
    for rank in found:
        without_copy = rank["pair"].pop("without")
        assert (without_copy > 0.1) == (n > 1)  # the gradient behind is a part of the right one
        for part in ("layer", "ends", "pair"):
            for name, value in rank[part].items():
                if "bytes" in name:
                    counted, formula = value
                    assert counted == formula, (part, name)
                else:
                    assert value < 1e-12, (part, name)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_the_module_equals_one_device_on_gloo(ranks: int) -> None:
    check(on_gloo("tp_libtorch", ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_module_equals_one_device_on_mpi(ranks: int, found_on_mpi: dict[int, Any]) -> None:
    check(found_on_mpi[ranks])


def test_what_does_not_fit_is_said(found_on_mpi: dict[int, Any]) -> None:
    heads = "25 heads do not divide over 2 ranks along tp; 1, 5, 25 would do"
    for rank, found in enumerate(found_on_mpi[2]):
        missing = found["refused"].pop(1)
        assert re.fullmatch(r"ValueError: no parameter attention\S+ among the 1 given", missing)
        assert found["refused"] == [
            f"ValueError: {heads}",
            "ValueError: embed_tokens.weight has 1 rows or columns to split over 2 ranks; at most 1 would do",
            f"ValueError: rank {rank} of 2 has 9 entries of a vocabulary of 12; 6 are its piece",
            "ValueError: target 12 is not in a vocabulary of 12; 0 to 11 are, and -100 does not count",
            "ValueError: 2 biases for 1 weights; give none or one a weight",
            "RuntimeError: the backward pass of tp_libtorch has no derivative: leave create_graph out",
        ]


# The program


@pytest.mark.parametrize(("ranks", "heads"), [(2, 4), (8, 8)])
def test_gpt2_trains_as_in_python(ranks: int, heads: int, tmp_path: Path) -> None:
    arguments = ["--batch", "3", "--sequence", "12", "--steps", "2", "--heads", str(heads)]
    claim = f"training split over {ranks} rank(s) equals training on one."
    losses, (values,) = proved("tp_libtorch", ranks, claim, tmp_path, *arguments)
    shape = replace(config("gpt2-tiny"), heads=heads, kv_heads=heads)
    for optimizer in OPTIMIZERS:
        expected = trained(Transformer(shape, 0, torch.float64), optimizer, 2, 3, 12)
        assert losses[optimizer] == pytest.approx(expected, abs=1e-9)
    assert values["implementation"] == "tp_libtorch"
    assert (values["tokens_per_step"], values["parameters"]) == (36, 120576)
    numbers = 36 * (64 * (4 * 2 + 2) + 3)
    assert values["bytes_counted"] == values["bytes_formula"] == 2 * (ranks - 1) / ranks * numbers * 8
    assert values["flop_per_step"] == pytest.approx(36 * Transformer(config("gpt2-tiny")).flops_per_token(12))


def test_benchmark_writes_what_it_timed(tmp_path: Path) -> None:
    timed("tp_libtorch", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "bert"], "--model bert: choose one of gpt2-tiny, gpt2-10m"),
        (["--heads", "5"], "--heads 5 do not divide the width 64 of gpt2-tiny; 1, 2, 4, 8, 16, 32, 64 would"),
        (["--sequence", "65"], "--sequence 65 is too long for gpt2-tiny; at most 64"),
        (["--batch", "1"], "--micro-batches 2 of --batch 1; at most 1"),
        (["--json", "/no/such/folder/record.json"], "cannot write to /no/such/folder/record.json"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    assert refused_by("tp_libtorch", *arguments) == message


def test_heads_that_do_not_divide() -> None:
    done = mpirun(3, need_binary("tp_libtorch"))
    assert done.returncode == 2
    assert (
        done.stderr.count("tp_libtorch: 4 heads do not divide over 3 ranks along tp; 1, 2, 4 would do") == 1
    )
