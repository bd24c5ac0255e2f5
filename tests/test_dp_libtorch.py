"""dp_libtorch without Python: its proof, its losses against Python's, bad input; Zero1 as a Python module."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi.launch import mpirun, need_binary, need_module, run
from mpi.programs import losses
from small_models import UNEVEN_SAMPLES, Branches
from torch import Tensor, nn

from common.benchmarks.measures import problem
from common.data.text import lm_batch, load_text, mlp_batch
from common.errors import RankError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.models.mlp import MLP, sizes
from common.models.transformer import Transformer, config

SHAPES = {"all-reduce": "dp_libtorch", "ZeRO-1": "dp_libtorch-zero1"}


def printed(done: subprocess.CompletedProcess[str]) -> list[list[float]]:
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("loss of each step")]
    return [[float(word) for word in words[4:]] for words in lines]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gpt2_trains_as_in_python(ranks: int, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    arguments = ["--batch", "9", "--sequence", "12", "--steps", "2", "--json", record]
    done = mpirun(ranks, need_binary("dp_libtorch"), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"proved: training on {ranks} rank(s) equals training on one." in done.stdout
    text = load_text(None).train
    batches = [lm_batch(text, 0, step, 9, 12, 0, 9) for step in range(2)]
    for found, optimizer in zip(printed(done), ("sgd", "adamw"), strict=True):
        model = Transformer(config("gpt2-tiny"), 0, torch.float64)
        assert found == pytest.approx(losses(model, optimizer, batches), abs=1e-9)
    for line, name in zip(record.read_text().splitlines(), SHAPES.values(), strict=True):
        values = json.loads(line)
        assert not problem(values)
        assert (values["implementation"], values["language"]) == (name, "libtorch")
        assert (values["ranks"], values["tokens_per_step"], values["parameters"]) == (ranks, 9 * 12, 120576)
        assert values["bytes_counted"] == values["bytes_formula"]
        assert (values["bytes_counted"] > 0) == (ranks > 1)
        assert values["equal"] is True
        assert 0 < values["largest_difference"] < 1e-12
        assert len(values["step_seconds"]) == 2
        model = Transformer(config("gpt2-tiny"))
        assert values["flop_per_step"] == pytest.approx(9 * 12 * model.flops_per_token(12))


def test_mlp_trains_as_in_python_on_more_ranks() -> None:
    arguments = ["--model", "mlp", "--batch", "9", "--micro-batches", "1", "--hidden", "24", "--steps", "2"]
    done = mpirun(8, need_binary("dp_libtorch"), *arguments, "--bucket-mb", "0.001")
    assert done.returncode == 0, done.stdout + done.stderr
    text = load_text(None).train
    batches = [mlp_batch(text, 0, step, 9, 16, 0, 9, torch.float64) for step in range(2)]
    for found, optimizer in zip(printed(done), ("sgd", "adamw"), strict=True):
        assert found == pytest.approx(
            losses(MLP(sizes(16, 24, 3), 0, torch.float64), optimizer, batches), abs=1e-9
        )


def test_benchmark_writes_what_it_timed(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    arguments = [
        "--benchmark",
        "--model",
        "mlp",
        "--hidden",
        "32",
        "--steps",
        "3",
        "--zero",
        "1",
        "--json",
        record,
    ]
    assert mpirun(2, need_binary("dp_libtorch"), *arguments).returncode == 0
    values = json.loads(record.read_text())
    assert not problem(values)
    assert (values["tokens_per_step"], values["scaling"], values["equal"]) == (8, "weak", None)
    assert min(values["step_seconds"]) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "bert"], "--model bert: choose one of gpt2-tiny, gpt2-10m, mlp"),
        (["--zero", "2"], "--zero 2: choose one of both, 0, 1"),
        (["--sequence", "65"], "--sequence 65 is too long for gpt2-tiny; at most 64"),
        (["--batch", "1"], "--batch 1 is too small for 1 ranks x 2 micro-batches; at least 2"),
        (["--data", "/no/such/text"], "no such file or folder: /no/such/text (--data takes any text)"),
        (["--json", "/no/such/folder/record.json"], "cannot write to /no/such/folder/record.json"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    done = run([str(need_binary("dp_libtorch")), *arguments])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"dp_libtorch: {message}\n"


# Zero1 as a Python module


def zero_around(model: nn.Module, rt: Runtime, bucket_bytes: int = 24) -> Any:
    import dp_libtorch

    return dp_libtorch.Zero1([*model.parameters(), *model.buffers()], rt.world.pg, bucket_bytes)


def whole(
    flat: dict[str, Tensor | None], zero: Any, model: nn.Module, rt: Runtime
) -> dict[str, Tensor | None]:
    """Assemble each parameter from the runs of all ranks."""
    gathered: dict[str, Tensor | None] = {}
    for (name, p), lengths in zip(model.named_parameters(), zero.sizes(), strict=True):
        mine = flat[name]
        if mine is None:
            gathered[name] = None
            continue
        full = torch.zeros(p.numel(), dtype=mine.dtype)
        start = sum(lengths[: rt.rank])
        full[start : start + lengths[rt.rank]] = mine
        torch.distributed.all_reduce(full, group=rt.world.pg)
        gathered[name] = full.view(p.shape)
    return gathered


def branches(rt: Runtime, samples: list[float], set_to_none: bool) -> tuple[Any, ...]:
    """Train three steps of AdamW; return the last gradients, the weights, the norm and the state's size."""
    model = Branches()
    if rt.rank:
        for p in model.parameters():  # the broadcast must mend this
            p.data.fill_(rt.rank)
    zero = zero_around(model, rt)
    pieces = zero.pieces()
    optimizer = torch.optim.AdamW(pieces, lr=0.1)
    mine = [torch.full((1, 3), s, dtype=torch.float64) for s in samples][rt.rank :: rt.world_size]
    for _ in range(3):
        optimizer.zero_grad(set_to_none)
        with zero.no_sync(), zero.no_sync():
            for x in mine[:-1]:
                model(x).backward()
        for x in mine[-1:]:
            model(x).backward()
        zero.finish()
        assert all(p.grad is None for p in model.parameters())  # would be a partial sum
        norm = zero.gradient_norm()
        names = [name for name, _ in model.named_parameters()]
        gradients = whole(dict(zip(names, [p.grad for p in pieces], strict=True)), zero, model, rt)
        optimizer.step()
        zero.gather()
    state = sum(x.numel() for s in optimizer.state.values() for x in s.values() if x.dim())
    return gradients, {name: p.detach().clone() for name, p in model.named_parameters()}, norm, state


