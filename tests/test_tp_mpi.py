"""tp_mpi on 1 to 4 ranks against the plain Transformer's layer under autograd; bytes, memory, bad input."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from mpi.launch import mpirun, need_binary, need_module, refused_by, run_worker

from common.models.transformer import Layer, TransformerConfig, initialise

STEPS = 3
# width, heads, width of the MLP: even on 1, 2 and 4 ranks; uneven on 2, 3 and 4
SHAPES, TOKENS = [(24, 4, 32), (20, 5, 31)], (2, 7)
CASES = [
    {"shape": shape, "tokens": TOKENS, "steps": STEPS, "optimizer": o, "reduction": r, "dtype": "float64"}
    for shape, o, r in itertools.product(SHAPES, ["sgd", "adamw"], ["mpi", "ring"])
] + [  # one token; a head of width 1 and one column of the MLP on each of 4 ranks
    {"shape": shape, "tokens": tokens, "steps": 1, "optimizer": "sgd", "reduction": "ring", "dtype": dtype}
    for shape, tokens in ((SHAPES[0], (1, 1)), ((4, 4, 4), TOKENS))
    for dtype in ("float64", "float32")
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run one mpirun for all numbers of ranks; return {ranks: the worker's results}."""
    need_module("tp_mpi")
    return run_worker(4, "tp_mpi_worker.py", tmp_path_factory.mktemp("tp_mpi"), json.dumps(CASES))


@pytest.fixture(params=[1, 2, 3, 4], ids="{0} ranks".format)
def results(request, found):
    """Return (ranks, the worker's results)."""
    return request.param, found[str(request.param)]


def reference(shape, tokens, steps, optimizer, dtype, **_):
    """Train the same steps with common/models/transformer.py's layer on one device."""
    width, heads, mlp_width = shape
    config = TransformerConfig(1, width, heads, heads, mlp_width, tokens[1])
    layer = Layer(config).to(getattr(torch, dtype))
    initialise(layer, config, 3, prefix="layers.0.")
    layer.double()
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, 1e-3, eps=1e-5),
    }
    update, draw = make[optimizer](layer.parameters()), np.random.default_rng(11)
    losses, norms = [], []
    for _ in range(steps):
        x, target = (
            torch.from_numpy(draw.standard_normal((*tokens, width)).astype(dtype)).double() for _ in range(2)
        )
        x.requires_grad_()
        update.zero_grad()
        loss = (layer(x, torch.arange(tokens[1])) - target).square().sum() / 2 / math.prod(tokens)
        loss.backward()
        losses.append(loss.item())
        norms.append(math.sqrt(sum(p.grad.square().sum().item() for p in layer.parameters())))
        gradients = {name: p.grad.numpy().copy() for name, p in layer.named_parameters()}
        update.step()
    weights = {name: p.detach().numpy() for name, p in layer.named_parameters()}
    return {
        "losses": losses,
        "norms": norms,
        "dx": x.grad.numpy(),
        "gradients": gradients,
        "weights": weights,
    }


@pytest.fixture(scope="module")
def expected():
    """Return the reference of every case."""
    return [reference(**case) for case in CASES]


def relative(expected, found, scale=None):
    expected, found = np.asarray(expected), np.asarray(found)
    assert expected.shape == found.shape
    return abs(found - expected).max() / (scale or abs(expected).max())


def test_training_is_that_of_the_plain_layer_under_autograd(results, expected):
    for case, plain, ours in zip(CASES, expected, results[1]["cases"], strict=True):
        tolerance = 1e-12 if case["dtype"] == "float64" else 1e-5
        for what in ("losses", "norms", "dx"):
            assert relative(plain[what], ours[what]) < tolerance, (case, what)
        for what in ("gradients", "weights"):
            assert plain[what].keys() == ours[what].keys()
            largest = max(abs(v).max() for v in plain[what].values())
            for name, values in plain[what].items():
                # zero up to rounding, as the gradient of k's bias: on the scale of the layer
                zero = abs(values).max() < 1e-13 * largest
                assert relative(values, ours[what][name], largest if zero else None) < tolerance, (case, name)


