"""hybrid_mpi on 1 to 8 ranks against the plain Transformer under autograd; bytes against Python; the program.

With experts the rows that a rank sends follow from the choices of the plain model's router.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beside_one_device import here
from mpi.launch import mpirun, need_binary, need_module, refused_by, run_worker
from mpi.programs import trained
from torch import Tensor

from common.benchmarks.measures import problem
from common.comm import Group, sizes_of
from common.comm.mesh import AXES, Mesh
from common.data.text import lm_batch, load_text, rank_slice
from common.lesson.equality import TOLERANCE, ULPS, Followed, compare, in_ulps
from common.models.configs import CONFIGS, gpt2
from common.models.transformer import Transformer, config

from hybrid_bytes import StepBytes
from hybrid_layout import HybridOptions
from hybrid_model import Hybrid
from hybrid_training import reference
from pp_schedules import make_schedule

SHAPE, BATCH, SEQUENCE, STEPS, SEED = (4, 16, 4, 20), 17, 16, 2, 3
MIXTURES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "moe": {"experts": 9},
    "switch": {"experts": 3, "experts_per_token": 1, "router": "softmax"},
}
for name, mixture in MIXTURES.items():
    CONFIGS[f"test-mpi-{name}"] = replace(gpt2(*SHAPE), **mixture)
# Model; pp, dp, ep, sp, tp; schedule; order of the positions; optimizer. 3 stages, 17 samples and 9 experts divide
# unevenly.
CASES = [
    ("gpt2", (1, 1, 1, 1, 1), "1f1b", "zigzag", "sgd"),
    ("gpt2", (1, 2, 1, 1, 1), "1f1b", "zigzag", "adamw"),
    ("gpt2", (1, 1, 1, 1, 4), "1f1b", "zigzag", "sgd"),
    ("gpt2", (1, 1, 1, 4, 1), "gpipe", "contiguous", "adamw"),
    ("gpt2", (2, 1, 1, 1, 1), "interleaved", "zigzag", "sgd"),
    ("gpt2", (4, 1, 1, 1, 1), "zb-h1", "zigzag", "adamw"),
    ("gpt2", (3, 1, 1, 1, 2), "1f1b", "zigzag", "sgd"),
    ("gpt2", (1, 3, 1, 1, 2), "1f1b", "zigzag", "adamw"),
    ("gpt2", (1, 8, 1, 1, 1), "gpipe", "zigzag", "sgd"),
    ("gpt2", (2, 2, 1, 1, 2), "1f1b", "zigzag", "sgd"),
    ("gpt2", (2, 2, 1, 2, 1), "gpipe", "contiguous", "adamw"),
    ("gpt2", (2, 1, 1, 2, 2), "zb-v", "zigzag", "sgd"),
    ("gpt2", (1, 2, 1, 2, 2), "1f1b", "contiguous", "sgd"),
    ("gpt2", (2, 1, 2, 1, 2), "zb-h1", "zigzag", "sgd"),
    ("gpt2", (1, 1, 2, 4, 1), "1f1b", "zigzag", "adamw"),
    ("gpt2", (4, 1, 1, 1, 2), "interleaved", "zigzag", "adamw"),
    ("moe", (1, 1, 1, 1, 1), "1f1b", "zigzag", "sgd"),
    ("moe", (1, 1, 2, 1, 1), "1f1b", "zigzag", "sgd"),
    ("switch", (1, 1, 3, 1, 2), "1f1b", "zigzag", "sgd"),
    ("moe", (1, 1, 8, 1, 1), "gpipe", "zigzag", "sgd"),
    ("moe", (1, 2, 2, 1, 2), "1f1b", "zigzag", "adamw"),
    ("moe", (1, 1, 2, 2, 2), "1f1b", "contiguous", "sgd"),
    ("moe", (2, 1, 2, 2, 1), "zb-v", "zigzag", "sgd"),
    ("switch", (4, 1, 2, 1, 1), "zb-h1", "zigzag", "adamw"),
    ("moe", (2, 1, 1, 1, 4), "interleaved", "zigzag", "adamw"),
    ("moe", (1, 2, 4, 1, 1), "1f1b", "zigzag", "sgd"),
]
ONE = str(make_schedule("1f1b", 1, 1))


def options(case: int) -> HybridOptions:
    model, mesh, schedule, order, _ = CASES[case]
    given: dict[str, Any] = dict(zip(AXES, mesh, strict=True))
    attention = "ring" if order == "contiguous" else order
    same: dict[str, Any] = dict(
        model=f"test-mpi-{model}", batch=BATCH, sequence=SEQUENCE, steps=STEPS, seed=SEED
    )
    chunks = 1 if mesh[0] == 4 else 2
    return HybridOptions(**given, **same, schedule=schedule, attention=attention, chunks=chunks)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Run one mpirun for all meshes; return the worker's JSON and the folder of its tensors."""
    need_module("hybrid_mpi")
    folder, text = tmp_path_factory.mktemp("hybrid_mpi"), load_text(None).train
    batches = [lm_batch(text, SEED, step, BATCH, SEQUENCE, 0, BATCH) for step in range(STEPS)]
    cases = []
    for i, (model, mesh, schedule, order, optimizer) in enumerate(CASES):
        o = options(i)
        lists = str(make_schedule(schedule, mesh[0], o.micro_batches, o.chunks))
        how = {"lists": lists, "order": order, "optimizer": optimizer, "mixture": MIXTURES[model]}
        cases.append({"case": i, "mesh": mesh} | how)
    said = {
        "all": {"shape": SHAPE, "sequence": SEQUENCE},
        "batches": [[x.tolist() for x in batch] for batch in batches],
        "cases": cases,
        "one": ONE,
    }
    (folder / "cases.json").write_text(json.dumps(said))
    found = run_worker(8, "hybrid_mpi_worker.py", folder, str(folder / "cases.json"))
    return found, folder


