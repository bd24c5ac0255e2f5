"""Five dimensions at once: equal to one device, bytes by group, bitwise equal replicas, memory, bad input."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from beside_one_device import here
from torch import nn
from training_runs import on_one_device

from common import comm
from common.comm import Group
from common.comm.mesh import Mesh
from common.comm.placement import FlatShard, Shard, piece, place, whole_shape
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import (
    OPTIMIZERS,
    Followed,
    compare,
    unequal_replicas,
    watch,
    whole,
    worst_of_world,
)
from common.lesson.job import Train
from common.lesson.training import make_model
from common.models.configs import CONFIGS, gpt2, mixtral, switch
from common.utils.memory import peak_allocated

import hybrid_3d
import hybrid_4d
import hybrid_5d
import hybrid_torch
import hybrid_training
from hybrid_bytes import StepBytes
from hybrid_explain import label, members
from hybrid_layout import HybridOptions, Layout
from hybrid_model import Hybrid
from hybrid_proof import prove_rows
from hybrid_rows import of_meshes, table, ways
from hybrid_training import HybridJob, make_hybrid, make_job, train

# sizes that divide by next to nothing
CONFIGS["odd-mixtral"] = mixtral(
    layers=3, width=24, heads=6, kv_heads=3, mlp_width=7, sequence=48, experts=5, vocabulary=257
)
CONFIGS["odd-gpt2"] = gpt2(layers=3, width=24, heads=6, sequence=48, vocabulary=257)
CONFIGS["odd-switch"] = replace(switch(layers=3, width=24, heads=6, sequence=48, experts=5), mlp_width=9)
CONFIGS["odd-deepseek"] = replace(
    CONFIGS["odd-mixtral"], router="sigmoid", shared_experts=2, experts_per_token=3, dropout=0.2
)


def options(**given: Any) -> HybridOptions:
    return HybridOptions(**{"model": "odd-mixtral", "batch": 9, "sequence": 48, "steps": 2, **given})


ODD = [
    options(dp=2, tp=2, zero=3),
    options(ep=2, tp=2, model="odd-deepseek"),
    options(pp=2, tp=2, model="odd-switch", sequence_parallel=True, sequence=47, schedule="zb-h1", clip=0.3),
    options(pp=2, ep=2, zero=1, micro_batches=3),
    options(ep=2, sp=2, attention="ring", zero=1, clip=0.3),
    options(dp=2, tp=2, model="odd-gpt2", zero=2, sequence=31, sequence_parallel=True),
    options(sp=2, tp=2, attention="allgather", checkpointing=True, zero=3, sequence_parallel=True),
    options(pp=2, dp=2, model="odd-gpt2", zero=1, schedule="gpipe"),
]


def ran(
    rt: Runtime, o: HybridOptions, mesh: Mesh, optimizer: str, loop: Train = train
) -> tuple[Followed, HybridJob]:
    """Run a training loop on the mesh, and check the bytes of each step."""
    job = make_job(rt, o, mesh, OPTIMIZERS[optimizer], o.steps)
    return watch(job.count(loop(job)), job, mesh), job


def odd(
    rt: Runtime, cases: list[tuple[HybridOptions, str, Followed]]
) -> list[tuple[dict[str, float], bool, list[str]]]:
    """Return, per case: the largest differences, True if the bytes agree, and the replicas that differ."""
    found = []
    for o, optimizer, reference in cases:
        mesh = o.mesh(rt)
        followed, job = ran(rt, o, mesh, optimizer)
        worst = worst_of_world(compare(reference, followed), mesh)
        assert job.owner
        apart = unequal_replicas(job.owner.named_parameters(), mesh)
        found.append(({kind: d.value for kind, d in worst.items()}, job.agree, apart))
        mesh.close()
    return found


def test_sizes_that_do_not_divide() -> None:
    turns = itertools.cycle([*OPTIMIZERS])  # gradients are compared with both
    cases = [
        (o, optimizer, on_one_device(here(), o, optimizer)) for o, optimizer in zip(ODD, turns, strict=False)
    ]
    ranks = spawn(odd, 4, cases)
    for o, (worst, _, apart) in zip(ODD, ranks[0], strict=True):
        assert max(worst.values()) <= 1e-12, (o, worst)
        assert apart == []
    assert all(agree for rank in ranks for _, agree, _ in rank)


SHOWN = [
    (hybrid_3d.train, options(pp=2, tp=2, model="odd-gpt2", sequence_parallel=True, schedule="zb-h1", clip=0.3)),
    (hybrid_3d.train, options(dp=2, tp=2, zero=3)),
    (hybrid_4d.train, options(dp=2, sp=2, zero=1, checkpointing=True, clip=0.3)),
    (hybrid_5d.train, options(ep=2, tp=2, model="odd-deepseek")),
    (hybrid_5d.train, options(pp=2, ep=2, micro_batches=3)),
]  # fmt: skip


def shown(rt: Runtime) -> list[tuple[bool, bool]]:
    """Return, per case: True if the lesson's calls give the bits of a Hybrid, and if their bytes agree."""
    found = []
    for loop, o in SHOWN:
        mesh = o.mesh(rt)
        (a, job), (b, _) = (ran(rt, o, mesh, "adamw", each) for each in (loop, train))
        pairs = zip([x for *_, x in a.sets()], [x for *_, x in b.sets()], strict=True)
        same = all(x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x) for x, y in pairs)
        found.append((same, job.agree))
        mesh.close()
    return found


