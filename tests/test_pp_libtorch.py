"""pp_libtorch: the Python module against the plain Transformer on gloo and on MPI; schedules; the program."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi.launch import need_module, on_gloo, refused_by
from mpi.programs import proved, timed, trained

from common.lesson.equality import OPTIMIZERS
from common.models.transformer import Transformer, config

from pp_checker import ScheduleError, check
from pp_schedules import KINDS, make_schedule


def equal(found: list[dict[str, Any]]) -> None:
    """Check every rank's outcomes, of every schedule."""
    from mpi.pp_libtorch_worker import CONFIG

    whole = dict(Transformer(CONFIG).named_parameters())
    for case in found[0]["trained"]:
        of_ranks = [rank["trained"][case] for rank in found]
        for one in of_ranks:
            assert max(one["apart"].values()) < 1e-12, (case, one["apart"])
            counted, formula = one["bytes"]
            assert counted == pytest.approx(formula, rel=1e-12), case
        held = [name for one in of_ranks for name in one["names"]]
        assert set(held) == set(whole)
        tied = len(found) > 1 and case != "zb-v"
        assert {name for name in held if held.count(name) > 1} == ({"embed_tokens.weight"} if tied else set())


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_module_equals_one_device_on_gloo(ranks: int) -> None:
    equal(on_gloo("pp_libtorch", ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_module_equals_one_device_on_mpi(ranks: int, found_on_mpi: dict[int, Any]) -> None:
    equal(found_on_mpi[ranks])


def test_what_does_not_fit_is_said(found_on_mpi: dict[int, Any]) -> None:
    for n, found in found_on_mpi.items():
        for rank, of_rank in enumerate(found):
            run_without = "ValueError: 0 micro-batches for a schedule of 2"
            assert of_rank["refused"] == [
                f"ValueError: the schedule is for {n + 1} rank(s); there are {n}",
                f"ValueError: 8 layers are too few for {9 * n} stages",
                "ValueError: width 16 does not divide into 3 heads",
                "ValueError: no parameter norm.bias among the 131 given" if rank == n - 1 else run_without,
                run_without,
            ]


def test_gradients_of_matrices_wait_for_w() -> None:
    need_module("pp_libtorch")
    from mpi.pp_libtorch_worker import CONFIG, batch

    import pp_libtorch

    whole, one, late = dict(Transformer(CONFIG).named_parameters()), pp_libtorch.Ranks(None), set()
    pipe = pp_libtorch.Pipeline(whole, CONFIG.heads, "F 0 0;I 0 0;W 0 0", one, one)
    for name, p in pipe.parameters().items():  # called by I for each, with a gradient or without
        p.register_post_accumulate_grad_hook(lambda p, name=name: late.add(name) if p.grad is None else None)
    pipe.run([batch(0)], 1.0)
    assert all(p.grad is not None for p in pipe.parameters().values())
    assert late == {name for name in whole if name.endswith("proj.weight")}


# The lists


def test_its_checks_find_what_those_of_python_find() -> None:
    need_module("pp_libtorch")
    import pp_libtorch

    chosen, wrong = random.Random(0), 0
    for name in KINDS:
        schedule = make_schedule(name, 3, 4)
        pp_libtorch.check(str(schedule))
        for _ in range(100):
            lists = [list(instructions) for instructions in schedule.lists]
            one = chosen.choice(lists)
            a, b = chosen.randrange(len(one)), chosen.randrange(len(one))
            match chosen.choice(["swap", "drop", "repeat", "move"]):
                case "swap":
                    one[a], one[b] = one[b], one[a]
                case "drop":
                    del one[a]
                case "repeat":
                    one.insert(b, one[a])
                case "move":
                    chosen.choice(lists).insert(0, one.pop(a))
            changed = replace(schedule, lists=tuple(map(tuple, lists)))
            try:
                check(changed)
                pp_libtorch.check(str(changed))
            except ScheduleError:
                wrong += 1
                with pytest.raises(pp_libtorch.UsageError):
                    pp_libtorch.check(str(changed))
    assert 300 < wrong < 500


# The program


def test_gpt2_trains_as_in_python(tmp_path: Path) -> None:
    arguments = ["--batch", "5", "--micro-batches", "3", "--sequence", "12", "--steps", "2"]
    claim = "training in stages on 3 rank(s) equals training on one."
    losses, records = proved("pp_libtorch", 3, claim, tmp_path, *arguments)
    for optimizer in OPTIMIZERS:
        expected = trained(Transformer(config("gpt2-deep"), 0, torch.float64), optimizer, 2, 5, 12)
        assert losses[optimizer] == pytest.approx(expected, abs=1e-9)
    assert [r["implementation"] for r in records] == [f"pp_libtorch-{name}" for name in KINDS]
    plain = Transformer(config("gpt2-deep"))
    for values in records:
        assert values["strategy"] == "pp"
        assert (values["tokens_per_step"], values["parameters"]) == (60, plain.parameter_count())
        assert values["flop_per_step"] == pytest.approx(60 * plain.flops_per_token(12))
        name = values["implementation"].removeprefix("pp_libtorch-")
        borders = {"interleaved": 5, "zb-v": 4}.get(name, 2)
        numbers = 2 * borders * 60 * 32 + (name != "zb-v") * 2 * 256 * 32 + 2 * 2
        assert values["bytes_counted"] == values["bytes_formula"] == pytest.approx(8 * numbers / 3)


def test_benchmark_of_a_list_writes_what_it_timed(tmp_path: Path) -> None:
    file = tmp_path / "mine"
    file.write_text(f"{make_schedule('zb-h1', 2, 3)}\n")
    assert timed("pp_libtorch", tmp_path, "--list", file)["implementation"] == "pp_libtorch-mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "4"], "--batch 4 cannot be cut into 8 micro-batches; give between 1 and 4"),
        (
            ["--schedule", "interleaved", "--chunks", "17"],
            "16 layers of gpt2-deep are too few for the 17 stages of",
        ),
        (["--list", "no/such/file"], "no such file: no/such/file (--list takes what pp_schedules.py prints)"),
        (["--list", __file__], "test_pp_libtorch.py: '"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    assert refused_by("pp_libtorch", *arguments).startswith(message)


def test_python_that_gives_no_list_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tyro.py").write_text("raise SystemExit(3)")
    said = refused_by("pp_libtorch", environment={"PYTHONPATH": str(tmp_path)})
    assert said.startswith("Python gave no list: ")
    assert said.endswith("; --list FILE takes one from a file")