@functools.cache
def expected(model: str, optimizer: str) -> Followed:
    """Train on one device, with the units of `in_ulps`."""
    return reference(here(), replace(options(0), model=f"test-mpi-{model}"), optimizer)


@functools.cache
def choices(model: str) -> list[Tensor]:
    """Return the experts that each token of the first batch chooses, [B, S, K], per layer."""
    plain, found = Transformer(config(model), SEED, torch.float64), list[Tensor]()
    for layer in plain.layers:
        layer.mlp.observe = lambda routing: found.append(routing.experts_BSK)
    plain(lm_batch(load_text(None).train, SEED, 0, BATCH, SEQUENCE, 0, BATCH)[0])
    return found


def rows_moved(hybrid: Hybrid, o: HybridOptions) -> tuple[int, int]:
    """Return the rows of the first step to other ranks' experts, and those from other ranks to this rank's."""
    mesh, E = hybrid.mesh, hybrid.config.experts
    me, ep, everything = mesh.at["ep"], mesh.shape["ep"], torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    rank_E = torch.repeat_interleave(torch.arange(ep), torch.tensor(sizes_of(E, ep)))
    positions = hybrid.split(everything, everything)[1] if o.sp > 1 else torch.arange(SEQUENCE)
    rows = torch.zeros(ep, ep, dtype=torch.long)  # from rank, to rank
    for number, _ in hybrid.model.layers.named_children():
        for rank in range(ep):
            lo, hi = rank_slice(BATCH, mesh.at["dp"] * ep + rank, mesh.shape["dp"] * ep)
            chosen = choices(o.model)[int(number)][lo:hi, positions]
            rows[rank] += torch.bincount(rank_E[chosen.flatten()], minlength=ep)
    return int(rows[me].sum() - rows[me, me]), int(rows[:, me].sum() - rows[me, me])


def followed(case: int, of_ranks: list[dict[str, Any]], folder: Path) -> Followed:
    """Return the run of a case as the common checks take it."""
    loaded = np.load(folder / f"{case}.npz")
    tensors = {name: torch.from_numpy(loaded[name]) for name in loaded.files}

    def named(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}

    gradients = [named(f"gradients {step} ") for step in range(STEPS)]
    return Followed(of_ranks[0]["losses"], gradients, of_ranks[0]["norms"], named("weights "))


