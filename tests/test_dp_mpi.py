"""dp_mpi on 1 to 4 ranks against plain autograd on the whole batch, and the binary's exit codes."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mpi.launch import mpirun, need_binary, need_module, run, run_worker

from common.data.text import load_text, mlp_batch
from common.models.mlp import MLP

SIZES, STEPS = [32, 24, 20, 256], 3
# 7 samples are uneven on 2, 3 and 4 ranks; in two micro-batches a rank with one sample has an empty one.
# Buckets of 1 KB are many and cross the layers' borders; of 1 MB there is one.
CASES = [
    {
        "sizes": SIZES, "batch": batch, "steps": STEPS, "micro_batches": micro_batches,
        "optimizer": optimizer, "reduction": reduction, "bucket_mb": bucket_mb,
    }
    for optimizer, micro_batches, reduction, batch, bucket_mb in [
        *itertools.product(["sgd", "adamw"], [1, 2], ["overlapped", "ring"], [7], [0.001]),
        ("sgd", 1, "overlapped", 2, 1.0),  # less samples than ranks
        ("adamw", 3, "overlapped", 24, 1.0),
    ]
]  # fmt: skip


def reference(batch, optimizer):
    """Losses and norms of each step, the last gradients, and the weights after it, of one model."""
    model = MLP(SIZES, seed=3, dtype=torch.float64)
    text = load_text(None).train
    if optimizer == "sgd":
        update = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        update = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(STEPS):
        x, y = mlp_batch(text, 3, step, batch, SIZES[0] // 8, 0, batch, dtype=torch.float64)
        loss = F.cross_entropy(model(x), y)
        update.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters())))
        gradients = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
        update.step()
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


@pytest.fixture(scope="module", params=[1, 2, 3, 4], ids="{0} ranks".format)
def results(request, tmp_path_factory):
    """One mpirun for each number of ranks: (ranks, result of each case)."""
    need_module("dp_mpi")
    folder = tmp_path_factory.mktemp("dp_mpi")
    return request.param, run_worker(request.param, "dp_mpi_worker.py", folder, json.dumps(CASES))


def relative(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    return np.max(np.abs(a - b)) / np.max(np.abs(a))


def test_equals_autograd_on_the_whole_batch(results):
    for case, ours in zip(CASES, results[1], strict=True):
        expected = reference(case["batch"], case["optimizer"])
        assert relative(expected["losses"], ours["losses"]) < 1e-12, case
        assert relative(expected["norms"], ours["norms"]) < 1e-12, case
        for what in ("gradients", "weights"):
            assert expected[what].keys() == ours[what].keys()
            for name, values in expected[what].items():
                assert relative(values, ours[what][name]) < 1e-10, (case, what, name)


def test_ranks_hold_the_same_to_the_last_bit(results):
    assert [ours["apart"] for ours in results[1]] == [0.0] * len(CASES)


def test_bytes_sent_are_those_of_the_ring(results):
    ranks, outcomes = results
    parameters = sum(o * (i + 1) for i, o in itertools.pairwise(SIZES))
    for ours in outcomes:
        assert sum(ours["bytes"]) == 2 * (ranks - 1) * parameters * 8
        assert max(ours["bytes"]) - min(ours["bytes"]) <= 2 * 8


def test_binary_proves_itself_and_writes_a_record(tmp_path):
    record = tmp_path / "record.json"
    done = mpirun(3, need_binary("dp_mpi"), "--batch", "10", "--steps", "2", "--json", record)
    assert done.returncode == 0, done.stderr
    assert "Proved: training on 3 rank(s) equals training on one." in done.stdout
    (line,) = record.read_text().splitlines()
    values = json.loads(line)
    assert values["ranks"] == 3
    assert values["language"] == "cpp-mpi"
    assert values["tokens_per_step"] == 10
    assert values["parameters"] == sum(o * (i + 1) for i, o in itertools.pairwise([128, 256, 256, 256]))
    assert values["bytes_counted"] == values["bytes_formula"] > 0
    assert values["equal"] is True
    assert 0 < values["largest_difference"] < 1e-12
    assert len(values["step_seconds"]) == 2


def test_benchmark_writes_what_it_timed(tmp_path):
    record = tmp_path / "record.json"
    sizes = ["--batch", "8", "--hidden", "32", "--steps", "3", "--scaling", "weak"]
    assert mpirun(2, need_binary("dp_mpi"), "--benchmark", *sizes, "--json", record).returncode == 0
    values = json.loads(record.read_text())
    assert (values["tokens_per_step"], values["scaling"], values["equal"]) == (16, "weak", None)
    assert min(values["step_seconds"]) > 0
    assert values["peak_memory_bytes"] > 1e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float16"], "--dtype is float16; it is one of float64, float32"),
        (["--data", "/no/such/text"], "no such file or folder: /no/such/text (--data takes any text)"),
        (["--steps", "none"], "--steps is none; it is a number from 1 to 1000000000"),
        (["--steps=0"], "--steps is 0; it is a number from 1 to 1000000000"),
        (["--stepz", "3"], "unknown option --stepz; --help lists them"),
        (["--batch"], "--batch needs a value"),
        (["--context", "99999999"], "--context 99999999 is longer than the text; at most "),
        (["--json", "/no/such/folder/record.json"], "cannot write to /no/such/folder/record.json"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    done = run([str(need_binary("dp_mpi")), *arguments])
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"dp_mpi: {message}")
    assert done.stderr.count("\n") == 1


def test_empty_text(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    done = run([str(need_binary("dp_mpi")), "--data", str(tmp_path / "empty.txt")])
    assert done.returncode == 2
    assert "holds 0 bytes of text; at least 1024 are needed" in done.stderr


def test_batch_smaller_than_the_ranks():
    done = mpirun(3, need_binary("dp_mpi"), "--batch", "4")
    assert done.returncode == 2
    message = "dp_mpi: --batch 4 is too small for 3 ranks x 2 micro-batches; at least 6"
    assert done.stderr.count(message) == 1


def test_module_refuses_what_does_not_fit():
    need_module("dp_mpi")
    import dp_mpi

    with pytest.raises(ValueError, match="dtype is int8; it is float64 or float32"):
        dp_mpi.MLP([8, 4], dtype="int8")
    with pytest.raises(ValueError, match="reduction is tree"):
        dp_mpi.MLP([8, 4], reduction="tree")
    with pytest.raises(ValueError, match="two or more sizes"):
        dp_mpi.MLP([8])
    model = dp_mpi.MLP([8, 4])
    with pytest.raises(ValueError, match=r"takes \[B, 8\] and B targets; given \[2, 7\] and 2"):
        model.loss_and_gradients(np.zeros((2, 7)), np.zeros(2, np.uint8), 2)
    with pytest.raises(ValueError, match="target 4 of sample 1 is no class; there are 4"):
        model.loss_and_gradients(np.zeros((2, 8)), np.array([3, 4], np.uint8), 2)
    for wrong in (np.zeros(31), np.zeros((8, 4))):  # the second is the transposed one
        with pytest.raises(
            ValueError, match=r"layers.0.weight is 4 x 8; given are \d+ elements of another shape"
        ):
            model.set_weights({"layers.0.weight": wrong, "layers.0.bias": np.zeros(4)})
    for count, parts in ((0, 1), (2, 0)):
        with pytest.raises(
            ValueError, match=f"global_count is {count}, micro_batches {parts}; each must be at least 1"
        ):
            model.loss_and_gradients(np.zeros((2, 8)), np.zeros(2, np.uint8), count, parts)
    with pytest.raises(TypeError, match="where floats are needed"):
        model.loss_and_gradients(np.full((2, 8), "text"), np.zeros(2, np.uint8), 2)
    weights = model.weights()
    with pytest.raises(ValueError, match=r"the model has no parameter layers\.7\.bias"):
        model.set_weights(weights | {"layers.7.bias": np.zeros(4)})
    model.set_weights({name: w + 1 for name, w in weights.items()})
    assert all(np.array_equal(model.weights()[name], w + 1) for name, w in weights.items())
