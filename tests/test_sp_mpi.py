"""sp_mpi on 1 to 4 ranks against torch's attention in float64; bytes, balance, the binary, bad input."""

import itertools
import json

import numpy as np
import pytest
import torch
from mpi.launch import mpirun, need_binary, need_module, refused_by, run_worker

# B, H, G, S, K. The first is even on 1, 2, 3 and 4 ranks in both orders; the second uneven everywhere; the third has
# ranks without a position; the last has several tiles, and on one rank tiles above the diagonal.
SHAPES = [(2, 4, 2, 48, 8), (1, 3, 1, 37, 5), (1, 2, 2, 3, 4), (1, 1, 1, 700, 16)]
FIRST = {"shape": SHAPES[0], "causal": True, "order": "contiguous", "dtype": "float64"}
CASES = [
    *(
        {"shape": shape, "causal": causal, "order": order, "dtype": "float64"}
        for shape, causal, order in itertools.product(SHAPES, [True, False], ["contiguous", "zigzag"])
    ),
    FIRST | {"order": "zigzag", "dtype": "float32"},
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run one mpirun for all numbers of ranks; return {ranks: the worker's results}."""
    need_module("sp_mpi")
    return run_worker(4, "sp_mpi_worker.py", tmp_path_factory.mktemp("sp_mpi"), json.dumps(CASES))


@pytest.fixture(params=[1, 2, 3, 4], ids="{0} ranks".format)
def results(request, found):
    """Return (ranks, the worker's results)."""
    return request.param, found[str(request.param)]


def reference(shape, causal, order, dtype):
    """Compute the attention on one device, by autograd on the full matrix of weights."""
    batch, heads, kv_heads, sequence, width = shape
    draw = np.random.default_rng(7)
    sizes = [(batch, h, sequence, width) for h in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.from_numpy(draw.standard_normal(s).astype(dtype)).double() for s in sizes)
    for x in (q, k, v):
        x.requires_grad_()
    keys, values = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    scores = q @ keys.transpose(-1, -2) / width**0.5
    if causal:
        later = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    out = scores.softmax(-1) @ values
    out.backward(dout)
    named = {"out": out, "logsumexp": scores.logsumexp(-1), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {name: x.detach().numpy() for name, x in named.items()}


@pytest.fixture(scope="module")
def expected():
    """Return the reference of every case."""
    return [reference(**case) for case in CASES]


def put_together(parts, positions, shape):
    whole = np.full(shape, np.nan)
    for part, mine in zip(parts, positions, strict=True):
        whole[:, :, mine] = np.reshape(part, (*shape[:2], len(mine), *shape[3:]))
    return whole


def test_parts_put_together_are_attention_on_one_device(results, expected):
    for case, plain, ours in zip(CASES, expected, results[1]["cases"], strict=True):
        for name, values in plain.items():
            found = put_together(ours["parts"][name], ours["positions"], values.shape)
            apart = abs(found - values).max() / abs(values).max()
            assert apart < (1e-12 if case["dtype"] == "float64" else 1e-5), (case, name, apart)


def test_bytes_sent_are_those_of_the_ring(results):
    """k and v visit all ranks but one, and so do their gradients: 3 (P-1) times k and v in all."""
    ranks, found = results
    for case, ours in zip(CASES, found["cases"], strict=True):
        batch, _, kv_heads, sequence, width = case["shape"]
        both = 2 * batch * kv_heads * sequence * width * (8 if case["dtype"] == "float64" else 4)
        assert ours["bytes"] == ours["formula"]
        assert [sum(b) for b in zip(*ours["bytes"], strict=True)] == [
            (ranks - 1) * both,
            2 * (ranks - 1) * both,
        ]


def test_positions_and_work(results):
    ranks, found = results
    for case, ours in zip(CASES, found["cases"], strict=True):
        sequence, pairs = case["shape"][3], ours["pairs"]
        assert sorted(itertools.chain(*ours["positions"])) == list(range(sequence))
        seen = [sum(p + 1 if case["causal"] else sequence for p in mine) for mine in ours["positions"]]
        assert pairs == seen
        if case["causal"] and case["order"] == "zigzag" and sequence % (2 * ranks) == 0:
            assert len(set(pairs)) == 1  # balanced to the last pair
    if ranks > 1:
        contiguous = found["cases"][CASES.index(FIRST)]
        assert max(contiguous["pairs"]) > 1.4 * sum(contiguous["pairs"]) / ranks


def test_parts_that_do_not_fit_are_refused(results):
    short, single, reversed_ = results[1]["refused"]
    needed = "this rank needs float64 (1, 2, 8, 4) in C order"
    assert short == f"ValueError: k is float64 (1, 2, 7, 4); {needed}"
    assert single == f"ValueError: k is float32 (1, 2, 8, 4); {needed}"
    assert reversed_ == f"ValueError: k is float64 (1, 2, 8, 4); {needed}"


def test_what_makes_no_attention_is_refused():
    need_module("sp_mpi")
    import sp_mpi

    with pytest.raises(ValueError, match="kv_heads that divide heads; given batch 1, heads 4, kv_heads 3"):
        sp_mpi.RingAttention(1, 4, 8, 4, kv_heads=3)
    with pytest.raises(ValueError, match="positive sizes"):
        sp_mpi.RingAttention(1, 4, 0, 4)
    with pytest.raises(ValueError, match="order is striped; it is contiguous or zigzag"):
        sp_mpi.RingAttention(1, 4, 8, 4, order="striped")
    with pytest.raises(ValueError, match="dtype is float16; it is float64 or float32"):
        sp_mpi.RingAttention(1, 4, 8, 4, dtype="float16")
    with pytest.raises(ValueError, match="no rank 2 of 2"):
        sp_mpi.positions(8, 2, 2)
    with pytest.raises(ValueError, match="backward follows forward; there was none"):
        sp_mpi.RingAttention(1, 1, 1, 1).backward(np.ones((1, 1, 1, 1)))


def test_numbers_far_from_zero_do_not_overflow():
    """Scores of about 1e4 do not overflow: without subtracting the largest score, e^s would be infinite."""
    need_module("sp_mpi")
    import sp_mpi

    draw = np.random.default_rng(0)
    q, k, v = (100 * draw.standard_normal((1, 1, 600, 8)) for _ in range(3))
    ours = sp_mpi.RingAttention(1, 1, 600, 8).forward(q, k, v)
    tensors = (torch.from_numpy(x) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True).numpy()
    assert abs(ours - expected).max() < 1e-10 * abs(expected).max()


def test_binary_proves_itself_and_writes_records(tmp_path):
    file = tmp_path / "records.json"
    done = mpirun(3, need_binary("sp_mpi"), "--sequence", "48", "--steps", "2", "--json", file)
    assert done.returncode == 0, done.stderr
    assert "proved: attention and its gradients on 3 rank(s) equal those on one" in done.stdout
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["implementation"] for r in records] == ["sp_mpi-contiguous", "sp_mpi-zigzag"]
    for r in records:
        assert (r["strategy"], r["ranks"], r["equal"], len(r["step_seconds"])) == ("sp", 3, True, 2)
        assert r["bytes_counted"] == r["bytes_formula"] > 0
        assert 0 < r["largest_difference"] < 1e-12
        assert r["flop_per_step"] == 14 * 16 * 2 * 4 * 48 * 49 / 2
    assert records[0]["slowest_over_mean_pairs"] > 1.4
    assert records[1]["slowest_over_mean_pairs"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-heads", "3"], "--kv-heads 3 does not divide --heads 4; give one of 1, 2, 4"),
        (["--sequence", "0"], "--sequence 0: give a number from 1 to 1000000000"),
        (["--dtype", "int8"], "--dtype int8: choose one of float64, float32"),
        (["--json", "/no/such/folder/record.json"], "cannot write to /no/such/folder/record.json"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    assert refused_by("sp_mpi", *arguments) == message