def test_the_lessons_calls_are_those_of_a_hybrid() -> None:
    for rank in spawn(shown, 4):
        assert rank == [(True, True)] * len(SHOWN)


@pytest.mark.parametrize(("world", "every"), [(8, 100), (8, 36), (12, 15)])
def test_rows_of_the_proof_table(world: int, every: int) -> None:
    todo = table(every)[world]
    for row in spawn(prove_rows, world, todo, False)[0]:
        assert row.holds, (row.options, row.proof.rows, row.proof.bytes_agree, row.apart)


def test_meshes_in_words() -> None:
    todo = of_meshes(["dp=2 zero=1", "tp=2", "ep=3"])
    assert {n: [row.model for row in of_n] for n, of_n in todo.items()} == {
        2: ["proof-llama", "proof-llama"],
        3: ["proof-moe"],
    }
    proved = spawn(prove_rows, 2, todo[2], False, True)[0]
    assert [(r.record.implementation, r.record.equal) for r in proved] == [
        ("dp=2, ZeRO-1", True),
        ("tp=2", True),
    ]
    assert all(0 < r.record.largest_difference <= 1e-12 for r in proved)
    assert of_meshes(["pp=5 dp=4 ep=2"])[40][0].model == "proof-moe-deep"
    for words in ("dp", "dp=0", "dp=²", "xp=2", "dp=2,tp=2", "zero=9", "tp=2 zero=", "dp=" + 5000 * "9"):
        wrong = re.escape(ascii(words.split()[-1])[:40])
        with pytest.raises(UsageError, match=f"give words like .* and zero with 0 to 3; {wrong}"):
            of_meshes([words])
    with pytest.raises(UsageError, match=r"give words like .* 0 to 3$"):
        of_meshes([""])
    for words, message in (
        ("dp=2 dp=3", "twice"),
        ("dp=64 tp=8", "512 ranks"),
        ("tp=3", "8 heads do not divide"),
    ):
        with pytest.raises(UsageError, match=message):
            of_meshes(["dp=2", words])


def test_there_are_35_ways_to_write_8() -> None:
    assert len(set(ways(8))) == len(ways(8)) == 35


def initial(rt: Runtime) -> list[bool]:
    """Return, per parameter on several meshes, True if it starts as on one device, bit for bit."""
    plain = dict(make_model(options(), rt.device).named_parameters())
    same = []
    for o in (options(pp=2, tp=2), options(dp=2, ep=2, zero=3), options(sp=2, ep=2), options(dp=4, zero=1)):
        mesh = o.mesh(rt)
        hybrid = make_hybrid(rt, o, mesh)
        for name, p in hybrid.named_parameters():
            same.append(torch.equal(whole(p, p, mesh), plain[name].detach()))
    return same


def test_the_same_seed_gives_the_same_model_on_every_mesh() -> None:
    assert all(all(rank) for rank in spawn(initial, 4))


