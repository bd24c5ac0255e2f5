"""pp_mpi on 1 to 4 ranks against the plain MLP under autograd; bytes, order, schedule checks, the binary."""

from __future__ import annotations

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mpi.launch import mpirun, need_binary, need_module, refused_by, run_worker

from common.benchmarks.measures import problem
from common.comm import sizes_of
from common.models.mlp import MLP

from pp_schedule import COMPUTE, Instruction, Schedule, connect
from pp_schedules import KINDS, make_schedule
from pp_simulator import simulate

# Nine layers, all widths different from their neighbours', so that stages are uneven and messages differ in length.
SIZES, STEPS = [16, 12, 10, 14, 8, 12, 10, 12, 9, 16], 3
CASES: list[dict[str, Any]] = [
    {
        "sizes": SIZES, "schedule": schedule, "micro_batches": micro_batches, "batch": batch, "steps": STEPS,
        "optimizer": optimizer,
    }
    for schedule, optimizer, micro_batches, batch in [
        *itertools.product(KINDS, ["sgd", "adamw"], [5], [11]),  # micro-batches of 2 and 3
        ("gpipe", "sgd", 1, 4),
        ("zb-h1", "sgd", 2, 5),
        *itertools.product(["gpipe", "1f1b", "zb-h1", "zb-v"], ["sgd"], [9], [9]),  # of one sample
    ]
] + [
    {
        "sizes": SIZES, "schedule": "1f1b", "micro_batches": 4, "batch": 9, "steps": 1, "optimizer": "sgd",
        "dtype": "float32",
    }
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run one mpirun; return {number of ranks: per rank, (its part of every case, errors)}."""
    need_module("pp_mpi")
    found: dict[str, Any] = run_worker(
        4, "pp_mpi_worker.py", tmp_path_factory.mktemp("pp"), json.dumps(CASES)
    )
    assert list(found) == ["1", "2", "3", "4"]
    return found


def outcomes(results: dict[str, Any]) -> list[tuple[dict[str, Any], Schedule, list[dict[str, Any]]]]:
    """Return, for each number of ranks and case: the case, its schedule, and each rank's results."""
    return [
        (
            case,
            make_schedule(case["schedule"], len(ranks), case["micro_batches"]),
            [mine[0][n] for mine in ranks],
        )
        for ranks in results.values()
        for n, case in enumerate(CASES)
    ]


@functools.cache
def reference(batch: int, steps: int, optimizer: str) -> dict[str, Any]:
    """Train on one device; return losses and norms per step, the last gradients, and the final weights."""
    model = MLP(SIZES, seed=3, dtype=torch.float64)
    update: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if optimizer == "adamw":
        update = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-5)
    draw = np.random.default_rng(7)
    losses, norms = [], []
    for _ in range(steps):
        x = torch.from_numpy(draw.standard_normal((batch, SIZES[0])))
        y = torch.from_numpy(draw.integers(SIZES[-1], size=batch, dtype=np.uint8)).long()
        update.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        gradients = {
            name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None
        }
        norms.append(math.sqrt(sum(np.square(g).sum() for g in gradients.values())))
        update.step()
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def relative(expected: Any, found: Any) -> float:
    expected, found = np.asarray(expected), np.asarray(found)
    assert expected.shape == found.shape
    return float(abs(found - expected).max() / abs(expected).max())


def test_training_is_that_of_the_plain_mlp_under_autograd(results: dict[str, Any]) -> None:
    for case, _, parts in outcomes(results):
        expected = reference(case["batch"], case["steps"], case["optimizer"])
        tolerance = 1e-5 if "dtype" in case else 1e-12
        for part, what in itertools.product(parts, ("losses", "norms")):
            assert relative(expected[what], part[what]) < tolerance, (case, len(parts), what)
        for what in ("gradients", "weights"):
            names = [name for part in parts for name in part[what]]
            assert sorted(names) == sorted(expected[what])  # each on one rank
            found = {name: values for part in parts for name, values in part[what].items()}
            for name, values in expected[what].items():
                assert relative(values, found[name]) < tolerance, (case, len(parts), what, name)


