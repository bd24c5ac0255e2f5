"""ep_mpi on 1 to 4 ranks against common/models/moe.py under autograd; bytes, loads, the binary, bad input."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from mpi.ep_mpi_inputs import all_to_the_first, drawn
from mpi.launch import mpirun, need_binary, need_module, refused_by, run_worker

from common.comm import sizes_of
from common.models.configs import TransformerConfig
from common.models.moe import MoE
from common.models.transformer import initialise

# width, width of an expert, experts, experts a token: 7 experts are uneven on 2, 3 and 4 ranks, 4 on 3
MIXTRAL = {"mlp": "swiglu", "router": "renormalised", "dtype": "float64"}
SWITCH = {"mlp": "gelu", "router": "softmax", "dtype": "float64"}
CASES = [
    *(
        {"shape": shape, "tokens": (5, 7, 3, 6), "steps": 2, "optimizer": optimizer, **kind}
        for (kind, shape), optimizer in itertools.product(
            [(MIXTRAL, (10, 9, 7, 2)), (SWITCH, (12, 5, 7, 1)), (SWITCH, (8, 9, 4, 3))], ["sgd", "adamw"]
        )
    ),
    # all rows to the first experts: the other ranks get none
    {
        "shape": (8, 6, 7, 1),
        "tokens": (5, 2, 4, 1),
        "steps": 2,
        "optimizer": "adamw",
        **SWITCH,
        "collapsed": True,
    },
    {
        "shape": (8, 6, 7, 2),
        "tokens": (5, 2, 4, 1),
        "steps": 1,
        "optimizer": "sgd",
        **MIXTRAL,
        "collapsed": True,
    },
    # ranks without a token; one token in all
    {"shape": (8, 6, 7, 2), "tokens": (0, 4, 0, 3), "steps": 2, "optimizer": "sgd", **MIXTRAL},
    {"shape": (8, 6, 4, 4), "tokens": (0, 1, 0, 0), "steps": 1, "optimizer": "sgd", **SWITCH},
    {
        "shape": (16, 12, 7, 2),
        "tokens": (9, 8, 9, 8),
        "steps": 1,
        "optimizer": "sgd",
        **MIXTRAL,
        "dtype": "float32",
    },
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run one mpirun for all numbers of ranks; return {ranks: (results of the cases, errors)}."""
    need_module("ep_mpi")
    folder = tmp_path_factory.mktemp("ep_mpi")
    found = run_worker(4, "ep_mpi_worker.py", folder, json.dumps(CASES))
    return {int(size): results for size, results in found.items()}


def reference(shape, tokens, steps, optimizer, mlp, router, dtype, collapsed=False):
    """Train the same steps with common/models/moe.py on one device, all tokens in one sample."""
    width, mlp_width, experts, chosen = shape
    c = TransformerConfig(
        1, width, 1, 1, mlp_width, 8, mlp=mlp, bias=mlp == "gelu", experts=experts, experts_per_token=chosen
    )
    moe = MoE(replace(c, router=router)).to(getattr(torch, dtype))
    initialise(moe, c, 3, prefix="layers.0.mlp.")
    if collapsed:
        weights = all_to_the_first({name: p.detach().numpy() for name, p in moe.named_parameters()})
        moe.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()})
    moe.double()
    routings = []
    moe.observe = routings.append
    update = (
        torch.optim.SGD(moe.parameters(), lr=0.1)
        if optimizer == "sgd"
        else torch.optim.AdamW(moe.parameters(), 1e-3, eps=1e-5)
    )
    found = {"losses": [], "norms": []}
    for step in range(steps):
        x, target = (
            torch.from_numpy(a).double()[None] for a in drawn(sum(tokens), width, step, dtype, collapsed)
        )
        x.requires_grad_()
        update.zero_grad()
        loss = (moe(x) - target).square().sum() / 2 / sum(tokens)
        loss.backward()
        found["losses"].append(loss.item())
        found["norms"].append(math.sqrt(sum(p.grad.square().sum().item() for p in moe.parameters())))
        gradients = {name: p.grad.numpy().copy() for name, p in moe.named_parameters()}
        update.step()
    return found | {
        "dx": x.grad[0].numpy(),
        "choices": routings[-1].experts_BSK[0].tolist(),
        "gradients": gradients,
        "weights": {name: p.detach().numpy() for name, p in moe.named_parameters()},
    }