def numbers_held(rt: Runtime) -> list[int]:
    """Return, per mesh, the numbers that the optimizers of all ranks step on."""
    held = []
    for o in (options(dp=2, ep=2, zero=1), options(ep=2, sp=2, zero=3), options(dp=2, sp=2, zero=2)):
        mesh = o.mesh(rt)
        held.append(
            sum(comm.everyones(sum(p.numel() for p in make_hybrid(rt, o, mesh).parameters()), mesh.world))
        )
    return held


def test_zero_leaves_each_number_to_one_rank() -> None:
    whole = sum(p.numel() for p in make_model(options(), torch.device("cpu")).parameters())
    assert spawn(numbers_held, 4)[0] == 3 * [whole]


def alone() -> Group:
    return Group.alone("world")


def test_making_a_model_holds_its_pieces_and_one_parameter() -> None:
    config, made = gpt2(layers=24, width=64, heads=4, sequence=32), []

    def make() -> None:
        made.append(Hybrid(config, Mesh(alone()), Layout(), torch.device("cpu"), torch.float32))

    peak = peak_allocated(make, "cpu")
    held = sum(p.numel() * p.element_size() for p in made[0].parameters())
    largest = max(p.numel() for p in made[0].parameters())
    assert held <= peak <= held + 3 * 8 * largest  # random numbers are float64


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ([Shard(1, (2, 2, 1))], [[2, 3], [7, 8]]),
        ([FlatShard(torch.Size((2, 5)), (4, 3, 3))], [4, 5, 6]),
    ],
)
def test_a_piece_is_what_lies_at_the_rank_s_place(split: list[Any], expected: list[Any]) -> None:
    mesh = Mesh(Group("world", 1, 3, (0, 1, 2)), dp=3)
    x = torch.arange(10).view(2, 5)
    p = nn.Parameter(torch.empty(2, 2) if isinstance(split[0], Shard) else torch.empty(3))
    place(p, "dp", split[0])
    assert piece(x, p, mesh).tolist() == expected
    assert whole_shape(p, mesh) == x.shape


def for_a_longer_sequence(job: HybridJob) -> StepBytes:
    """Broken: the formula counts one token more than there is."""
    o = job.options
    return StepBytes(job.model, job.owner, job.mesh, replace(o, sequence=o.sequence + 1))  # type: ignore[arg-type]


def bytes_of_a_formula_that_is_wrong(rt: Runtime) -> bool:
    o = options(tp=2, model="odd-gpt2", steps=1)
    with patch.object(HybridJob, "formula", for_a_longer_sequence):
        return ran(rt, o, o.mesh(rt), "sgd")[1].agree


def test_a_wrong_formula_is_caught() -> None:
    assert spawn(bytes_of_a_formula_that_is_wrong, 2) == [False, False]


def in_16_bits(rt: Runtime) -> list[dict[str, float]]:
    """Return, on two meshes, the differences of a bfloat16 step's loss, gradients and norm from one device's.

    rounded: the difference of its gradients from those of one device in float32.
    """
    found = []
    for given in (
        {"pp": 2, "tp": 2, "schedule": "zb-h1"},
        {"dp": 2, "tp": 2, "sequence_parallel": True, "zero": 3},
    ):
        o = options(model="llama-tiny", steps=1, dtype="float32", precision="bfloat16", **given)
        mesh = o.mesh(rt)
        followed, _ = ran(rt, o, mesh, "sgd")
        worst = compare(on_one_device(rt, o, "sgd"), followed)
        apart = compare(on_one_device(rt, replace(o, precision="full"), "sgd"), followed)
        found.append({kind: worst[kind].value for kind in ("loss", "gradients", "gradient norm")})
        found[-1]["rounded"] = apart["gradients"].value
    return found


def test_bfloat16_rounds_as_one_device_does() -> None:
    for found in spawn(in_16_bits, 4)[0]:
        assert found["gradients"] <= 32 * 2**-8
        assert found["loss"] <= 2**-10
        assert found["gradient norm"] <= 2**-8
        assert found["rounded"] > 2**-10, "products were not in 16 bits"


