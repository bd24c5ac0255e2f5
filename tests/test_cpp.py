"""The module fived: collectives on 1 to 4 ranks, and data and numbers equal to Python's own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi.launch import ROOT, mpirun, need_binary, need_module, python, run, run_worker

from common import random
from common.data.text import load_text, mlp_batch, rank_slice


@pytest.fixture(scope="module", autouse=True)
def built():
    need_module("fived")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run one mpirun for all numbers of ranks; return {ranks: the worker's results}."""
    return run_worker(4, "cpp_worker.py", tmp_path_factory.mktemp("cpp"))


@pytest.fixture(params=[1, 2, 3, 4], ids="{0} ranks".format)
def results(request, found):
    """Return (ranks, the worker's results)."""
    return request.param, found[str(request.param)]


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float64", 8)])
def test_all_reduces_are_sums_and_count_their_bytes(results, dtype, size):
    ranks, found = results
    doubling_messages = {1: [0], 2: [1, 1], 3: [2, 1, 1], 4: [2, 2, 2, 2]}[ranks]
    for name, n, right, sent in found[dtype]:
        assert right, (name, n)
        pieces = [hi - lo for lo, hi in (rank_slice(n, r, ranks) for r in range(ranks))]
        if name == "ring_all_reduce":
            assert sum(sent) == 2 * (ranks - 1) * n * size
            expected = [(2 * n - pieces[r] - pieces[(r + 1) % ranks]) * size for r in range(ranks)]
        else:
            expected = [messages * n * size for messages in doubling_messages]
        assert sent == (expected if ranks > 1 else [0]), (name, n)


def test_scatter_gather_and_broadcast(results):
    assert results[1]["scatter_gather"]
    assert results[1]["broadcasts"]
    assert results[1]["threads"]


def test_collectives_are_timed_beside_one_another(tmp_path):
    script, records = ROOT / "common/benchmarks/all_reduce.py", tmp_path / "records.jsonl"
    every = ["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast"]
    sizes = ["--sizes", "12000", "--repeats", "5"]
    done = mpirun(3, python(), script, *sizes, "--collectives", *every, "--json", records)
    assert done.returncode == 0, done.stderr
    assert "gloo / fived" in done.stdout
    found = [json.loads(line) for line in records.read_text().splitlines()]
    names = {name: ["MPI", *["our ring"][name != "all-reduce" :], "fived", "gloo", "copy"] for name in every}
    assert [r["primitive"] for r in found] == [f"{name}, {who}" for name in every for who in names[name]]
    for record in found:
        assert record["correct"]
        assert (record["ranks"], record["bytes"], len(record["seconds"])) == (3, 12_000, 5)
        sent = {"all-reduce": 4 / 3, "broadcast": 1}.get(record["primitive"].split(",")[0], 2 / 3)
        assert record["bus_bandwidth"] == pytest.approx(sent * record["algorithm_bandwidth"])
    alone = mpirun(1, python(), script)
    assert alone.returncode == 2
    assert "at least 2 ranks, not 1; start with mpirun -np 2" in alone.stderr


def test_a_small_all_reduce_is_timed_by_layer():
    script = ROOT / "common/benchmarks/latency.py"
    done = mpirun(2, python(), script, "--repeats", "5")
    assert done.returncode == 0, done.stderr
    rows = [line.split("│")[1:-1] for line in done.stdout.splitlines() if line.startswith("│")]
    times = {
        row[0].strip(): [float(cell.split()[0]) if cell.strip() else 0 for cell in row[1:]] for row in rows
    }
    assert list(times) == [
        "MPI_Allreduce", "Backend.allreduce", "ProcessGroup.allreduce", "dist.all_reduce", "common.comm.all_reduce"
    ]  # fmt: skip
    assert times.pop("MPI_Allreduce")[0] > 0
    assert all(mpi == 0 < min(both) for mpi, *both in times.values())
    alone = mpirun(1, python(), script)
    assert alone.returncode == 2
    assert "at least 2 ranks, not 1; start with mpirun -np 2" in alone.stderr


