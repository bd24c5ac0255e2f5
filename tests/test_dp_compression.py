"""Compressed gradients: exact if everything is sent, else equal to one device with the same compression."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from mpi.launch import refused
from small_models import Branches
from torch import Tensor, nn

from common.comm import Group
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import KINDS, OPTIMIZERS, compare
from common.lesson.training import shape_of

from dp_basic import DataParallel
from dp_compression import (
    LESSON,
    PowerSGD,
    largest,
    main,
    make_compressor,
    pack,
    unpack,
)
from dp_compression_proof import quarrel, same_on_all_ranks, simulated, stall
from dp_compression_simulated import Simulation, compression, train
from dp_compressor import COMPRESSORS, CompressionOptions, Compressor
from dp_training import on_one_device, on_ranks

# 7 samples do not divide by 2, 3 or 4; the buckets are cut anew after the first of three steps
OPTIONS = CompressionOptions(
    model="gpt2-nano", batch=7, sequence=12, micro_batches=2, bucket_mb=0.01, k=0.03, rank=3
)
ALL = replace(OPTIONS, k=1.0, rank=256)


def check(rt: Runtime, name: str, o: CompressionOptions, reference: str) -> None:
    """Check gradients, norm, loss, weights and bytes under both optimizers, and that ranks agree bitwise."""
    for optimizer in OPTIMIZERS:
        followed, _, sent = on_ranks(rt, o, LESSON.versions[name], name, optimizer)
        if rt.rank == 0:  # the others have the same, bit by bit
            found = compare(simulated(reference, optimizer, rt, o), followed)
            for kind in KINDS:
                assert found[kind].value <= 1e-12, (name, optimizer, o, kind, found[kind])
        assert same_on_all_ranks(followed, rt.world), (name, optimizer, o)
        if not name.startswith("torch"):
            assert sent == LESSON.bytes_of_run(name, shape_of(o), rt.world, o)


def ours(rt: Runtime) -> None:
    """Check every compressor in our DataParallel at this world size."""
    more = dict(batch=9, model="llama-nano") if rt.world_size > 4 else {}
    o, everything = (replace(given, **more) for given in (OPTIONS, ALL))
    for name in COMPRESSORS:
        check(rt, name, o, name)
    for name in ("top-k", "powersgd"):
        check(rt, name, everything, "bucketed")


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_ranks_equal_one_device(world: int) -> None:
    spawn(ours, world)


def cut_otherwise(rt: Runtime) -> None:
    """Check one bucket per parameter, so that some buckets hold only vectors; and one bucket for all."""
    for bucket_mb in (1e-6, 1000):
        for name in COMPRESSORS:
            check(rt, name, replace(OPTIONS, bucket_mb=bucket_mb, model="llama-nano"), name)


def test_buckets_do_not_matter() -> None:
    spawn(cut_otherwise, 2)


def under_ddp(rt: Runtime) -> None:
    """Check torch's DDP with our hooks and with its own."""
    for name in COMPRESSORS:
        check(rt, f"ddp-{name}", OPTIONS, name)
    check(rt, "torch-powersgd", OPTIONS, "powersgd")


@pytest.mark.parametrize("world", [2, 3])
def test_as_a_hook_of_ddp_and_beside_torchs_own(world: int) -> None:
    spawn(under_ddp, world)


def one_memory(rt: Runtime) -> None:
    """Check that PowerSGD equals one device with the whole batch and one error memory: it uses sums only."""
    followed, *_ = on_ranks(rt, OPTIONS, LESSON.versions["powersgd"], "powersgd", "sgd")
    whole = replace(OPTIONS, micro_batches=1)
    alone = on_one_device(rt, whole, partial(train, ranks=1), "powersgd", "sgd")
    found = compare(alone, followed)
    assert max(d.value for d in found.values()) <= 1e-12, found


def test_powersgd_is_linear() -> None:
    spawn(one_memory, 3)


# per step and rank: inputs of Branches; in the second no rank uses `rarely`, in the third rank 0 has nothing
STEPS = [[[1.0, -2.0], [3.0]], [[0.5], [1.5, 2.5]], [[], [-1.0, 0.7]], [[-0.3], [2.0]]]


def sum_of(model: nn.Module, samples: list[float]) -> None:
    for s in samples:
        model(torch.full((1, 3), s, dtype=torch.float64)).backward()