@pytest.mark.parametrize("case", range(len(CASES)), ids=[" ".join(map(str, [c[0], *c[1]])) for c in CASES])
def test_training_on_a_mesh_is_that_of_one_device(results: tuple[dict[str, Any], Path], case: int) -> None:
    of_ranks, one = results[0]["cases"][case], expected(CASES[case][0], CASES[case][-1])
    found = followed(case, of_ranks, results[1])
    apart = compare(one, found)
    assert max(d.value for d in apart.values()) <= TOLERANCE[torch.float64], apart
    assert in_ulps(one, found).value < ULPS
    for rank in of_ranks:
        assert rank["losses"] == of_ranks[0]["losses"]
        assert rank["norms"] == pytest.approx(of_ranks[0]["norms"], rel=1e-15)
        assert rank["apart"] == []  # replicas have the same bits


class Drawn(Mesh):
    """A mesh of which one rank is looked at: its groups have members and no messages."""

    def _make(self, axes: tuple[str, ...], places: tuple[int, ...] | None = None) -> Group | None:
        along = [range(self.shape[axis]) if axis in axes else [self.at[axis]] for axis in AXES]
        if places is not None:
            if self.at[axes[0]] not in places:
                return None
            along[AXES.index(axes[0])] = list(places)
        grid = np.arange(self.world.size).reshape(tuple(self.shape.values()))
        ranks = tuple(grid[np.ix_(*along)].ravel().tolist())
        return Group("+".join(axes), ranks.index(self.world.rank), len(ranks), ranks)


