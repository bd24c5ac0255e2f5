"""hybrid_libtorch: the Python module against one device and Python's Hybrid, on twelve meshes and more; the program."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mpi.launch import mpirun, need_binary, need_module, on_gloo, refused_by
from mpi.programs import proved, timed, trained

from common.lesson.equality import OPTIMIZERS
from common.models.transformer import Transformer, config


@pytest.mark.parametrize(("ranks", "meshes"), [(1, 2), (2, 4), (4, 6), (8, 4)])
def test_the_module_equals_one_device_and_python(ranks: int, meshes: int) -> None:
    for rank in on_gloo("hybrid_libtorch", ranks):
        assert len(rank) == meshes
        for found in rank:
            for kind, value in found["apart"].items():
                assert value < 1e-12, (found["case"], kind)
            assert found["names"] == found["their names"], found["case"]
            assert found["bytes"] == pytest.approx(found["their bytes"]), found["case"]
            assert bool(found["bytes"]) == (ranks > 1)


# The program


def test_gpt2_trains_as_in_python(tmp_path: Path) -> None:
    mesh = ["--pp", "2", "--dp", "2", "--tp", "2", "--zero", "1", "--sequence-parallel"]
    size = ["--batch", "9", "--sequence", "12", "--steps", "2"]
    claim = "training on the mesh of 8 rank(s) equals training on one."
    losses, (values,) = proved("hybrid_libtorch", 8, claim, tmp_path, *mesh, *size)
    for optimizer in OPTIMIZERS:
        expected = trained(Transformer(config("gpt2-tiny"), 0, torch.float64), optimizer, 2, 9, 12)
        assert losses[optimizer] == pytest.approx(expected, abs=1e-9)
    assert (values["implementation"], values["mesh"]) == ("hybrid_libtorch", "pp=2 dp=2 tp=2")
    assert (values["tokens_per_step"], values["parameters"]) == (108, 120576)
    assert values["flop_per_step"] == pytest.approx(
        108 * Transformer(config("gpt2-tiny")).flops_per_token(12)
    )
    by_axes = values["bytes_by_axes"]
    assert set(by_axes) == {"pp", "tp", "dp+ep+sp", "dp+ep+sp+tp"}
    assert values["bytes_counted"] == values["bytes_formula"] == pytest.approx(sum(by_axes.values()))


def test_a_mixture_trains_as_in_python(tmp_path: Path) -> None:
    mesh = ["--model", "mixtral-tiny", "--ep", "2", "--sp", "2", "--clip", "0.5"]
    size = ["--batch", "4", "--sequence", "8", "--steps", "1", "--optimizer", "sgd"]
    claim = "training on the mesh of 4 rank(s) equals training on one."
    record = tmp_path / "record.json"
    done = mpirun(4, need_binary("hybrid_libtorch"), *mesh, *size, "--json", record)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"proved: {claim}" in done.stdout
    (loss,) = trained(Transformer(config("mixtral-tiny"), 0, torch.float64), "sgd", 1, 4, 8)
    (printed,) = [line for line in done.stdout.splitlines() if line.startswith("loss of each step")]
    assert float(printed.split()[-1]) == pytest.approx(loss, abs=1e-9)
    assert '"bytes_by_axes": {"ep": ' in record.read_text()


def test_benchmark_writes_what_it_timed(tmp_path: Path) -> None:
    values = timed("hybrid_libtorch", tmp_path, "--tp", "2")
    assert values["mesh"] == "tp=2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--tp", "2", "--dp", "3"],
            "mesh pp=1 dp=3 ep=1 sp=1 tp=2 needs 6 ranks, the world has 1; a world of 6 ranks would fit",
        ),
        (["--dp", "2"], "mesh pp=1 dp=2 ep=1 sp=1 tp=1 needs 2 ranks, the world has 1; dp=1 would fit"),
        (
            ["--sequence-parallel"],
            "--sequence-parallel cuts the tokens over tp, which has 1 rank here; give --tp 2, or leave it out",
        ),
        (
            ["--batch", "1"],
            "--batch 1 gives each of 1 places along dp and ep 1 samples, too few for 2 micro-batches; give --batch 2, "
            "or fewer micro-batches",
        ),
        (["--sequence", "65"], "--sequence 65 is too long for gpt2-tiny; at most 64"),
        (["--pp", "65536", "--ep", "65536"], "--pp 65536: give a number from 1 to 4096"),
        (["--zero", "2"], "--zero 2: give a number from 0 to 1"),
        (
            ["--schedule", "dualpipe"],
            "--schedule dualpipe: choose one of gpipe, 1f1b, interleaved, zb-h1, zb-v",
        ),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    assert refused_by("hybrid_libtorch", *arguments) == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "3"], "4 heads do not divide over 3 ranks along tp; 1, 2, 4 would do"),
        (
            ["--pp", "3"],
            "2 layers of gpt2-tiny are too few for the 3 stages of 1f1b on 3 rank(s); at least 3",
        ),
        (["--sp", "3"], "a sequence of 32 positions does not divide into 6 chunks; 30 or 36 would"),
    ],
)
def test_meshes_that_do_not_fit(arguments: list[str], message: str) -> None:
    done = mpirun(3, need_binary("hybrid_libtorch"), *arguments)
    assert (done.returncode, done.stderr.count(f"hybrid_libtorch: {message}\n")) == (2, 1), done.stderr


@pytest.mark.parametrize(
    ("shape", "rank", "message"),
    [
        ([0, 1, 1, 1, 1], 0, "a mesh has at least one rank along each axis"),
        ([1, 2, 1, 1, 1], 2, "rank 2 is outside of a mesh of 2 ranks"),
        ([1, 2, 1, 1, 1], -1, "rank -1 is outside of a mesh of 2 ranks"),
    ],
)
def test_the_module_refuses_a_mesh(shape: list[int], rank: int, message: str) -> None:
    need_module("hybrid_libtorch")
    import torch  # noqa: F401  # loads the libraries of the module

    import hybrid_libtorch

    with pytest.raises(ValueError, match=message):
        hybrid_libtorch.Mesh(shape, rank, lambda *_: None)