def test_bytes_are_those_of_four_all_reduces(results):
    ranks, found = results
    for case, ours in zip(CASES, found["cases"], strict=True):
        numbers = math.prod(case["tokens"]) * case["shape"][0]
        assert [sent for sent, _ in ours["bytes"]] == [formula for _, formula in ours["bytes"]]
        size = 8 if case["dtype"] == "float64" else 4
        assert sum(sent for sent, _ in ours["bytes"]) == 4 * 2 * (ranks - 1) * numbers * size


def test_matrices_are_split(results):
    ranks, found = results
    width, _, mlp_width = SHAPES[0]
    split = 4 * width * width + 3 * width + 2 * width * mlp_width + mlp_width
    assert sum(found["cases"][0]["numbers"]) == split + ranks * 6 * width


def test_what_does_not_fit_is_refused(results):
    ranks, found = results
    few, flat, single, backward, none = found["refused"]
    if ranks in (2, 3):
        assert few == (
            f"ValueError: {ranks - 1} heads and 32 columns of the MLP cannot be split over {ranks} ranks; "
            f"use at most {ranks - 1}"
        )
    needed = "needed is float64 (samples, sequence, 16) in C order"
    assert flat == f"ValueError: x is float64 (2, 16); {needed}"
    assert single == f"ValueError: x is float32 (1, 2, 16); {needed}"
    assert backward == "ValueError: backward follows a forward, once; there was none"
    assert none == "ValueError: no weights for attention_norm.weight"


def test_weights_are_set_and_bad_ones_refused():
    need_module("tp_mpi")
    import tp_mpi

    layer = tp_mpi.Layer(8, 2, 12)
    weights = {name: w + 1 for name, w in layer.weights().items()}
    layer.set_weights(weights)
    assert all(np.array_equal(w, weights[name]) for name, w in layer.weights().items())
    with pytest.raises(ValueError, match=r"mlp\.up_proj\.weight is \(8, 12\); needed is \(12, 8\)"):
        layer.set_weights(weights | {"mlp.up_proj.weight": np.ones((8, 12))})
    with pytest.raises(ValueError, match="the layer has 16 parameters; given are 17"):
        layer.set_weights(weights | {"gate": np.ones(3)})
    with pytest.raises(ValueError, match="heads that divide its width; given width 8, heads 3"):
        tp_mpi.Layer(8, 3, 12)
    with pytest.raises(ValueError, match="reduction is tree; it is mpi or ring"):
        tp_mpi.Layer(8, 2, 12, reduction="tree")
    with pytest.raises(ValueError, match="dtype is int8; it is float64 or float32"):
        tp_mpi.Layer(8, 2, 12, dtype="int8")


def test_binary_proves_itself_and_writes_records(tmp_path):
    file = tmp_path / "records.json"
    sizes = ["--width", "24", "--heads", "3", "--mlp-width", "40", "--batch", "2", "--sequence", "9"]
    done = mpirun(3, need_binary("tp_mpi"), *sizes, "--steps", "2", "--json", file)
    assert done.returncode == 0, done.stderr
    assert "proved: training on 3 rank(s) equals training on one, bytes counted = formula." in done.stdout
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["implementation"] for r in records] == ["tp_mpi", "tp_mpi-ring"]
    for r in records:
        assert (r["strategy"], r["ranks"], r["equal"], r["tokens_per_step"]) == ("tp", 3, True, 18)
        assert r["parameters"] == 4 * 24 * 24 + 2 * 24 * 40 + 9 * 24 + 40
        assert r["bytes_counted"] == r["bytes_formula"] == pytest.approx(4 * 2 * 2 / 3 * 18 * 24 * 8, abs=64)
        assert 0 < r["largest_difference"] < 1e-12
        assert len(r["step_seconds"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "10", "--heads", "4"], "--width 10 does not divide into 4 heads; 8 or 12 would"),
        (["--steps", "0"], "--steps 0: give a number from 1 to 1000000000"),
        (["--optimizer", "adam"], "--optimizer adam: choose one of both, sgd, adamw"),
        (["--json", "/no/such/folder/record.json"], "cannot write to /no/such/folder/record.json"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    assert refused_by("tp_mpi", *arguments) == message


def test_more_ranks_than_heads():
    done = mpirun(3, need_binary("tp_mpi"), "--width", "8", "--heads", "2")
    assert done.returncode == 2
    message = (
        "tp_mpi: --heads 2 --mlp-width 323 cannot be split over 3 ranks; use at most 2, or at least 3 of each"
    )
    assert done.stderr.count(message) == 1