def test_bytes_are_those_of_the_sides_on_which_a_stage_has_a_neighbour(results: dict[str, Any]) -> None:
    for case, schedule, parts in outcomes(results):
        size = 4 if "dtype" in case else 8
        for rank, part in enumerate(parts):
            numbers = 0
            for stage, border in enumerate(itertools.pairwise(schedule.owner), 1):
                width = SIZES[sum(sizes_of(len(SIZES) - 1, schedule.stages)[:stage])]
                numbers += width * (border[0] != border[1] and rank in border)
            assert part["bytes"] == [case["batch"] * numbers * size] * 2


def test_ranks_compute_what_the_list_says_in_its_order(results: dict[str, Any]) -> None:
    for _, schedule, parts in outcomes(results):
        for mine, part in zip(schedule.lists, parts, strict=True):
            assert [text for text, _, _ in part["events"]] == [str(i) for i in mine if i.op in COMPUTE]
            times = [t for _, start, end in part["events"] for t in (start, end)]
            assert times == sorted(times)


def test_1f1b_holds_less_than_gpipe(results: dict[str, Any]) -> None:
    """With nine micro-batches on two ranks, GPipe stores all nine on both ranks, 1F1B two and one."""
    first = {
        case["schedule"]: [part["buffers"] for part in parts]
        for case, _, parts in outcomes(results)
        if (case["micro_batches"], len(parts)) == (9, 2)
    }
    assert first["1f1b"][0] < first["gpipe"][0] / 3
    assert first["1f1b"][1] < first["gpipe"][1] / 5


def test_what_does_not_fit_is_refused_on_every_rank(results: dict[str, Any]) -> None:
    for ranks in results.values():
        size = len(ranks)
        for _, said in ranks:
            assert said == [
                f"ValueError: the schedule is for {size + 1} ranks; there are {size}",
                f"ValueError: {size - 1} layers are too few for {size} stages"
                if size > 1
                else "ValueError: an MLP needs two or more sizes, all positive, the last at most 256",
                "ValueError: a batch of 3 cannot be cut into 4 micro-batches",
                said[3],
                "ValueError: dtype is float16; it is float64 or float32",
            ]
            assert said[3].startswith("ValueError: no weights for layers.")


@pytest.mark.parametrize("name", KINDS)
def test_the_bubble_is_python_s(name: str) -> None:
    need_module("pp_mpi")
    import pp_mpi

    for ranks, micro_batches in itertools.product((1, 2, 4), (1, 3, 8)):
        schedule = make_schedule(name, ranks, micro_batches)
        for f, i, w in ((1, 1, 1), (2, 5, 3)):
            takes = {"F": f, "B": i + w, "I": i, "W": w}
            expected = float(simulate(schedule, lambda computed: takes[computed.op]).bubble)  # noqa: B023
            assert pp_mpi.bubble(str(schedule), f, i, w) == pytest.approx(expected, abs=1e-12)


RIGHT = """F 0 0;SX 0 0;F 0 1;SX 0 1;RG 0 0;B 0 0;RG 0 1;B 0 1
RX 1 0;F 1 0;RX 1 1;B 1 0;SG 1 0;F 1 1;B 1 1;SG 1 1"""


