"""The MLP in PyTorch, LibTorch, C++ with MPI and DDP: equal to one device and to each other; edge cases."""

from __future__ import annotations

import json
import threading
import time
from fractions import Fraction
from typing import Any

import pytest
import torch
from mpi.launch import ROOT, need_module, refusal, run_worker
from small_models import UNEVEN_SAMPLES, Branches
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store

from common.errors import RankError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn

import dp_languages
from dp_languages import LOOPS

LESSON = ROOT / "01-data-parallelism/pytorch/dp_languages.py"
# 7 and 5 samples do not divide by 2, 3 or 4; buckets of 1 kB are many, in one of 100 MB there are all gradients
SMALL_BUCKETS, TWO_MICRO_BATCHES, ONE_BUCKET = (
    {"batch": batch, "micro_batches": micro_batches, "bucket_mb": bucket_mb, "hidden": 24, "steps": 2}
    for batch, micro_batches, bucket_mb in [(7, 1, 0.001), (7, 2, 0.01), (5, 3, 100.0)]
)


@pytest.fixture(autouse=True)
def built() -> None:
    for name in ("dp_libtorch", "dp_mpi", "fived"):
        need_module(name)


# with more ranks than cores, one case
CASES_OF = {
    1: [TWO_MICRO_BATCHES],
    2: [SMALL_BUCKETS, TWO_MICRO_BATCHES, ONE_BUCKET],
    3: [ONE_BUCKET],
    4: [TWO_MICRO_BATCHES],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run one mpirun for all numbers of ranks; return {ranks: outcome of each case}."""
    return run_worker(
        4, "dp_languages_worker.py", tmp_path_factory.mktemp("dp_languages"), json.dumps(CASES_OF)
    )


@pytest.fixture(params=CASES_OF, ids="{0} ranks".format)
def outcomes(request: pytest.FixtureRequest, found: Any) -> Any:
    return request.param, found[str(request.param)]


@pytest.mark.parametrize(("to", "limit"), [("one device", 1e-12), ("one another", 1e-10)])
def test_equal(outcomes: Any, to: str, limit: float) -> None:
    for case, outcome in zip(CASES_OF[outcomes[0]], outcomes[1], strict=True):
        n = len(LOOPS)
        assert len(outcome[to]) == 2 * (n if to == "one device" else n * (n - 1) // 2)
        for versions, kinds in outcome[to].items():
            for kind, (value, where) in kinds.items():
                assert value <= limit, (case, versions, kind, where)


def test_bytes_counted_are_those_of_the_formula(outcomes: Any) -> None:
    ranks, found = outcomes
    for outcome in found:
        for name, (counted, formula) in outcome["bytes"].items():
            assert counted == formula, name
            assert (Fraction(counted) > 0) == (ranks > 1)


def parallel(model: nn.Module, rt: Runtime, bucket_bytes: int = 24) -> Any:
    import dp_libtorch

    return dp_libtorch.DataParallel([*model.parameters(), *model.buffers()], rt.world.pg, bucket_bytes)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def branches(rt: Runtime, samples: list[float], set_to_none: bool) -> list[dict[str, Tensor | None]]:
    """Return the gradients of three steps; the first step fixes the order of the buckets."""
    model, found = Branches(), []
    dp = parallel(model, rt)
    mine = [torch.full((1, 3), s, dtype=torch.float64) for s in samples][rt.rank :: rt.world_size]
    for _ in range(3):
        model.zero_grad(set_to_none)
        with dp.no_sync():
            for x in mine[:-1]:
                model(x).backward()
        for x in mine[-1:]:
            model(x).backward()
        dp.finish()
        found.append(gradients(model))
    return found


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("samples", UNEVEN_SAMPLES)
def test_unused_and_shared_parameters(samples: list[float], set_to_none: bool) -> None:
    model = Branches()
    for s in samples:
        model(torch.full((1, 3), s, dtype=torch.float64)).backward()
    expected = gradients(model)
    assert expected["never.weight"] is None
    for steps in spawn(branches, 3, samples, set_to_none):
        for found in steps:
            for name, gradient in expected.items():
                if gradient is None:
                    assert found[name] is None, name
                else:
                    assert torch.allclose(found[name], gradient, rtol=1e-12, atol=1e-13), name


def no_sync(rt: Runtime) -> tuple[list[Any], Tensor, list[Any], Tensor]:
    """Return messages and gradient of two micro-batches, with nested contexts and a parameter given twice."""
    import dp_libtorch

    model = nn.Linear(1, 1, bias=False)
    dp = dp_libtorch.DataParallel([model.weight, model.weight], rt.world.pg, 4)
    dp.take_messages()
    with dp.no_sync(), dp.no_sync():
        model(torch.full((1, 1), rt.rank + 1.0)).backward()
    inside = dp.take_messages(), model.weight.grad.clone()
    model(torch.full((1, 1), rt.rank + 1.0)).backward()
    dp.finish()
    return *inside, dp.take_messages(), model.weight.grad


def test_no_sync_sends_nothing_and_the_accumulated_gradient_is_summed() -> None:
    for rank, (before, local, after, summed) in enumerate(spawn(no_sync, 3)):
        assert before == []
        assert local.item() == rank + 1
        # a gradient and a flag of 4 bytes each; then, once, the order: 8 bytes a parameter
        assert [(op, n_bytes) for op, n_bytes, _ in after] == [
            ("all_reduce", 2 * 2 * 8),
            ("broadcast", 2 * 8),
        ]
        assert summed.item() == 2 * (1 + 2 + 3)


def all_or_nothing(rt: Runtime) -> Tensor | None:
    """Return the gradient if rank 0 alone runs backward: the last bucket must wait for finish()."""
    model = nn.Linear(1, 1, bias=False)
    dp = parallel(model, rt)
    if rt.rank == 0:
        model(torch.ones(1, 1)).sum().backward()
        time.sleep(0.1)
    dp.finish()
    return model.weight.grad


def test_a_parameter_that_one_rank_used_has_a_gradient_on_all() -> None:
    assert spawn(all_or_nothing, 2) == [torch.ones(1, 1)] * 2


def backward_twice(rt: Runtime) -> None:
    model = nn.Linear(2, 2)
    dp = parallel(model, rt)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    dp.finish()


def test_backward_twice_is_refused() -> None:
    with pytest.raises(RankError, match=r"RuntimeError: backward ran twice before finish\(\): put all micro"):
        spawn(backward_twice, 2)


def hooks_of_others(rt: Runtime) -> tuple[float, float, float, bool]:
    """Run with a user's hook set after ours: it must not replace ours, and ours must end with its owner."""
    model = nn.Linear(1, 1, bias=False)
    dp, seen = parallel(model, rt), []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.item()))
    model(torch.full((1, 1), rt.rank + 1.0)).backward()
    dp.finish()
    summed = model.weight.grad.item()
    model.zero_grad()
    del dp
    for _ in range(2):
        model(torch.full((1, 1), rt.rank + 1.0)).backward()
    return seen[0], summed, model.weight.grad.item(), len(seen) == 3