@pytest.mark.parametrize(
    ("world", "given", "message"),
    [
        (4, {"pp": 3}, "would fit"),
        (4, {"pp": 4}, "3 layers cannot be cut into 4 stages"),
        (4, {"tp": 4}, "6 heads do not divide over 4 ranks along tp; 1, 2, 3, 6 would do"),
        (6, {"ep": 6}, "6 ranks along ep are more than the 5 experts; at most 5 would do"),
        (4, {"sp": 4, "sequence": 36}, "does not divide into 8 pieces"),
        (4, {"sp": 4, "attention": "ulysses"}, "6 heads do not divide over 4 ranks"),
        (8, {"sp": 4, "tp": 2, "attention": "ulysses"}, "3 heads do not divide over 4 ranks"),
        (
            8,
            {"dp": 8},
            "--batch 9 gives each of 8 places along dp and ep 1 samples, too few for 2 micro-batches",
        ),
        (4, {"pp": 2, "zero": 3}, "would gather all weights once for each micro-batch"),
        (4, {"pp": 2, "zero": 2}, "would reduce all gradients once for each micro-batch"),
        (4, {"dp": 4, "batch": 16, "zero": 2, "schedule": "gpipe"}, "use --schedule 1f1b, not gpipe"),
        (4, {"sequence_parallel": True}, "--sequence-parallel cuts the tokens over tp, which has 1 rank"),
        (4, {"pp": 2, "schedule": "interleaved"}, "3 layers cannot be cut into 4 stages"),
        (2, {"sp": 2, "model": "odd-deepseek"}, "cannot drop attention weights"),
        (2, {"sp": 2, "model": "odd-switch"}, "an even share"),
        (2, {"model": "odd-gpt2", "sequence": 49}, "too long for a model with 48 learned positions"),
    ],
)
def test_what_does_not_fit_is_refused(world: int, given: dict[str, Any], message: str) -> None:
    o = options(**given)
    group = Group("world", 0, world, tuple(range(world)))
    rt = Runtime(0, world, 0, world, "none", torch.device("cpu"), "gloo", 60.0, group)
    with pytest.raises(UsageError, match=message.replace("(", r"\(")), patch("torch.distributed.new_group"):
        make_hybrid(rt, o, o.mesh(rt))


def test_a_hybrid_checks_what_it_is_given() -> None:
    mesh, cpu = Mesh(alone()), torch.device("cpu")
    with pytest.raises(UsageError, match="--sequence-parallel cuts the tokens over tp"):
        Hybrid(CONFIGS["odd-gpt2"], mesh, Layout(sequence_parallel=True), cpu)
    hybrid = Hybrid(CONFIGS["odd-gpt2"], mesh, Layout(micro_batches=3), cpu)
    for shape, message in (
        ((2, 8), "2 samples, too few for 3 micro-batches"),
        ((3, 49), "49 tokens is too long"),
    ):
        tokens_BS = torch.zeros(shape, dtype=torch.long)
        with pytest.raises(UsageError, match=message):
            hybrid.step(tokens_BS, tokens_BS)


def test_groups_on_paper() -> None:
    mesh = Mesh(Group("world", 0, 8, tuple(range(8))), pp=2, dp=2, tp=2)
    assert members(mesh, ("tp",)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert members(mesh, ("dp", "ep", "sp", "tp")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert label("dp+ep+sp", mesh) == "dp"
    assert label("world", mesh) == "world"


def torch_parts(rt: Runtime) -> list[tuple[bool, dict[str, Any]]]:
    """Run hybrid_torch on two meshes; return its verdict, and the `equal` of each implementation's record."""
    found = []
    for shape in ({"pp": 2, "dp": 2}, {"dp": 2, "tp": 2}):
        with patch.object(hybrid_training, "report") as report:
            good = hybrid_torch.main(rt, hybrid_torch.TorchOptions(steps=2, **shape))
        found.append((good, {record.implementation: record.equal for record in report.call_args.args[2]}))
    return found


def test_torch_s_parts_compose_to_the_same() -> None:
    assert spawn(torch_parts, 4)[0] == [
        (True, {"pp=2 dp=2, ZeRO-1": None, "pp=2 dp=2, torch": True}),
        (True, {"dp=2 tp=2, ZeRO-2": None, "dp=2 tp=2, torch": True}),
    ]