@pytest.mark.parametrize(
    ("what", "instead", "says"),
    [
        ("F 0 0;", "F 0;", "'F 0' is no instruction; one is F 0 3"),
        ("F 0 0;", "G 0 0;", "'G 0 0' is no instruction"),
        ("F 0 0;", "F 0 x;", "'F 0 x' is no instruction"),
        ("F 0 0;", "F 0 -1;", "'F 0 -1' is no instruction"),
        ("F 0 0;", "F 0 99999999999;", "is no instruction"),
        ("F 0 0;", "\x1b[2J;", r"'\?\[2J' is no instruction"),
        ("F 0 0;", "F 0 0;F 0 0;", "rank 0 has 'F 0 0' twice"),
        (";B 0 1", "", "rank 0, stage 0, micro-batch 1 has F; F B or F I W is needed"),
        ("B 0 1", "W 0 1", "rank 0, stage 0, micro-batch 1 has F W; F B or F I W is needed"),
        ("B 0 1", "B 1 1", "rank 0 has 'B 1 1', but stage 1 is rank 1's"),
        ("B 0 1", "B 0 1;F 3 0", "nobody computes 'F 2 0'"),
        ("B 0 1", "B 0 1;B 7 0", "rank 0 has 'B 7 0'; there are stages 0 to 1"),
        ("SG 1 1", "SG 1 1;SX 1 1", "rank 1 has 'SX 1 1'; there are stages 0 to 1"),
        ("F 0 0;", "B 0 0;F 0 0;", "rank 0 has 'B 0 0' twice"),
        ("F 1 1;B 1 1;", "B 1 1;F 1 1;", "rank 1, stage 1, micro-batch 1: backward stands before forward"),
        ("SX 0 1;", "", "rank 0 never sends 'SX 0 1'"),
        ("F 0 1;SX 0 1;", "SX 0 1;F 0 1;", "rank 0 sends 'SX 0 1' before it has made it"),
        ("RX 1 1;B 1 0;SG 1 0;F 1 1;", "B 1 0;SG 1 0;F 1 1;RX 1 1;", "rank 1 computes 'F 1 1' before it receives"),
        ("RG 0 1;", "", "rank 0 computes 'B 0 1' before it receives 'RG 0 1'"),
        ("RX 1 0;F 1 0;RX 1 1;", "RX 1 1;RX 1 0;F 1 0;",
         "from rank 0 to 1, message 0: 'SX 0 0' is sent, 'SX 0 1' expected"),
        ("SG 1 1", "SG 1 1;RX 1 2", "from rank 0 to 1, message 2: nothing is sent, 'SX 0 2' expected"),
        ("F 0 0;SX 0 0;F 0 1;SX 0 1;RG 0 0;B 0 0;", "F 0 0;SX 0 0;RG 0 0;B 0 0;F 0 1;SX 0 1;", ""),
        ("RX 1 0;F 1 0;RX 1 1;B 1 0;SG 1 0;F 1 1;B 1 1;SG 1 1",
         "RX 1 0;RX 1 1;F 1 0;F 1 1;B 1 0;SG 1 0;B 1 1;SG 1 1", ""),
        (RIGHT, "", "a list without a forward computes nothing"),
    ],
)  # fmt: skip
def test_a_list_that_is_wrong_is_refused(what: str, instead: str, says: str) -> None:
    need_module("pp_mpi")
    import pp_mpi

    assert what in RIGHT
    changed = RIGHT.replace(what, instead, 1)
    if not says:
        pp_mpi.bubble(changed)
        return
    with pytest.raises(ValueError, match=says) as caught:
        pp_mpi.bubble(changed)
    assert "\n" not in str(caught.value)


def test_ranks_that_wait_for_ever_are_refused() -> None:
    need_module("pp_mpi")
    import pp_mpi

    orders = ("F0 B0 F1 B1", "F0 F1 B0 B1")
    computed = [
        [Instruction(op, stage, int(m)) for op, m in order.split()]  # type: ignore[arg-type]
        for stage, order in enumerate(orders)
    ]
    with pytest.raises(
        ValueError, match="wait for one another for ever: rank 0 at 'B 0 0', rank 1 at 'F 1 1'"
    ):
        pp_mpi.bubble(str(connect("stuck", 2, (0, 1), computed)))


SMALL = ["--hidden", "24", "--context", "4", "--steps", "2"]