@pytest.mark.parametrize("case", [i for i, (_, mesh, *_) in enumerate(CASES) if mesh[0] != 3])
def test_bytes_are_those_of_python(results: tuple[dict[str, Any], Path], case: int) -> None:
    o = options(case)
    ranks = results[0]["cases"][case]
    for rank in {0, len(ranks) // 2, len(ranks) - 1}:
        world = Group("world", rank, len(ranks), tuple(range(len(ranks))))
        mesh = Drawn(world, **dict(zip(AXES, CASES[case][1], strict=True)))
        hybrid = Hybrid(o.model_config(), mesh, o, torch.device("cpu"), torch.float64)
        formula = StepBytes(hybrid.model, hybrid.zero, mesh, o)
        for exchange in formula.exchanges[:1]:  # the rows of all layers and micro-batches
            sent, received = rows_moved(hybrid, o)
            exchange.rows_sent, exchange.rows_received = [sent, 0], [received, 0]
        assert all(counted == by_formula for counted, by_formula in ranks[rank]["bytes"])
        counted = ranks[rank]["bytes"][0][0]
        assert counted == pytest.approx(
            {name: float(sent) for name, sent in formula.all().items()}, rel=1e-12
        )


def test_what_does_not_fit_is_refused(results: tuple[dict[str, Any], Path]) -> None:
    assert results[0]["refused"] == [
        "ValueError: mesh pp=1 dp=2 ep=1 sp=1 tp=1 needs 2 ranks, the world has 1",
        "ValueError: rank 0, stage 0, micro-batch 0 has F; F B or F I W is needed",
        "ValueError: a sequence of 21 tokens; 1 to 20 are possible",
        "ValueError: order is spiral; it is contiguous or zigzag",
        "ValueError: of 2 experts a token cannot choose 3, or 1 ranks along ep each have one",
        "ValueError: router is sigmoid; it is renormalised or softmax",
        "ValueError: mesh pp=-1 dp=-1 ep=1 sp=1 tp=1 has an axis without ranks",
        "ValueError: a model needs layers, width, heads and words of at least 1",
        "ValueError: token 999 is outside of a vocabulary of 256",
        "ValueError: token -5 is outside of a vocabulary of 256",
        "ValueError: the model takes samples of 16 tokens, at least one per micro-batch; given are 1 of 15 for 1",
    ]


@pytest.mark.parametrize(
    ("model", "mesh", "place"),
    [
        ("gpt2-tiny", "pp=2 dp=1 ep=1 sp=1 tp=2", "   3   1  0  0  0  1   0 to 4"),
        ("gpt2-moe-tiny", "pp=1 dp=1 ep=2 sp=1 tp=2", "   3   0  0  1  0  1   2 to 4"),
    ],
)
def test_program_proves_itself_and_trains_as_in_python(
    tmp_path: Path, model: str, mesh: str, place: str
) -> None:
    file = tmp_path / "records.json"
    size = ["--model", model, "--batch", "5", "--sequence", "12", "--steps", "2", "--explain"]
    axes = f"--{mesh.replace(' ', ' --').replace('=', ' ')}".split()
    done = mpirun(4, need_binary("hybrid_mpi"), *size, *axes, "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "proved: training on 4 rank(s) equals training on one, bytes counted = formula." in done.stdout
    lines = [line.split()[4:] for line in done.stdout.splitlines() if line.startswith("loss of each step")]
    for optimizer, losses in zip(("sgd", "adamw"), lines, strict=True):
        plain = Transformer(config(model), 0, torch.float64)
        assert list(map(float, losses)) == pytest.approx(trained(plain, optimizer, 2, 5, 12), abs=1e-9)
    assert place in done.stdout  # of the last rank
    (record,) = map(json.loads, file.read_text().splitlines())
    assert not problem(record)
    assert (record["implementation"], record["language"], record["ranks"]) == (
        "hybrid_mpi-1f1b",
        "cpp-mpi",
        4,
    )
    assert (record["mesh"], record["equal"]) == (mesh, True)
    assert record["parameters"] == plain.parameter_count()
    assert record["flop_per_step"] == pytest.approx(60 * plain.flops_per_token(12))
    assert record["bytes_counted"] == record["bytes_formula"] > 0
    assert 0 < record["largest_difference"] < 1e-12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--tp", "2"],
            "mesh pp=1 dp=1 ep=1 sp=1 tp=2 needs 2 ranks, the world has 1; a world of 2 ranks would fit",
        ),
        (["--dp", "3"], "mesh pp=1 dp=3 ep=1 sp=1 tp=1 needs 3 ranks, the world has 1; dp=1 would fit"),
        (["--sequence", "65"], "a sequence of 65 tokens is too long for a model with 64 learned positions"),
        (
            ["--batch", "1"],
            "--batch 1 gives each of 1 places along dp and ep 1 samples, too few for 2 micro-batches; give --batch 2, "
            "or fewer micro-batches",
        ),
        (
            ["--model", "gpt2-tiny", "--schedule", "interleaved", "--chunks", "3"],
            "2 layers of gpt2-tiny are too few for the 3 stages of interleaved on 1 rank(s); at least 3",
        ),
        (["--model", "bert"], "--model bert: choose one of gpt2-tiny, gpt2-deep, gpt2-10m, gpt2-moe-tiny"),
        (["--data", "/no/such/text"], "no such file or folder: /no/such/text (--data takes any text)"),
        (["--json", "/no/such/folder/record.json"], "cannot write to /no/such/folder/record.json"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    assert refused_by("hybrid_mpi", *arguments) == message


@pytest.mark.parametrize(
    ("ranks", "arguments", "message"),
    [
        (3, ["--tp", "3"], "4 heads do not divide over 3 ranks along tp; 1, 2, 4 would do"),
        (
            9,
            ["--ep", "9", "--model", "gpt2-moe-tiny"],
            "9 ranks along ep are more than the 8 experts; at most 8 would do",
        ),
        (
            3,
            ["--sp", "3"],
            "a sequence of 32 tokens does not divide into 6 pieces, which zigzag order on 3 ranks needs; 30 or 36 "
            "would",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_one_line_on_all_ranks(
    ranks: int, arguments: list[str], message: str
) -> None:
    done = mpirun(ranks, need_binary("hybrid_mpi"), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("hybrid_mpi: ") == done.stderr.count(f"hybrid_mpi: {message}\n") == 1


@pytest.mark.parametrize("name", ["hybrid_mpi", "hybrid_libtorch"])
def test_a_folder_to_save_to_is_refused_before_training(name: str, tmp_path: Path) -> None:
    done = mpirun(1, need_binary(name), "--train", "--steps", "1", "--log-every", "1", "--save", tmp_path)
    assert done.returncode == 2
    assert f"{name}: {tmp_path} cannot be written: it is no file" in done.stderr
    assert "step     loss" not in done.stdout
    assert not list(tmp_path.parent.glob("*.partial"))