def branches(rt: Runtime, name: str) -> list[dict[str, Tensor | None]]:
    model = Branches()
    dp = DataParallel(
        model, rt.world, 2e-5, make_compressor(name, rt.world, CompressionOptions(k=0.4, rank=1))
    )
    gradients = []
    for samples in STEPS:
        model.zero_grad()
        mine = samples[rt.rank]
        with dp.no_sync():
            sum_of(model, mine[:-1])
        sum_of(model, mine[-1:])
        dp.finish()
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
    return gradients


@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_nobody_used_keeps_its_memory(name: str) -> None:
    model, expected = Branches(), []
    simulation = Simulation(compression(name, CompressionOptions(k=0.4, rank=1)))
    parameters = list(model.parameters())
    for samples in STEPS:
        parts = []
        for part in samples:
            model.zero_grad()
            sum_of(model, part)
            parts.append([p.grad for p in parameters])
        simulation.exchange(parts, parameters)
        expected.append({n: p.grad for n, p in model.named_parameters()})
    assert expected[0]["rarely.weight"] is not None
    assert expected[1]["rarely.weight"] is None
    for found in spawn(branches, 2, name):
        for t, gradients in enumerate(expected):
            for n, gradient in gradients.items():
                if gradient is None:
                    assert found[t][n] is None, (t, n)
                else:
                    torch.testing.assert_close(found[t][n], gradient, rtol=1e-12, atol=1e-13, msg=f"{n}, {t}")


def test_bits_are_packed_eight_to_a_byte() -> None:
    for n in (1, 7, 8, 9, 1000):
        bits = torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.5
        packed = pack(bits)
        assert packed.dtype == torch.uint8
        assert len(packed) == -(-n // 8)
        assert torch.equal(unpack(packed, n), bits)
    assert pack(torch.tensor([True] + 8 * [False] + [True])).tolist() == [1, 2]


def test_of_equal_numbers_the_first_are_taken() -> None:
    nan = float("nan")
    for numbers, k, places in [
        ([1.0, -3.0, 2.0, 3.0], 2, {1, 3}),
        ([1.0, -2.0, 2.0, 3.0], 2, {3, 1}),
        ([0.0, 0.0, 0.0], 2, {0, 1}),
        ([1.0, nan, 2.0, 3.0], 2, {1, 3}),
        ([1.0, 2.0, nan, nan], 2, {2, 3}),
    ]:
        found = largest(torch.tensor(numbers), k).tolist()
        assert len(found) == k
        assert set(found) == places


def test_bytes_by_hand() -> None:
    group, parameters = Group("dp", 0, 4, (0, 1, 2, 3)), [torch.zeros(10, 20), torch.zeros(11)]
    o = CompressionOptions(k=0.1, rank=3)
    sent = {name: make_compressor(name, group, o).bytes_of_step(parameters) for name in COMPRESSORS}
    assert sent["top-k"] == 3 * (20 + 2) * (4 + 4)
    assert sent["powersgd"] == 2 * 3 / 4 * 4 * (3 * (10 + 20) + 11)
    assert sent["sign"] == 3 * (25 + 2 + 2 * 4)


def test_a_rank_above_the_matrix_is_the_matrix() -> None:
    compressor: Compressor = PowerSGD(Group.alone("dp"), 99)
    x = {
        0: torch.randn(5, 2, 2, generator=torch.Generator().manual_seed(0)).double(),
        1: torch.ones(3).double(),
    }
    mine, total = compressor.send(x)()
    torch.testing.assert_close(total[0], x[0], rtol=1e-12, atol=1e-13)
    assert torch.equal(total[1], x[1])
    zeros = {0: torch.zeros(5, 4).double()}
    assert torch.equal(compressor.send(zeros)()[1][0], zeros[0])  # a Q of zeros is filled up again
    mine, total = compressor.send({0: x[0].flatten(1)})()
    torch.testing.assert_close(total[0], x[0].flatten(1), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(mine[0], total[0])


def test_without_memory_the_quiet_weight_never_moves() -> None:
    def top_of(share: float, feedback: bool) -> Compressor:
        return make_compressor("top-k", Group.alone(), CompressionOptions(k=share), feedback)

    assert quarrel(top_of(1.0, feedback=True)) == pytest.approx(1, abs=1e-3)
    assert quarrel(top_of(0.5, feedback=True)) == pytest.approx(1, abs=0.1)
    assert quarrel(top_of(0.5, feedback=False)) == 0
    assert stall(make_compressor, CompressionOptions())[0]


def test_bad_input_is_one_line() -> None:
    assert "'middle-k' is unknown" in refused(main, 2, CompressionOptions(versions=("middle-k",)))
