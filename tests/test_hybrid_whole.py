"""One file of whole tensors: saved and resumed by three languages, each on its own mesh; damage; a killed rank."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mpi.launch import ROOT, mpirun, need_binary, python, refused_by, run
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from training_runs import ALONE, go, options

from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import largest

from hybrid_options import TrainOptions
from hybrid_trainer import start

STATES = ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq.", "optimizer.step.")
SIZES: dict[str, Any] = dict(
    batch=4, sequence=16, warm_up=10, learning_rate=1e-3
)  # no step reaches the cosine
SEED = str(TrainOptions().seed)
TRAIN = f"--train --dtype float64 --batch 4 --sequence 16 --log-every 1 --seed {SEED}".split()
Mesh = dict[str, int]
# Each run goes on from the file of the one before, by one step.
JOURNEYS: dict[str, list[tuple[str, Mesh]]] = {
    "gpt2-tiny": [
        ("hybrid_mpi", dict(pp=2, tp=2)),
        ("python", dict(dp=2, zero=1)),
        ("hybrid_libtorch", dict(pp=2, dp=2, zero=1)),
        ("hybrid_mpi", dict(ep=2, sp=2)),
    ],
    "gpt2-moe-tiny": [
        ("hybrid_mpi", dict(ep=2, tp=2)),
        ("hybrid_libtorch", dict(ep=2)),
        ("hybrid_mpi", dict(pp=2, dp=2)),
    ],
    "mixtral-tiny": [
        ("hybrid_libtorch", dict(ep=2, tp=2)),
        ("python", dict(pp=2)),
        ("hybrid_libtorch", dict(dp=2, zero=1)),
    ],
}


def ranks_of(mesh: Mesh) -> int:
    return math.prod(n for axis, n in mesh.items() if axis != "zero")


def trained(program: str, mesh: Mesh, *arguments: str | Path) -> str:
    """Train with a C++ program in float64; return what it prints."""
    axes = [f"--{axis}={n}" for axis, n in mesh.items()]
    done = mpirun(ranks_of(mesh), need_binary(program), *TRAIN, *axes, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def in_ranks(rt: Runtime, o: TrainOptions) -> bool:
    return go(rt, o).finished


def of_kind(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors of one of STATES, under the plain model's names."""
    given = {name: x for name, x in tensors.items() if name.startswith("optimizer.") == bool(prefix)}
    return {name.removeprefix(prefix): x for name, x in given.items() if name.startswith(prefix)}


def metadata(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as stored:
        return dict(stored.metadata())


def check_equal(one: Path, other: Path, tolerance: float = 1e-12) -> None:
    """Check that two files hold the same names, weights, states of the optimizer and metadata."""
    a, b = load_file(one), load_file(other)
    assert a.keys() == b.keys()
    names = of_kind(a, "").keys()
    for prefix in STATES:
        assert of_kind(a, prefix).keys() == names
        found = largest(of_kind(a, prefix), of_kind(b, prefix))
        assert found.value < tolerance, (prefix, found)
    assert metadata(one) == metadata(other)


@pytest.mark.parametrize("model", JOURNEYS)
def test_each_language_and_mesh_goes_on_from_any_other(model: str, tmp_path: Path) -> None:
    """A run handed from program to program is the run of one rank in Python that never stopped."""
    o, before = options(model=model, steps=len(JOURNEYS[model]), save=tmp_path / "alone", **SIZES), Path()
    assert go(ALONE, o).finished
    for step, (program, mesh) in enumerate(JOURNEYS[model], 1):
        file = tmp_path / f"after-{step}"
        if program == "python":
            given = replace(o, **mesh, steps=step, save=file, resume=str(before))
            assert all(spawn(in_ranks, ranks_of(mesh), given))
        else:
            go_on = ["--resume", before] if step > 1 else []
            said = trained(program, mesh, "--model", model, "--steps", str(step), "--save", file, *go_on)
            assert f"saved after step {step}: {file}" in said
            assert (f"resumed after step {step - 1} of {step} from {before}" in said) == (step > 1)
        before = file
    check_equal(o.save, before)


Header = dict[str, Any]


def stored(file: Path) -> tuple[Header, bytes]:
    """Return header and numbers of a file."""
    content = file.read_bytes()
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:begin]), content[begin:]