@pytest.fixture(scope="module")
def expected():
    """Return the reference of every case."""
    return [reference(**case) for case in CASES]


def apart(a, b, scale=None):
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    return abs(a - b).max() / (scale or abs(a).max() or 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_training_is_that_of_the_plain_mixture_under_autograd(results, expected, ranks):
    for case, plain, ours in zip(CASES, expected, results[ranks][0], strict=True):
        tolerance = 1e-12 if case["dtype"] == "float64" else 1e-5
        assert list(itertools.chain(*ours["choices"])) == plain["choices"]
        for what in ("losses", "norms", "dx"):
            assert apart(plain[what], ours[what]) < tolerance, (case, what)
        for what in ("gradients", "weights"):
            assert plain[what].keys() == ours[what].keys()
            largest = max(abs(values).max() for values in plain[what].values())
            for name, values in plain[what].items():
                # zero up to rounding, as the router's gradient where the one weight is 1: on the layer's scale
                zero = abs(values).max() < 1e-13 * largest
                assert apart(values, ours[what][name], largest if zero else None) < tolerance, (case, name)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_bytes_are_those_of_the_tokens_choices(results, expected, ranks):
    for case, plain, ours in zip(CASES, expected, results[ranks][0], strict=True):
        width, _, experts, _ = case["shape"]
        sizes = sizes_of(experts, ranks)
        home = [rank for rank, size in enumerate(sizes) for _ in range(size)]
        assert [home.index(rank) for rank in range(ranks)] == [begin for begin, _ in ours["experts"]]
        sent, received = [0] * ranks, [0] * ranks
        tokens = [*case["tokens"][: ranks - 1], sum(case["tokens"][ranks - 1 :])]
        ranks_of_tokens = [rank for rank, count in enumerate(tokens) for _ in range(count)]
        for rank, choices in zip(ranks_of_tokens, plain["choices"], strict=True):
            for expert in choices:
                sent[rank] += home[expert] != rank
                received[home[expert]] += home[expert] != rank
        size = 8 if case["dtype"] == "float64" else 4
        rows_and_counts = [
            2 * (s + r) * width * size + 8 * (experts - e)
            for s, r, e in zip(sent, received, sizes, strict=True)
        ]
        router = [all - part for all, part in zip(ours["bytes"], rows_and_counts, strict=True)]
        assert sum(router) == 2 * (ranks - 1) * experts * width * size
        assert max(router) - min(router) <= 2 * size


def test_experts_and_ranks_without_rows(results):
    """Collapsed cases leave the experts of some ranks without a row, and their gradients are exactly 0."""
    for case, ours in zip(CASES, results[3][0], strict=True):
        if case.get("collapsed"):
            assert set(itertools.chain(*itertools.chain(*ours["choices"]))) == set(range(case["shape"][3]))
            for name, gradient in ours["gradients"].items():
                if name != "router.weight":
                    assert not np.any(gradient[case["shape"][3] :]), name
                    assert np.any(gradient[0]), name


def test_what_does_not_fit_is_refused(results):
    for ranks, (_, said) in results.items():
        few, flat, single, backward, none = said
        if ranks > 1:
            most = f"{ranks - 1} experts; at most {ranks - 1} would do"
            assert few == f"ValueError: {ranks} ranks are more than the {most}"
        needed = "needed is float64 (tokens, 8) in C order"
        assert flat == f"ValueError: x is float64 (3, 7); {needed}"
        assert single == f"ValueError: x is float32 (3, 8); {needed}"
        assert backward == "ValueError: backward follows a forward, once; there was none"
        assert none == "ValueError: no weights for router.weight"


def test_weights_are_set_and_bad_ones_refused():
    need_module("ep_mpi")
    import ep_mpi

    layer = ep_mpi.Layer(8, 6, 3, mlp="gelu")
    weights = {name: w + 1 for name, w in layer.weights().items()}
    layer.set_weights(weights)
    assert all(np.array_equal(w, weights[name]) for name, w in layer.weights().items())
    with pytest.raises(ValueError, match=r"experts.up_proj.weight is \(3, 8, 6\); needed is \(3, 6, 8\)"):
        layer.set_weights(weights | {"experts.up_proj.weight": np.ones((3, 8, 6))})
    with pytest.raises(ValueError, match="the layer has 5 parameters; given are 6"):
        layer.set_weights(weights | {"gate": np.ones(3)})
    with pytest.raises(ValueError, match="experts 3, experts_per_token 4"):
        ep_mpi.Layer(8, 6, 3, 4)
    with pytest.raises(ValueError, match="mlp is relu; it is swiglu or gelu"):
        ep_mpi.Layer(8, 6, 3, mlp="relu")
    with pytest.raises(ValueError, match="router is sigmoid; it is renormalised or softmax"):
        ep_mpi.Layer(8, 6, 3, router="sigmoid")
    with pytest.raises(ValueError, match="dtype is int8; it is float64 or float32"):
        ep_mpi.Layer(8, 6, 3, dtype="int8")


def test_a_sample_s_tokens_may_have_two_dimensions():
    need_module("ep_mpi")
    import ep_mpi

    layer, x = ep_mpi.Layer(8, 6, 3), np.random.default_rng(0).standard_normal((2, 5, 8))
    y = layer.forward(x)
    assert y.shape == x.shape
    np.testing.assert_allclose(layer.forward(x.reshape(10, 8)), y.reshape(10, 8), rtol=1e-12, atol=1e-13)


def test_binary_proves_itself_and_writes_records(tmp_path):
    file = tmp_path / "records.json"
    sizes = ["--width", "24", "--mlp-width", "20", "--experts", "5", "--tokens", "31"]
    done = mpirun(3, need_binary("ep_mpi"), *sizes, "--steps", "2", "--json", file)
    assert done.returncode == 0, done.stderr
    assert "proved: training on 3 rank(s) equals training on one, bytes counted = formula." in done.stdout
    assert all(
        kind in done.stdout for kind in ("mixtral, sgd", "mixtral, adamw", "switch, sgd", "switch, adamw")
    )
    (r,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert (r["strategy"], r["implementation"], r["ranks"], r["equal"]) == ("ep", "ep_mpi", 3, True)
    assert r["parameters"] == 5 * (24 + 3 * 24 * 20)
    assert r["flop_per_step"] == 6 * 31 * 24 * (2 * 3 * 20 + 5)
    assert r["bytes_counted"] == r["bytes_formula"] > 0
    assert 0 < r["largest_difference"] < 1e-12
    assert r["slowest_over_mean_rows"] > 1
    assert len(r["step_seconds"]) == 2


def test_balanced_routing_loads_ranks_alike(tmp_path):
    file = tmp_path / "records.json"
    arguments = ["--balanced", "--experts", "4", "--tokens", "32", "--width", "8", "--mlp-width", "8"]
    done = mpirun(2, need_binary("ep_mpi"), *arguments, "--steps", "1", "--json", file)
    assert done.returncode == 0, done.stderr
    (r,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert (r["implementation"], r["slowest_over_mean_rows"]) == ("ep_mpi-balanced", 1)
    # each rank has 16 tokens, sends every second row, and receives as many
    assert r["bytes_counted"] == 2 * (16 + 16) * 8 * 8 + 8 * 2 + 2 * 4 * 8 * 8 / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--experts-per-token", "8"],
            "--experts-per-token 8: a token cannot choose that many of 7 experts; give 1 to 7",
        ),
        (["--json", "/no/such/folder/record.json"], "cannot write to /no/such/folder/record.json"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    assert refused_by("ep_mpi", *arguments) == message


def test_more_ranks_than_experts():
    done = mpirun(3, need_binary("ep_mpi"), "--experts", "2")
    assert done.returncode == 2
    message = "ep_mpi: --experts 2 is too few for 3 ranks; use at most 2 ranks, or at least --experts 3"
    assert done.stderr.count(message) == 1
