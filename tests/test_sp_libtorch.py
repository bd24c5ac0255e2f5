"""sp_libtorch: ring attention against scaled_dot_product_attention on gloo and MPI; program; bad input."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from mpi.launch import need_binary, on_gloo, refused_by, run
from mpi.programs import proved


def check(found: list[dict[str, Any]]) -> None:
    """Check every rank's outcomes."""
    n = len(found)
    for rank in found:
        for case, (difference, counted, formula) in rank["attention"].items():
            assert difference < 1e-12, case
            assert counted == formula, case
            assert (counted > 0) == (n > 1), case
        assert rank["others"]["turned"] < 1e-12
        assert rank["others"]["type"] == "torch.float32"
        assert 1e-9 < rank["others"]["float32"] < 1e-5
    for order in ("contiguous", "zigzag"):
        held = [rank["places"][order] for rank in found]
        assert sorted(itertools.chain(*held)) == list(range(4 * n))  # each position once
        assert all(places == sorted(places) for places in held)
        if order == "zigzag":
            assert all(sum(places) == sum(held[0]) for places in held)  # early and late ones, as many


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ring_attention_equals_one_device_on_gloo(ranks: int) -> None:
    check(on_gloo("sp_libtorch", ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ring_attention_equals_one_device_on_mpi(ranks: int, found_on_mpi: dict[int, Any]) -> None:
    check(found_on_mpi[ranks])


def test_what_does_not_fit_is_said(found_on_mpi: dict[int, Any]) -> None:
    for rank in found_on_mpi[2]:
        assert rank["refused"] == [
            "ValueError: a sequence of 10 positions does not divide into 4 chunks; 8 or 12 would",
            "ValueError: a sequence of 1 positions does not divide into 2 chunks; 2 would",
            "ValueError: ring_attention: q [1, 4, 6, 8], k [1, 3, 6, 8], v [1, 3, 6, 8]; needed are [B, H, s, K], "
            "[B, G, s, K] and the same, H a multiple of G",
            "ValueError: ring_attention: 3 positions a rank; at least 1, and in zigzag order two equal chunks",
            "ValueError: order is spiral; it is contiguous or zigzag",
            "ValueError: kernel is fast; it is library or plain",
            "ValueError: ring_attention: the kernel 'library' runs on CPUs, not on meta; take 'plain'",
            "RuntimeError: the backward pass of ring_attention has no derivative: leave create_graph out",
        ]


# The program


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_program_proves_itself(ranks: int, tmp_path: Path) -> None:
    claim = f"attention and its gradients on {ranks} rank(s) equal those on one."
    _, records = proved("sp_libtorch", ranks, claim, tmp_path, "--sequence", "96", "--steps", "3")
    contiguous, zigzag = records
    for values, order in ((contiguous, "contiguous"), (zigzag, "zigzag")):
        assert (values["implementation"], values["tokens_per_step"]) == (f"sp_libtorch-{order}", 2 * 96)
        sent = 3 * (ranks - 1) * 2 * 2 * 2 * 96 // ranks * 16 * 8
        assert values["bytes_counted"] == values["bytes_formula"] == sent
        assert len(values["step_seconds"]) == 3
    s = 96 // ranks
    last, mean = (ranks - 1) * s * s + s * (s + 1) / 2, 96 * 97 / 2 / ranks
    assert contiguous["slowest_over_mean_pairs"] == pytest.approx(last / mean)
    assert zigzag["slowest_over_mean_pairs"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-heads", "3"], "--kv-heads 3 does not divide --heads 4; give one of 1, 2, 4"),
        (["--kernel", "fast"], "--kernel fast: choose one of library, plain"),
        (
            ["--sequence", "7"],
            "--sequence 7 does not divide into 2 chunks, two for each rank; 6 or 8 would",
        ),
        (["--json", "/no/such/folder/record.json"], "cannot write to /no/such/folder/record.json"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    assert refused_by("sp_libtorch", *arguments) == message


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        (["--batch=100000", "--sequence=1000000000"], "can't allocate memory"),  # 51 PB, with any overcommit
        (["--batch=1000000000", "--sequence=1000000000"], "Storage size calculation overflowed"),
    ],
)
def test_sizes_without_memory_are_refused(sizes: list[str], why: str) -> None:
    done = run([str(need_binary("sp_libtorch")), *sizes], environment={"OMPI_MCA_btl": "self"})
    assert (done.returncode, done.stdout) == (2, "")
    told = "sp_libtorch: rank 0: there is not enough memory for these sizes; give smaller ones ("
    assert done.stderr.startswith(told)
    assert why in done.stderr.splitlines()[0]
    assert "frame #" not in done.stderr
