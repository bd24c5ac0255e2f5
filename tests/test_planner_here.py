"""The planner on the machine that it runs on: its measurement, ranks that share cores, steps that it compares with."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from mpi.launch import ROOT, python, run

from measure_meshes import MESHES, lines, sentence
from plan_calibration import cases, features, fit
from plan_job import Job
from plan_layout import CODES, Plan
from plan_machine import Links, Machine, read_machine, tomllib
from plan_models import model
from plan_picture import bars
from plan_search import plans, search
from plan_stage import stages
from plan_time import bound, predict
from plan_work import Product

PLANNER = ROOT / "06-hybrid-parallelism" / "planner"
LINKS = Links(8, {2: (1e-5, 1e11), 4: (2e-5, 1e11)}, host_bandwidth=4e10, efficiency=0.5, latency=1e-6)
OWN = Machine(*("own", 80e9, 1e12, {"bfloat16": 1e14}, 0.5, 0.5, 1e-5, 0.0, 0.0, 0.0, LINKS))
SHARED = replace(OWN, name="shared", at_once=2.0)  # ranks on a machine with two cores


def job(machine: Machine, batch: int = 16) -> Job:
    return Job(model("llama-10m"), CODES["ours"], machine, batch, 256)


def test_ranks_that_share_cores_take_what_they_ask_of_them() -> None:
    own, shared = job(replace(OWN, at_once=4.0)), job(SHARED)
    for plan in (Plan(dp=4, micro_batch=2), Plan(tp=4), Plan(sp=4), Plan(dp=2, tp=2, micro_batch=2, zero=1)):
        assert predict(shared, plan).step == pytest.approx(2 * predict(own, plan).step)
        assert predict(shared, plan).busy == pytest.approx(2 * predict(own, plan).busy)
    for plan in (Plan(micro_batch=4), Plan(dp=2, micro_batch=4)):  # a core for each
        assert predict(shared, plan).step == predict(own, plan).step


def test_a_stage_that_waits_leaves_its_core_to_another() -> None:
    own, shared = job(replace(OWN, at_once=6.0), 12), job(SHARED, 12)
    one_by_one, full = Plan(pp=6, micro_batch=12), Plan(pp=6)
    assert predict(shared, one_by_one).pipeline == predict(own, one_by_one).pipeline
    asked = 12 * sum(stage.total for stage in stages(shared, full))  # seconds of a core, of all micro-batches
    assert predict(shared, full).pipeline == pytest.approx(asked / 2)
    assert predict(shared, full).pipeline > 1.5 * predict(own, full).pipeline


def test_nothing_hides_behind_computation_on_the_same_cores() -> None:
    plan = Plan(dp=2, micro_batch=8)
    assert predict(job(SHARED), plan).gradients > 1.2 * predict(job(OWN), plan).gradients
    assert OWN.overlaps
    assert not SHARED.overlaps


def test_the_search_on_shared_cores_finds_what_brute_force_finds() -> None:
    j = job(SHARED)
    times = {plan: predict(j, plan).step for plan in plans(j, 4, {})}
    for plan, took in times.items():
        assert bound(j, plan) <= took * (1 + 1e-9), plan
    found = [choice.time.step for choice in search(j, 4, {}, keep=5).best]
    assert found == pytest.approx(sorted(times.values())[:5])


def test_what_is_fitted_are_operations_and_bytes() -> None:
    code = replace(CODES["ours"], dtype="float32")
    made = {case.name: case for case in cases(128, 256, code, torch.device("cpu"))}
    product = made["product 256 x 128 x 64"]
    assert product.work == [Product(256, 64, 128)]
    assert features(product, code) == [2 * 256 * 64 * 128, 0, 4 * (256 * 64 + 256 * 128 + 64 * 128), 1]
    attention = made["attention of 1 x 256 tokens"]  # two products forward, four backward
    assert features(attention, code)[:2] == [0, 6 * 2 * 2 * 256 * 256 * 64]
    step = features(made["llama of one layer, 1 x 256 tokens"], code)
    weights = 4 * 128 * 128 + 3 * 128 * 320 + 256 * 128
    assert step[0] == 6 * 256 * weights


def test_rates_are_recovered_from_the_times_that_they_give() -> None:
    code = replace(CODES["ours"], dtype="float32")
    table = [features(case, code) for case in cases(256, 512, code, torch.device("cpu"))]
    peak, bandwidth, start = 1e11, 4e10, 2e-5
    true = (1 / (0.8 * peak), 1 / (1.3 * peak), 1 / (0.6 * bandwidth), start)
    took = [sum(a * b for a, b in zip(row, true, strict=True)) for row in table]
    rates, predicted = fit(table, took, peak, bandwidth)
    found = (rates.products, rates.attention, rates.memory, rates.start)
    assert found == pytest.approx((0.8, 1.3, 0.6, start), rel=1e-6)
    assert predicted == pytest.approx(took)


def test_calibration_writes_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    small = ["--width", "64", "--tokens", "256", "--repeats", "5", "--sizes-mb", "0.01", "0.1"]
    done = run([str(python()), str(PLANNER / "calibrate.py"), "--nproc", "2", *small, "--out", str(file)])
    assert done.returncode == 0, done.stderr
    for shown in ("product 256 x 64 x 32", "AdamW on", f"wrote {file}"):
        assert shown in done.stdout
    machine = read_machine(str(file))
    assert machine.name == "mine"
    assert set(machine.links.inside) == {2}
    assert machine.at_once > 0
    assert set(tomllib.loads(file.read_text())) == {f.name for f in fields(Machine)}
    plan = "--model llama-10m --sequence 256 --gpus 2 --batch 16 --dtype float32".split()
    done = run([str(python()), str(PLANNER / "plan.py"), *plan, "--machine", str(file)])
    assert done.returncode == 0, done.stderr
    assert "x mine" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["calibrate.py"],
            "calibrate.py needs at least 2 ranks, all of them on one host; --nproc 4 starts four",
        ),
        (
            ["calibrate.py", "--nproc", "2", "--width", "100"],
            "--width 100: give a multiple of 64, such as 64",
        ),
        (
            ["calibrate.py", "--nproc", "2", "--tokens", "300"],
            "--tokens 300: give a multiple of 256, such as 256",
        ),
        (["calibrate.py", "--nproc", "2", "--out", "FILE/x.toml"], "cannot be written: "),
        (["measure_step.py", "--machine", "mine"], "--machine mine: choose one of a100-80gb"),
        (
            ["measure_step.py", "--batch", "6", "--micro-batches", "4"],
            "--batch 6 does not divide into 4 equal",
        ),
        (["measure_step.py", "--precision", "bfloat16", "--machine", "cpu"], "cpu has no peak for bfloat16"),
        (["calibrate.py", "--nproc", "2", "--out", "mine"], "--out mine: give a file that ends in .toml"),
        (["measure_meshes.py", "--models", "gpt5"], "model 'gpt5' is unknown"),
        (["measure_meshes.py", "--batch", "7", "--every", "22"], "--batch 7 does not divide into 2 equal"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str) -> None:
    given = [word.replace("FILE", str(PLANNER / "plan.py")) for word in arguments]
    done = run([str(python()), str(PLANNER / given[0]), *given[1:]])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert said in done.stderr


def test_the_order_of_meshes() -> None:
    def row(plan: str, seconds: float, predicted: float) -> dict[str, object]:
        made = {"model": "m", "plan": plan, "seconds": seconds, "predicted seconds": predicted, "spread": 0.1}
        return made if "zero=3" in plan else made | {"bytes": 2e6, "predicted bytes": 1e6}

    rows = [
        row("dp=2", 1.0, 1.1),
        row("tp=2", 1.05, 1.0),
        row("pp=2", 2.0, 1.05),
        row("dp=2 zero=3", 3.0, 3.0),
    ]
    # ranks: measured 1 2 3 4, predicted 3 1 2 4; of the five pairs apart, dp=2 and pp=2 are swapped
    assert "rank correlation: m 0.40; 4 of 5 pairs" in sentence(rows)
    (first, *_, last) = lines(rows)
    assert first == ("m", "dp=2", "1,000", "1,100", "+10.0%", "2", "1", "-50.0%", "10%")
    assert last[5:8] == ("", "", "")


def test_bars_are_as_long_as_the_numbers() -> None:
    rows = {"dp=2": {"computation": 2.0, "bubble": 1.0}, "pp=2": {"bubble": 0.5, "optimizer": 0.25}}
    axes = Figure().subplots()
    bars(axes, rows, "seconds per step")
    drawn = [
        (p.get_x(), p.get_width(), p.get_y() + p.get_height() / 2) for p in axes.patches if p.get_width()
    ]
    assert drawn == [(0, 2, 0), (2, 1, 0), (0, 0.5, 1), (0.5, 0.25, 1)]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(rows)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-10m", "gpt2-10m"])
def test_memory_of_eleven_meshes(model: str, tmp_path: Path) -> None:
    """Weights, gradients, states and activations, as tensors are counted, within 5 %."""
    file = tmp_path / "rows.jsonl"
    small = ["--memory-only", "--batch", "24", "--sequence", "64", "--every", "2"]
    command = [str(python()), str(PLANNER / "measure_meshes.py"), *small, "--json", str(file)]
    done = run([*command, "--models", model], timeout=290)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == len(MESHES[::2])
    for row in rows:
        assert row["predicted bytes"] == pytest.approx(row["bytes"], rel=0.05), row