def test_binary_proves_itself_and_writes_records(tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    done = mpirun(3, need_binary("pp_mpi"), *SMALL, "--batch", "10", "--json", file)
    assert done.returncode == 0, done.stderr
    assert "proved: training on 3 rank(s) equals training on one, bytes counted = formula." in done.stdout
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert not any(map(problem, records))
    assert [r["implementation"] for r in records] == [f"pp_mpi-{name}" for name in KINDS]
    for r in records:
        assert (r["strategy"], r["ranks"], r["equal"], len(r["step_seconds"])) == ("pp", 3, True, 2)
        assert (r["language"], r["tokens_per_step"], r["micro_batches"]) == ("cpp-mpi", 10, 8)
        assert r["parameters"] == 32 * 24 + 7 * 24 * 24 + 24 * 256 + 8 * 24 + 256
        assert 0 < r["largest_difference"] < 1e-12
        sides = 4 if r["implementation"] in ("pp_mpi-interleaved", "pp_mpi-zb-v") else 2
        assert r["bytes_counted"] == r["bytes_formula"] == sides * 10 * 24 * 8
        assert 0 <= r["bubble_simulated"] < 1
        assert 0 <= r["bubble_measured"] < 1
    assert records[0]["bubble_equal_times"] == pytest.approx(2 / 10)


def test_benchmark_of_a_list_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(RIGHT + "\n")
    file = tmp_path / "record.json"
    size = ["--benchmark", *SMALL, "--batch", "6", "--list", tmp_path / "mine.txt", "--json", file]
    done = mpirun(2, need_binary("pp_mpi"), *size)
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert not problem(record)
    assert (record["implementation"], record["equal"], record["micro_batches"]) == (
        "pp_mpi-mine.txt",
        None,
        2,
    )


def test_a_list_with_swapped_messages_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "swapped.txt").write_text(RIGHT.replace("RX 1 0;F 1 0;RX 1 1;", "RX 1 1;RX 1 0;F 1 0;"))
    done = mpirun(2, need_binary("pp_mpi"), "--list", tmp_path / "swapped.txt")
    assert (done.returncode, done.stdout) == (2, "")
    message = "pp_mpi: swapped.txt: from rank 0 to 1, message 0: 'SX 0 0' is sent, 'SX 0 1' expected"
    assert done.stderr.count("pp_mpi:") == done.stderr.count(message) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "5"], "--batch 5 cannot be cut into 8 micro-batches; give between 1 and 5"),
        (["--layers", "1"], "--layers 1 are too few for the 2 stages of interleaved on 1 rank(s); at least 2"),
        (["--chunks", "1000"],
         "--layers 9 are too few for the 1000 stages of interleaved on 1 rank(s); at least 1000"),
        (["--schedule", "dualpipe"],
         "--schedule dualpipe: choose one of all, gpipe, 1f1b, interleaved, zb-h1, zb-v"),
        (["--micro-batches", "0"], "--micro-batches 0: give a number from 1 to 1000000000"),
        (["--list", "/no/such/list"],
         "no such file: /no/such/list (--list takes what pp_schedules.py prints)"),
        (["--list", "RIGHT"], "RIGHT is for 2 rank(s); there are 1"),
        (["--list", "."], "no such file: . (--list takes what pp_schedules.py prints)"),
        (["--list", "/dev/zero"], "no such file: /dev/zero (--list takes what pp_schedules.py prints)"),
        (["--data", "/no/such/text"], "no such file or folder: /no/such/text (--data takes any text)"),
        (["--json", "/no/such/folder/record.json"], "cannot write to /no/such/folder/record.json"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("RIGHT").write_text(RIGHT)
    assert refused_by("pp_mpi", *arguments) == message


def test_without_python_a_list_is_asked_for() -> None:
    broken = {"PYTHONHOME": "/no/such/python"}
    done = mpirun(2, need_binary("pp_mpi"), "--schedule", "1f1b", environment=broken)
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = (line for line in done.stderr.splitlines() if line.startswith("pp_mpi: "))
    assert "pp_schedules.py' --schedule 1f1b --ranks 2 --micro-batches 8 --chunks 2 fails" in said
    assert said.endswith("--list FILE takes one from a file")