def test_hooks_of_others() -> None:
    for rank, found in enumerate(spawn(hooks_of_others, 2)):
        assert found == (rank + 1, 3, 2 * (rank + 1), True)


def start(rt: Runtime) -> list[Tensor]:
    """Return the tensors of a wrapped model that started with other values on every rank.

    The model has buffers, a frozen parameter, a transposed one and two dtypes.
    """
    torch.manual_seed(rt.rank)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3).double())
    model[0].bias.requires_grad_(False)
    model[2].weight = nn.Parameter(model[2].weight.data.T)
    for buffer in model.buffers():
        buffer.fill_(rt.rank + 5)
    dp = parallel(model, rt, 10**6)
    assert dp.buckets == 2  # one for each type
    return [t.detach().clone() for t in model.state_dict().values()]


def test_all_start_with_the_model_of_rank_0() -> None:
    first, *others = spawn(start, 3)
    torch.manual_seed(0)
    assert torch.equal(first[0], nn.Linear(2, 3).weight)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def waiting(rt: Runtime) -> None:
    """Train while rank 0 waits for rank 1, which waits for another Python thread of rank 0."""
    model, store = nn.Linear(1, 1), _get_default_store()
    dp = parallel(model, rt)

    def release() -> None:
        time.sleep(0.3)  # until the main thread waits
        store.set("go", "1")

    thread = threading.Thread(target=release)
    if rt.rank == 0:
        thread.start()
    else:
        store.get("go")
    model(torch.ones(1, 1)).backward()
    dp.finish()
    if rt.rank == 0:
        thread.join()


def test_python_runs_on_while_finish_waits() -> None:
    spawn(waiting, 2)  # its timeout is what a wait that holds Python would last


def test_what_cannot_be_summed_is_refused() -> None:
    import dp_libtorch

    w = torch.ones(2, requires_grad=True)
    for tensors, bucket_bytes, message in [
        ([], 8, "none of 0 tensors requires a gradient"),
        ([torch.ones(2)], 8, "none of 1 tensors requires a gradient"),
        ([w, 2 * w], 8, "tensor 1 is the result of a computation"),
        ([w], 0, "bucket_bytes is 0; it must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            dp_libtorch.DataParallel(tensors, None, bucket_bytes)


def test_ranks_without_mpi_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(dp_languages.main, dp_languages.LanguageOptions, capsys, "--nproc", "2")
    assert line.endswith(
        "dp_mpi needs MPI between its 2 ranks; start them with mpirun -np 2 python dp_languages.py"
    )