def forge(file: Path, header: Header, numbers: bytes) -> None:
    """Write a file of these parts."""
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + numbers)


def changed(name: str, **values: object) -> Callable[[Header, bytes], tuple[Header, bytes]]:
    """Return a damage: other values in the header's entry `name`."""
    return lambda header, numbers: (header | {name: header[name] | values}, numbers)


def other_steps(header: Header, numbers: bytes) -> tuple[Header, bytes]:
    """Give one parameter another number of steps than the others."""
    begin, end = header["optimizer.step.norm.bias"]["data_offsets"]
    return header, numbers[:begin] + struct.pack("<f", 3) + numbers[end:]


Damage = Callable[[Header, bytes], tuple[Header, bytes]]
DAMAGE: dict[str, tuple[Damage, str]] = {
    "short": (lambda h, n: (h, n[:-1]), "cannot read FILE: it is cut short"),
    "long": (lambda h, n: (h, n + b"x"), "cannot read FILE: it goes on behind its tensors"),
    "type": (changed("norm.bias", dtype="I32"), "cannot read FILE: norm.bias has the dtype I32; F64 and F32"),
    "offsets": (changed("norm.bias", shape=[65]), "cannot read FILE: the offsets of norm.bias do not fit its shape"),
    "overlap": (changed("norm.bias", data_offsets=[0, 512]), "cannot read FILE: its tensors overlap or leave a gap"),
    "shape": (changed("norm.bias", shape=[8, 8]), "norm.bias is [8, 8] float64 there and [64] float64 here; give"),
    "name": (
        lambda h, n: ({"bias" if name == "norm.bias" else name: x for name, x in h.items()}, n),
        "FILE is of another model or optimizer: bias is [64] float64 there and missing here; give the options",
    ),
    "batch": (changed("__metadata__", batch="5"), "FILE is of a run with batch '5', this one has '4', so the order"),
    "text": (changed("__metadata__", data_sha256="0"), "FILE is of a run with data_sha256 '0', this one has '"),
    "late": (changed("__metadata__", step="9"), "FILE is of step 9, beyond --steps 2; give at least 9, or another"),
    "step": (changed("__metadata__", step="-1"), "FILE does not say how many steps it has behind it"),
    "steps": (other_steps, "FILE has parameters after 1.000000 and after 3.000000 steps of AdamW; one number is"),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of one step of gpt2-tiny."""
    file = tmp_path_factory.mktemp("whole") / "file"
    assert go(ALONE, options(model="gpt2-tiny", steps=1, save=file, **SIZES)).finished
    return file


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_one_line(name: str, whole_file: Path, tmp_path: Path) -> None:
    (damage, message), file = DAMAGE[name], tmp_path / "bad"
    forge(file, *damage(*stored(whole_file)))
    done = run([str(need_binary("hybrid_mpi")), *TRAIN, "--steps", "2", "--resume", str(file)])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert message.replace("FILE", str(file)) in done.stderr
    if name != "steps":  # torch's AdamW counts the steps of each parameter
        with pytest.raises(UsageError, match=str(file)) as error:
            start(ALONE, options(model="gpt2-tiny", steps=2, resume=str(file), **SIZES))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("program", ["hybrid_mpi", "hybrid_libtorch"])
def test_ranks_refuse_a_file_together(program: str, tmp_path: Path) -> None:
    """Also what one rank alone finds ends all ranks, with one line: rank 0 cannot write here."""
    missing = tmp_path / "no" / "file"
    for option, why in (("--resume", f"cannot read {missing}"), ("--save", f"{missing} cannot be written")):
        done = mpirun(3, need_binary(program), "--train", "--dp", "3", option, missing)
        assert done.returncode == 2
        assert (
            done.stderr.count(program)
            == done.stderr.count(f"{program}: {why}: No such file or directory\n")
            == 1
        )


@pytest.mark.parametrize("program", ["hybrid_mpi", "hybrid_libtorch"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--save", "x"], "--save and --resume go with --train, which compares nothing; give that, too"),
        (["--train", "--benchmark"], "--train and --benchmark exclude each other"),
        (["--train", "--optimizer", "sgd"], "--train trains with AdamW; give --optimizer adamw, or leave it out"),
        (["--train", "--dp", "3"], "mesh pp=1 dp=3 ep=1 sp=1 tp=1 needs 3 ranks, the world has 1; dp=1 would fit"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(program: str, arguments: list[str], message: str) -> None:
    assert refused_by(program, *arguments) == message


# one rank in a shell that kills it soon after the first file is there
KILLED = """
[ "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 2 ] && (until [ -e "$0" ]; do sleep 0.1; done; sleep 0.3; kill -9 $$) &
exec "$@" --save "$0"
"""


def test_a_killed_rank_ends_all_and_leaves_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    command = [need_binary("hybrid_mpi"), *TRAIN, "--pp", "2", "--tp", "2", "--steps", "100000"]
    done = mpirun(4, "sh", "-c", KILLED, file, *command, "--save-every", "1")
    assert done.returncode != 0
    assert "rank 2 with PID" in done.stderr or "signal 9" in done.stderr, done.stderr
    step = int(metadata(file)["step"])
    assert (
        f"saved after step {step}: {file}" in done.stdout
        or f"saved after step {step - 1}: {file}" in done.stdout
    )
    go_on = ["--resume", file, "--steps", str(step + 1)]
    assert f"resumed after step {step} of {step + 1}" in trained("hybrid_mpi", dict(sp=2), *go_on)


def curve(file: Path) -> dict[int, float]:
    """Return the losses by step in a file of records."""
    records = map(json.loads, file.read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}


def test_200_steps_are_those_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the default text, 4 ranks of hybrid_mpi learn as Python does; each goes on from what the other has saved."""
    monkeypatch.delenv("FIVED_TEXT")
    script = ROOT / "06-hybrid-parallelism" / "examples" / "train_llama.py"
    same = ["--dtype", "float64", "--log-every", "1"]

    def in_cpp(ranks: int, *arguments: str | Path) -> None:
        done = mpirun(ranks, need_binary("hybrid_mpi"), "--train", *same, *arguments)
        assert done.returncode == 0, done.stderr

    def in_python(*arguments: str | Path) -> None:
        quiet = ["--model", "gpt2-tiny", "--evaluate-every", "0", "--peak-tflops", "1"]
        done = run([str(python()), str(script), *quiet, *same, *map(str, arguments)])
        assert done.returncode == 0, done.stderr

    def files(name: str) -> list[str | Path]:
        return ["--save", tmp_path / name, "--json", tmp_path / f"{name}.json"]

    def check(name: str, other: str, steps: range) -> None:
        check_equal(tmp_path / name, tmp_path / other, 1e-9)
        losses, others = (curve(tmp_path / f"{x}.json") for x in (name, other))
        assert [*losses] == [*steps]
        assert losses == pytest.approx(others, rel=1e-6)

    in_cpp(4, "--pp", "2", "--tp", "2", "--steps", "200", *files("cpp"))
    in_python("--steps", "200", *files("python"))
    check("cpp", "python", range(1, 201))
    in_python(
        "--nproc", "2", "--sp", "2", "--steps", "220", "--resume", tmp_path / "cpp", *files("cpp-python")
    )
    in_cpp(4, "--dp", "4", "--steps", "220", "--resume", tmp_path / "python", *files("python-cpp"))
    check("cpp-python", "python-cpp", range(201, 221))
    in_python("--steps", "220", "--resume", tmp_path / "python", *files("python-python"))
    check("cpp-python", "python-python", range(201, 221))