def cancelling(rt: Runtime) -> list[float]:
    """Return this rank's run of gradients that sum to 1 in rank order, and to 0 if the 1 is added earlier."""
    model = nn.Linear(6, 1, bias=False, dtype=torch.float64)
    zero = zero_around(model, rt)
    model(torch.full((1, 6), [1e16, -1e16, 1.0][rt.rank], dtype=torch.float64)).sum().backward()
    zero.finish()
    return [x for piece in zero.pieces() for x in piece.grad.tolist()]


def test_zero1_adds_in_the_order_of_the_ranks() -> None:
    """Zero1 adds in rank order. On gloo it uses an all-to-all: gloo's reduce-scatter sends twice as much."""
    need_module("dp_libtorch")
    assert spawn(cancelling, 3) == [[1.0, 1.0]] * 3


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("samples", UNEVEN_SAMPLES)
def test_zero1_equals_one_device(samples: list[float], set_to_none: bool) -> None:
    need_module("dp_libtorch")
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for s in samples:
            model(torch.full((1, 3), s, dtype=torch.float64)).backward()
        optimizer.step()
    used = [p.numel() for p in model.parameters() if p.grad is not None]
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()
    assert model.never.weight.grad is None
    found = spawn(branches, 3, samples, set_to_none)
    assert sum(state for *_, state in found) == 2 * sum(used)
    for gradients, weights, our_norm, _ in found:
        assert our_norm == pytest.approx(norm, rel=1e-12)
        for name, p in model.named_parameters():
            assert torch.allclose(weights[name], p, rtol=1e-12, atol=1e-13), name
            if p.grad is None:
                assert gradients[name] is None, name
            else:
                assert torch.allclose(gradients[name], p.grad, rtol=1e-12, atol=1e-13), name


def messages(rt: Runtime) -> tuple[list[Any], ...]:
    """Return the messages of two micro-batches; 5 parameters are padded to 6 on 3 ranks."""
    model = nn.Linear(4, 1)
    zero = zero_around(model, rt, 1000)
    zero.take_messages()
    with zero.no_sync():
        model(torch.ones(1, 4)).sum().backward()
    inside = zero.take_messages()
    model(torch.ones(1, 4)).sum().backward()
    zero.finish()
    backward = zero.take_messages()
    zero.gather()
    return inside, backward, zero.take_messages(), [p.numel() for p in zero.pieces()]


def test_zero1_sends_each_bucket_once_in_either_direction() -> None:
    need_module("dp_libtorch")
    for rank, (inside, backward, gather, lengths) in enumerate(spawn(messages, 3)):
        assert inside == []
        sent = [(op, n_bytes) for op, n_bytes, _ in backward]
        assert sent == [("reduce_scatter", 2 * 6 * 4), ("all_reduce", 2 * 2 * 2 * 4)]
        assert [(op, n_bytes) for op, n_bytes, _ in gather] == [("all_gather", 2 * 6 * 4)]
        assert lengths == [[1, 1], [2, 0], [1, 0]][rank]  # the bias lies first: its gradient comes first


def backward_twice(rt: Runtime) -> None:
    model = nn.Linear(2, 2)
    zero = zero_around(model, rt)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    zero.finish()


def test_zero1_refuses_backward_twice() -> None:
    need_module("dp_libtorch")
    with pytest.raises(RankError, match=r"RuntimeError: backward ran twice before finish\(\): put all micro"):
        spawn(backward_twice, 2)


def test_zero1_takes_its_hooks_with_it_and_refuses_what_it_cannot_shard() -> None:
    need_module("dp_libtorch")
    import dp_libtorch

    model = nn.Linear(2, 1)
    zero = dp_libtorch.Zero1(list(model.parameters()), None)
    model(torch.ones(1, 2)).sum().backward()
    zero.finish()
    assert [piece.grad.tolist() for piece in zero.pieces()] == [[1, 1], [1]]
    del zero
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[2, 2]]
    w = torch.ones(2, requires_grad=True)
    for tensors, bucket_bytes, message in [
        ([torch.ones(2)], 8, "none of 1 tensors requires a gradient"),
        ([w, 2 * w], 8, "tensor 1 is the result of a computation"),
        ([w], 0, "bucket_bytes is 0; it must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            dp_libtorch.Zero1(tensors, None, bucket_bytes)
