"""dp_mpi on 1 to 4 ranks against plain autograd on the whole batch, and the binary's exit codes."""

import itertools
import json
import math
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mpi.launch import mpirun, need_binary, need_module, refused_by, run, run_worker

from common.benchmarks.measures import problem
from common.data.text import load_text, mlp_batch, rank_slice
from common.models.mlp import MLP

SIZES, STEPS = [32, 24, 20, 256], 3
# 7 samples are uneven on 2, 3 and 4 ranks; in two micro-batches a rank with one sample has an empty one.
# Buckets of 1 KB are many and cross the layers' borders; of 1 MB there is one.
PARAMETERS = sum(o * (i + 1) for i, o in itertools.pairwise(SIZES))
DENSE = [
    {
        "sizes": SIZES, "batch": batch, "steps": STEPS, "micro_batches": micro_batches,
        "optimizer": optimizer, "reduction": reduction, "bucket_mb": bucket_mb, "zero": zero,
    }
    for optimizer, micro_batches, reduction, batch, bucket_mb, zero in [
        *itertools.product(["sgd", "adamw"], [1, 2], ["overlapped", "ring"], [7], [0.001], [0, 1]),
        ("sgd", 1, "overlapped", 2, 1.0, 0),  # less samples than ranks
        ("adamw", 1, "overlapped", 2, 1.0, 1),
        ("adamw", 3, "overlapped", 24, 1.0, 0),
    ]
]  # fmt: skip
SPARSE = [
    {
        "sizes": SIZES, "batch": batch, "steps": STEPS, "micro_batches": 2, "optimizer": optimizer,
        "reduction": reduction, "zero": zero, "compress_keep": keep, "feedback": feedback,
    }
    for optimizer, reduction, batch, zero, keep, feedback in [
        *itertools.product(["sgd", "adamw"], ["overlapped", "ring"], [7], [0], [0.05], [True]),
        ("sgd", "overlapped", 7, 0, 0.05, False),
        ("sgd", "overlapped", 2, 0, 1e-9, True),  # one number
        ("adamw", "overlapped", 7, 1, 0.05, True),
        ("adamw", "ring", 7, 1, 0.3, True),
        ("sgd", "overlapped", 7, 0, 1.0, True),  # everything
        ("adamw", "ring", 7, 0, 1.0, True),
    ]
]  # fmt: skip
CASES = DENSE + SPARSE


def samples(text, step, batch, lo, hi):
    """Return x and y, with the columns of x scaled apart.

    All bytes share their highest bit, so without the scales top-k would choose among equal gradients by
    rounding.
    """
    x, y = mlp_batch(text, 3, step, batch, SIZES[0] // 8, lo, hi, dtype=torch.float64)
    return x * (1 + torch.arange(1, SIZES[0] + 1) / 64), y


def make_optimizer(name, parameters):
    return torch.optim.SGD(parameters, lr=0.1) if name == "sgd" else torch.optim.AdamW(parameters, lr=1e-3)


def reference(batch, optimizer):
    """Train on one device; return losses and norms per step, the last gradients, and the final weights."""
    model = MLP(SIZES, seed=3, dtype=torch.float64)
    text = load_text(None).train
    update = make_optimizer(optimizer, model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        x, y = samples(text, step, batch, 0, batch)
        loss = F.cross_entropy(model(x), y)
        update.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters())))
        gradients = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
        update.step()
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def simulate(ranks, sizes, batch, steps, micro_batches, optimizer, compress_keep, feedback, **_):
    """Simulate top-k on one process: ranks in turn, each with its error memory, and torch's optimizers."""
    import dp_mpi

    model, text = dp_mpi.MLP(sizes, seed=3), load_text(None).train
    parameters = {name: torch.nn.Parameter(torch.from_numpy(w)) for name, w in model.weights().items()}
    update = make_optimizer(optimizer, parameters.values())
    memories = [0.0] * ranks
    losses, norms = [], []
    for step in range(steps):
        loss, total = 0.0, 0.0
        for rank in range(ranks):
            lo, hi = rank_slice(batch, rank, ranks)
            x, y = samples(text, step, batch, lo, hi)
            loss += model.loss_and_gradients(x.numpy(), y.to(torch.uint8).numpy(), batch, micro_batches)
            flat = np.concatenate([g.ravel() for g in model.gradients().values()])
            memory = flat + memories[rank] * feedback
            largest = np.argsort(-np.abs(memory), kind="stable")[: math.ceil(compress_keep * flat.size)]
            sent = np.zeros_like(memory)
            sent[largest] = memory[largest]
            memories[rank] = memory - sent
            total = total + sent
        losses.append(loss)
        norms.append(np.linalg.norm(total))
        ends = np.cumsum([p.numel() for p in parameters.values()])
        for p, g in zip(parameters.values(), np.split(total, ends[:-1]), strict=True):
            p.grad = torch.from_numpy(g).view_as(p)
        gradients = {name: p.grad.numpy().copy() for name, p in parameters.items()}
        update.step()
        model.set_weights({name: p.detach().numpy() for name, p in parameters.items()})
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": model.weights()}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run one mpirun for all numbers of ranks; return {ranks: the worker's results}."""
    need_module("dp_mpi")
    return run_worker(4, "dp_mpi_worker.py", tmp_path_factory.mktemp("dp_mpi"), json.dumps(CASES))


