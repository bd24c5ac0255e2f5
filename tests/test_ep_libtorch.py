"""ep_libtorch: the Python module against the plain mixture, on gloo and on MPI; the program; bad input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi.launch import mpirun, need_binary, on_gloo, refused_by
from mpi.programs import proved, timed, trained
from torch import Tensor

from common.comm import sizes_of
from common.data.text import rank_slice
from common.lesson.equality import OPTIMIZERS
from common.models.configs import TransformerConfig
from common.models.moe import MoE
from common.models.transformer import Transformer, config


def check(found: list[dict[str, Any]]) -> None:
    """Check every rank's outcomes."""
    for rank in found:
        for case, values in rank["mixtures"].items():
            for name, value in values.items():
                if "bytes" in name:
                    counted, formula = value
                    assert counted == formula, (case, name)
                    assert (counted > 0) == (len(found) > 1), (case, name)
                else:
                    assert value < 1e-12, (case, name)
        assert rank["odd loads"] < 1e-12
        assert all(rank["journey"].values()), rank["journey"]
        assert rank["precisions"]["torch.float32"] < 1e-6
        assert rank["precisions"]["torch.bfloat16"] < 1e-2


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_the_module_equals_one_device_on_gloo(ranks: int) -> None:
    check(on_gloo("ep_libtorch", ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_module_equals_one_device_on_mpi(ranks: int, found_on_mpi: dict[int, Any]) -> None:
    check(found_on_mpi[ranks])


def test_what_does_not_fit_is_said(found_on_mpi: dict[int, Any]) -> None:
    for rank, found in enumerate(found_on_mpi[2]):
        mine = (5, 4)[rank]
        assert found["refused"] == [
            "ValueError: 2 ranks along ep are more than the 1 experts; at most 1 would do",
            "ValueError: 2 ranks along ep are more than the 1 experts; at most 1 would do",
            "ValueError: a token cannot choose 10 of 9 experts; 1 to 9 would do",
            "ValueError: a token cannot choose 0 of 9 experts; 1 to 9 would do",
            "ValueError: router is sigmoid; it is softmax or renormalised",
            "ValueError: no parameter experts.up_proj.weight among the 1 given",
            "ValueError: dispatch: 6 rows where the counts say 9",
            f"ValueError: collect: 0 rows where the counts say {2 * mine}",
            "ValueError: compute: 6 rows where the counts say 9",
            f"ValueError: experts: 6 rows and {mine} experts for counts of 6 rows for 1 experts",
            "ValueError: router.weight has no gradient to sum: call after the backward pass",
            "RuntimeError: the backward pass of ep_libtorch has no derivative: leave create_graph out",
        ]


# The program


def shape(experts: int, k: int, router: str) -> TransformerConfig:
    """Return the configuration, in Python, of the model that the program trains."""
    plain = config("gpt2-tiny")
    return replace(plain, experts=experts, experts_per_token=k, router=router, mlp_width=24)  # type: ignore[arg-type]


def routed(c: TransformerConfig, optimizer: str, steps: int) -> tuple[list[float], list[Tensor]]:
    """Train the plain model in Python; return its losses, and its routers' choices in the last step."""
    model, choices = Transformer(c, 0, torch.float64), []
    for layer in model.layers:
        assert isinstance(layer.mlp, MoE)
        layer.mlp.observe = lambda routing: choices.append(routing.experts_BSK)
    return trained(model, optimizer, steps, 7, 12), choices[-c.layers :]


def step_bytes(c: TransformerConfig, choices: list[Tensor], ranks: int) -> float:
    """Return the mean bytes per rank: two micro-batches, dense gradients and the loss summed, float64."""
    numbers = 0
    for experts_BSK in choices:
        for rank in range(ranks):
            lo, hi = rank_slice(7, rank, ranks)
            counts_E = torch.bincount(experts_BSK[lo:hi].flatten(), minlength=c.experts)
            by_rank = [int(x.sum()) for x in counts_E.split(sizes_of(c.experts, ranks))]
            numbers += 4 * (sum(by_rank) - by_rank[rank]) * c.width
        numbers += 2 * c.experts * (ranks - 1)  # the counts
    dense = sum(p.numel() for name, p in Transformer(c).named_parameters() if ".experts." not in name)
    return 8 * (numbers + 2 * (ranks - 1) * (dense + 1)) / ranks


@pytest.mark.parametrize(
    ("ranks", "experts", "k", "router"), [(3, 5, 2, "renormalised"), (2, 3, 1, "softmax")]
)
def test_a_mixture_trains_as_in_python(ranks: int, experts: int, k: int, router: str, tmp_path: Path) -> None:
    of_experts = ["--experts", str(experts), "--experts-per-token", str(k), "--router", router]
    arguments = ["--batch", "7", "--sequence", "12", "--steps", "2", "--expert-width", "24"]
    claim = f"training with the experts over {ranks} rank(s) equals training on one."
    losses, (values,) = proved("ep_libtorch", ranks, claim, tmp_path, *of_experts, *arguments)
    c = shape(experts, k, router)
    plain = Transformer(c)
    for optimizer in OPTIMIZERS:
        assert losses[optimizer] == pytest.approx(routed(c, optimizer, 2)[0], abs=1e-9)
    assert values["implementation"] == "ep_libtorch"
    assert (values["tokens_per_step"], values["parameters"]) == (84, plain.parameter_count())
    assert values["flop_per_step"] == pytest.approx(84 * plain.flops_per_token(12))
    _, choices = routed(c, "adamw", 3)  # one step to warm up
    assert values["bytes_counted"] == values["bytes_formula"] == pytest.approx(step_bytes(c, choices, ranks))


def test_benchmark_writes_what_it_timed(tmp_path: Path) -> None:
    timed("ep_libtorch", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "bert"], "--model bert: choose one of gpt2-tiny, gpt2-10m"),
        (["--router", "sigmoid"], "--router sigmoid: choose one of renormalised, softmax"),
        (["--experts-per-token", "9"], "a token cannot choose 9 of 8 experts; 1 to 8 would do"),
        (["--batch", "1"], "--batch 1 is too small for 1 ranks x 2 micro-batches; at least 2"),
        (["--sequence", "65"], "--sequence 65 is too long for gpt2-tiny; at most 64"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    assert refused_by("ep_libtorch", *arguments) == message


def test_more_ranks_than_experts() -> None:
    done = mpirun(3, need_binary("ep_libtorch"), "--experts", "2")
    assert done.returncode == 2
    says = "ep_libtorch: 3 ranks along ep are more than the 2 experts; at most 2 would do"
    assert done.stderr.count(says) == 1