def test_split(results):
    ranks, found = results
    assert found["halves"] == [["half", r // 2, (ranks + 1 - r % 2) // 2] for r in range(ranks)]


def test_errors_name_call_communicator_and_rank(results):
    ranks, found = results
    pattern = (
        rf"MPI_Recv on '.+', rank 1 of {ranks}: 3 elements arrived from rank 0, 5 expected"
        if ranks > 1
        else r"MPI_Send on '.+', rank 0 of 1: no rank 1; there are 0 to 0"
    )
    raised = [message for message in found["mismatch"] if message]
    assert len(raised) == 1
    assert re.fullmatch(pattern, raised[0])


def test_random_numbers_are_those_of_python():
    import fived

    for seed, stream, index in [(0, 0, 0), (1, 2, 3), (2**64 - 1, 7, 2**40), (5, 2**63, 11)]:
        assert fived.random.bits(seed, stream, index) == random.bits(seed, stream, index).item()
        assert fived.random.uniform(seed, stream, index) == random.uniform(seed, stream, index).item()


@pytest.mark.parametrize("chosen", [True, False])
def test_text_and_samples_are_those_of_python(tmp_path, monkeypatch, chosen):
    import fived

    default = Path(os.environ["FIVED_TEXT"]).name
    if not chosen:
        monkeypatch.delenv("FIVED_TEXT")
        default = "Python's standard library"
    assert load_text().name == default

    folder = tmp_path / "text"
    for place in ("b/z.txt", "b.txt", "a/.hidden", ".git/config", "a/é.txt", "Z", "a/b/c.py"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(place * 200, encoding="utf-8")
    for data in (None, folder, folder / "Z"):
        if data == folder / "Z":
            data.write_bytes(bytes(range(256)) * 5)
        train, validation, name = fived.text.load(str(data or ""))
        expected = load_text(data)
        assert np.array_equal(train, expected.train)
        assert np.array_equal(validation, expected.validation)
        assert name == expected.name
        x, y = fived.text.mlp_samples(train, 4, 9, 2, 7, 3)
        expected_x, expected_y = mlp_batch(expected.train, 4, 9, 8, 3, 2, 7)
        assert np.array_equal(x, expected_x.numpy())
        assert np.array_equal(y, expected_y.numpy())


def test_text_that_cannot_be_used(tmp_path):
    import fived

    with pytest.raises(fived.UsageError, match="no such file or folder: /no/such/text"):
        fived.text.load("/no/such/text")
    (tmp_path / "short").write_bytes(b"x" * 1023)
    with pytest.raises(fived.UsageError, match="holds 1023 bytes of text; at least 1024 are needed"):
        fived.text.load(str(tmp_path / "short"))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gemm(dtype):
    import fived

    a = np.random.default_rng(0).normal(size=(5, 7)).astype(dtype)
    b = np.random.default_rng(1).normal(size=(7, 3)).astype(dtype)
    tolerance = 10 * np.finfo(dtype).eps
    assert np.allclose(fived.blas.gemm(a, b), a @ b, atol=tolerance)
    again = fived.blas.gemm(a.T.copy(), b.T.copy(), transpose_a=True, transpose_b=True)
    assert np.allclose(again, a @ b, atol=tolerance)
    assert fived.blas.gemm(a, b).dtype == dtype
    with pytest.raises(ValueError, match=r"gemm: \[5, 7\] times \[5, 7\]"):
        fived.blas.gemm(a, a)


def test_arrays_are_never_copied_behind_the_callers_back():
    """Arrays that would need a copy are refused: a result written into a copy would be lost."""
    import fived
    from mpi4py import MPI

    comm = fived.mpi.Communicator(MPI.COMM_SELF)
    with pytest.raises(TypeError):
        fived.collectives.ring_all_reduce(comm, np.zeros(4, np.int32))
    with pytest.raises(TypeError):
        fived.collectives.ring_all_reduce(comm, np.zeros((4, 4))[:, ::2])
    fixed = np.zeros(4)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="not writeable"):
        fived.collectives.ring_all_reduce(comm, fixed)


def test_record():
    import fived

    assert fived.record.median([3.0, 1.0, 2.0]) == 2
    assert fived.record.peak_memory_bytes() > 1e6


@pytest.mark.skipif(sys.platform != "linux", reason="ldd")
@pytest.mark.parametrize(
    "program", ["dp_libtorch", "pp_libtorch", "tp_libtorch", "sp_libtorch", "ep_libtorch"]
)
def test_there_is_no_python_in_the_programs_on_libtorch(program: str) -> None:
    libraries = run(["ldd", str(need_binary(program))]).stdout
    assert "libtorch_cpu" in libraries
    assert "libpython" not in libraries
    assert "libtorch_python" not in libraries


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="a LibTorch with CUDA is found beside its toolkit only"
)
def test_a_libtorch_without_python_gives_the_binaries(tmp_path: Path) -> None:
    """LibTorch's zip has no libtorch_python.so; here the wheel's folder without that file stands for it."""
    wheel, named = Path(torch.__file__).parent, tmp_path / "libtorch"
    (named / "lib").mkdir(parents=True)
    for folder in ("include", "share"):
        (named / folder).symlink_to(wheel / folder)
    for file in (wheel / "lib").iterdir():
        if "torch_python" not in file.name:
            (named / "lib" / file.name).symlink_to(file)
    configure = ["cmake", "-G", "Ninja", "-S", ROOT, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={named}"]
    done = subprocess.run(configure, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("No libtorch_python.so in") == 1
    targets = (tmp_path / "build/build.ninja").read_text()
    for name in ("dp_libtorch", "ep_libtorch"):
        assert f"bin/{name}:" in targets
        assert f"python/{name}." not in targets
    assert "python/fived." in targets