@pytest.fixture(params=[1, 2, 3, 4], ids="{0} ranks".format)
def results(request, found):
    """Return (ranks, the worker's results)."""
    return request.param, found[str(request.param)]


@pytest.fixture(scope="module")
def whole():
    """Return the reference of each batch and optimizer."""
    return {key: reference(*key) for key in {(case["batch"], case["optimizer"]) for case in CASES}}


def relative(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    return np.max(np.abs(a - b)) / (np.max(np.abs(a)) or 1)


def test_equals_autograd_on_the_whole_batch_or_the_simulation_of_what_is_sent(results, whole):
    for case, ours in zip(CASES, results[1], strict=True):
        if case.get("compress_keep", 1) < 1:
            expected = simulate(results[0], **case)
        else:
            expected = whole[case["batch"], case["optimizer"]]
        assert relative(expected["losses"], ours["losses"]) < 1e-12, case
        assert relative(expected["norms"], ours["norms"]) < 1e-12, case
        for what in ("gradients", "weights"):
            assert expected[what].keys() == ours[what].keys()
            for name, values in expected[what].items():
                assert relative(values, ours[what][name]) < 1e-10, (case, what, name)


def test_ranks_hold_the_same_to_the_last_bit(results):
    assert [ours["apart"] for ours in results[1]] == [0.0] * len(CASES)


def test_sending_everything_is_not_compressing(results):
    ranks, outcomes = results

    def weights(**options):
        found = (r for case, r in zip(CASES, outcomes, strict=True) if options.items() <= case.items())
        return next(found)["weights"]

    if ranks <= 2:  # a sum of three numbers depends on their order
        dense = weights(optimizer="sgd", reduction="overlapped", micro_batches=2, zero=0)
        assert weights(optimizer="sgd", compress_keep=1.0) == dense


def test_bytes_sent_are_those_of_the_ring(results):
    ranks, outcomes = results
    for case, ours in zip(CASES, outcomes, strict=True):
        whole = PARAMETERS * 8
        if "compress_keep" not in case:
            assert sum(ours["bytes"]) == 2 * (ranks - 1) * whole
            assert max(ours["bytes"]) - min(ours["bytes"]) <= 2 * 8
        else:
            lists = ranks * (ranks - 1) * math.ceil(case["compress_keep"] * PARAMETERS) * (4 + 8)
            assert sum(ours["bytes"]) == lists + case["zero"] * (ranks - 1) * whole


def test_zero_shares_the_state_of_adamw(results):
    ranks, outcomes = results
    for case, ours in zip(CASES, outcomes, strict=True):
        state = 0 if case["optimizer"] == "sgd" else 2 * 8 * PARAMETERS
        if case["zero"]:
            assert sum(ours["state"]) == state
            assert max(ours["state"]) - min(ours["state"]) <= 2 * 8
        else:
            assert ours["state"] == [state] * ranks


def test_binary_proves_itself_and_writes_records(tmp_path):
    file = tmp_path / "records.json"
    done = mpirun(3, need_binary("dp_mpi"), "--batch", "10", "--steps", "2", "--hidden", "40", "--json", file)
    assert done.returncode == 0, done.stderr
    assert "proved: training on 3 rank(s) equals training on one." in done.stdout
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert not any(map(problem, records))
    parameters = sum(o * (i + 1) for i, o in itertools.pairwise([128, 40, 40, 256]))
    sent = {
        "dp_mpi": 2 * 2 / 3 * 8 * parameters,
        "dp_mpi-zero1": 2 * 2 / 3 * 8 * parameters,
        "dp_mpi-topk": 2 * 12 * math.ceil(0.01 * parameters),
    }
    assert [r["implementation"] for r in records] == list(sent)
    # the simulation of top-k adds in the same order, one device on the whole batch does not
    assert records[0]["differences"] != records[2]["differences"]
    for r in records:
        assert (r["ranks"], r["language"], r["tokens_per_step"]) == (3, "cpp-mpi", 10)
        assert r["parameters"] == parameters
        assert r["bytes_counted"] == r["bytes_formula"] == pytest.approx(sent[r["implementation"]], abs=16)
        share = 3 if r["implementation"] == "dp_mpi-zero1" else 1
        assert r["optimizer_state_bytes"] == pytest.approx(16 * parameters / share, abs=16)
        assert r["equal"] is True
        assert r["largest_difference"] == max(r["differences"].values()) < 1e-12
        assert list(r["differences"]) == ["adamw", "sgd"]
        assert len(r["step_seconds"]) == 2


def test_benchmark_writes_what_it_timed(tmp_path):
    record = tmp_path / "record.json"
    sizes = ["--batch", "8", "--hidden", "32", "--steps", "3", "--scaling", "weak", "--versions", "zero1"]
    assert mpirun(2, need_binary("dp_mpi"), "--benchmark", *sizes, "--json", record).returncode == 0
    values = json.loads(record.read_text())
    assert not problem(values)
    assert (values["implementation"], values["scaling"], values["equal"]) == ("dp_mpi-zero1", "weak", None)
    assert values["tokens_per_step"] == 16
    assert min(values["step_seconds"]) > 0
    assert values["peak_memory_bytes"] > 1e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float16"], "--dtype float16: choose one of float64, float32"),
        (["--data", "/no/such/text"], "no such file or folder: /no/such/text (--data takes any text)"),
        (["--data", "/dev/zero"], "no such file or folder: /dev/zero (--data takes any text)"),
        (["--steps", "none"], "--steps none: give a number from 1 to 1000000000"),
        (["--steps=0"], "--steps 0: give a number from 1 to 1000000000"),
        (["--k", "0"], "--k 0: give a number from 1e-09 to 1"),
        (["--k", "1.5"], "--k 1.5: give a number from 1e-09 to 1"),
        (["--versions", "zero3"], "--versions zero3: choose one of all, all-reduce, zero1, topk"),
        (["--stepz", "3"], "unknown option --stepz; --help lists them"),
        (["--batch"], "--batch needs a value"),
        (["--context", "99999999"], "--context 99999999 is longer than the text; at most "),
        (["--json", "/no/such/folder/record.json"], "cannot write to /no/such/folder/record.json"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    assert refused_by("dp_mpi", *arguments).startswith(message)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_help_that_cannot_be_written():
    done = run(["sh", "-c", '"$0" --help > /dev/full', str(need_binary("dp_mpi"))])
    assert done.returncode == 2
    assert done.stderr == "dp_mpi: the output cannot be written: No space left on device\n"


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
    with pytest.raises(ValueError, match="zero is 3; it is 0 or 1"):
        dp_mpi.MLP([8, 4], zero=3)
    for alone in ({"zero": 1}, {"compress_keep": 0.1}):
        with pytest.raises(ValueError, match="zero and compress_keep need a comm"):
            dp_mpi.MLP([8, 4], **alone)
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


NOT_NUMBERS = """
import dp_mpi, numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
for share in (0.0, -1.0, 1.5, float("nan")):
    try:
        dp_mpi.MLP([8, 4], comm=world, compress_keep=share)
    except ValueError as error:
        assert "it must be above 0 and at most 1" in str(error), error
    else:
        raise AssertionError(f"{share} was taken")
model = dp_mpi.MLP([8, 4], comm=world, compress_keep=0.1)
x = np.full((2, 8), np.nan if world.rank == 1 else 1.0)
model.loss_and_gradients(x, np.zeros(2, np.uint8), 4)
assert np.isnan(model.gradient_norm())
"""


def test_what_is_no_number_reaches_every_rank_and_no_share_of_that_kind_is_taken():
    need_module("dp_mpi")
    done = mpirun(2, sys.executable, "-m", "mpi4py", "-c", NOT_NUMBERS)
    assert done.returncode == 0, done.stderr
