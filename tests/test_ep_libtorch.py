"""ep_libtorch: the Python module against the plain mixture, on gloo and on MPI; the program; bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mpi.launch import mpirun, need_binary, on_gloo, on_mpi, run
from torch import Tensor

from common.benchmarks.measures import problem
from common.comm import sizes_of
from common.data.text import lm_batch, load_text, rank_slice
from common.lesson.equality import OPTIMIZERS
from common.models.configs import TransformerConfig
from common.models.moe import MoE
from common.models.transformer import Transformer, config


@pytest.fixture(scope="module")
def found_on_mpi(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return on_mpi("ep_libtorch", tmp_path_factory)


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


def trained(c: TransformerConfig, optimizer: str, steps: int) -> tuple[list[float], list[Tensor]]:
    """Train the plain model in Python; return its losses, and its routers' choices in the last step."""
    model, found, choices = Transformer(c, 0, torch.float64), [], []
    for layer in model.layers:
        assert isinstance(layer.mlp, MoE)
        layer.mlp.observe = lambda routing: choices.append(routing.experts_BSK)
    chosen = OPTIMIZERS[optimizer](list(model.parameters()))
    for step in range(steps):
        tokens, targets = lm_batch(load_text(None).train, 0, step, 7, 12, 0, 7)
        chosen.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, -2), targets.flatten())
        loss.backward()
        chosen.step()
        found.append(loss.item())
    return found, choices[-c.layers :]


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
    record = tmp_path / "record.json"
    of_experts = ["--experts", str(experts), "--experts-per-token", str(k), "--router", router]
    arguments = ["--batch", "7", "--sequence", "12", "--steps", "2", "--expert-width", "24", "--json", record]
    done = mpirun(ranks, need_binary("ep_libtorch"), *of_experts, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"proved: training with the experts over {ranks} rank(s) equals training on one." in done.stdout
    c = shape(experts, k, router)
    plain = Transformer(c)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("loss of each step")]
    for words, optimizer in zip(lines, OPTIMIZERS, strict=True):
        assert [float(word) for word in words[4:]] == pytest.approx(trained(c, optimizer, 2)[0], abs=1e-9)
    values = json.loads(record.read_text())
    assert not problem(values)
    assert (values["implementation"], values["language"], values["ranks"]) == (
        "ep_libtorch",
        "libtorch",
        ranks,
    )
    assert (values["tokens_per_step"], values["parameters"]) == (84, plain.parameter_count())
    assert values["equal"] is True
    assert 0 < values["largest_difference"] < 1e-12
    assert values["flop_per_step"] == pytest.approx(84 * plain.flops_per_token(12))
    _, choices = trained(c, "adamw", 3)  # one step to warm up
    assert values["bytes_counted"] == values["bytes_formula"] == pytest.approx(step_bytes(c, choices, ranks))


def test_benchmark_writes_what_it_timed(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    arguments = ["--benchmark", "--model", "gpt2-tiny", "--steps", "3", "--json", record]
    done = mpirun(2, need_binary("ep_libtorch"), *arguments)
    assert done.returncode == 0, done.stderr
    assert "times as fast as one rank alone" in done.stdout
    values = json.loads(record.read_text())
    assert not problem(values)
    assert (len(values["step_seconds"]), values["equal"]) == (3, None)


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
    done = run([str(need_binary("ep_libtorch")), *arguments])
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"ep_libtorch: {message}\n")


def test_more_ranks_than_experts() -> None:
    done = mpirun(3, need_binary("ep_libtorch"), "--experts", "2")
    assert done.returncode == 2
    says = "ep_libtorch: 3 ranks along ep are more than the 2 experts; at most 2 would do"
    assert done.stderr.count(says) == 1
