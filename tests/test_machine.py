"""The machine kit's tools: faults that are put in are found and named; records, reports, scripts."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machines
import pytest
import torch
from mpi.launch import python
from torch import nn

from common.errors import RankError, UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.machine import communication, largest, monitor, report, stress, throughput, training
from common.machine.source import Source
from common.machine.stress import StressOptions
from common.machine.tracker import Tracker, read_tensorboard
from common.machine.training import TrainingOptions
from common.machine.verdict import Line, failed, headline

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts/machine"
QUICK = communication.CommunicationOptions(sizes_mb=(0.01, 0.05), calls=20)


def tool(*words: str, timeout: int = 120) -> subprocess.CompletedProcess[str]:
    """Run a tool's command line."""
    command = [python(), ROOT / "common" / "machine" / "__main__.py", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT)


def line_of(lines: list[Line], name: str) -> Line:
    """Return the line of that name."""
    return next(line for line in lines if line.name == name)


def sound(rt: Runtime) -> tuple[list[Line], list[Line]]:
    """Run communication and training as they are."""
    return communication.communicate(rt, QUICK)[0], training.check_training(
        rt, TrainingOptions(calls=20, slow=50)
    )


@pytest.mark.parametrize("n", [2, 3])
def test_a_sound_machine_passes(n: int) -> None:
    for lines in spawn(sound, n)[0]:
        lines = [
            line for line in lines if line.name not in ("latency of ranks", "links")
        ]  # of a machine that others use
        assert not failed(lines), headline(lines)
        assert {line.status for line in lines} <= {"pass", "skipped"}


def wrong_sum(rt: Runtime) -> list[Line]:
    """Let one sum of 10,000 be wrong on rank 1."""
    good, calls = communication.comm.all_reduce, itertools.count()

    def sometimes_wrong(x: torch.Tensor, *args: Any) -> None:
        good(x, *args)
        if next(calls) == 7654:
            x[3] += 1

    if rt.rank == 1:
        communication.comm.all_reduce = sometimes_wrong  # type: ignore[assignment]
    try:
        return [communication.many_sums(rt, 10_000)]
    finally:
        communication.comm.all_reduce = good


def test_a_wrong_sum_in_ten_thousand_is_found() -> None:
    for lines in spawn(wrong_sum, 2):
        assert headline(lines).startswith("FAIL: small sums: rank 1: 1 of 10,000 wrong")


def slow_rank(rt: Runtime) -> tuple[Line, Line]:
    """Let rank 1 take long for its work, and rank 2 for its messages."""
    if rt.rank == 1:
        training.product = lambda device: lambda: time.sleep(0.2)
    if rt.rank == 2:
        good = communication.comm.send
        communication.comm.send = lambda *a: (time.sleep(0.2), good(*a))[1]  # type: ignore[assignment, return-value]
    work = training.speed_of_ranks(rt, TrainingOptions(slow=20))
    delays, speeds = communication.pair_matrix(rt, 4096, 3)
    return work, line_of(communication.pair_lines(delays, speeds, machine_of({}), 3), "latency of ranks")


def machine_of(answers: machines.Answers) -> Any:
    """Return the facts of a recorded machine."""
    return communication.read_host(Source(answers))


def test_slow_ranks_are_named() -> None:
    work, messages = spawn(slow_rank, 3)[0]
    assert work.status == "fail"
    assert work.found.startswith("rank 1 takes ")
    assert messages.status == "fail"
    assert messages.found.startswith("rank 2 has a latency of ")


def hangs(rt: Runtime) -> None:
    """Let rank 1 never come to a collective."""
    if rt.rank == 1:
        time.sleep(1000)
    communication.communicate(rt, QUICK)


def test_a_hang_is_named() -> None:
    with pytest.raises(RankError, match=r"rank 0 stands in send to 1 .*\n.*rank 1 stands .*hangs") as failure:
        spawn(hangs, 2, timeout=10)
    assert failure.value.code == 1


def test_too_little_memory_is_one_line() -> None:
    done = tool("throughput", "--batch-size", "9000000", "--iterations", "2", "--no-alone", "--nproc", "2")
    assert done.returncode == 2
    assert "there is not enough memory for these sizes" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def wrong_training(rt: Runtime, what: str) -> Line:
    """Break one thing of training."""
    o = TrainingOptions()
    if what == "bits":
        good = training.gradients_of
        training.gradients_of = lambda model: good(model) * (1 + 1e-6 * (rt.rank == 1))
        return training.gradients_alike(rt, o)

    def not_averaged(model: nn.Module, rt: Runtime) -> nn.Module:
        return model

    def scaled(model: nn.Module, rt: Runtime) -> nn.Module:
        for p in model.parameters():
            p.register_hook(lambda g: g * 1.001)
        return training.as_ddp(model, rt)

    wrap: dict[str, Callable[[nn.Module, Runtime], nn.Module]] = {"alone": not_averaged, "scaled": scaled}
    return training.equal_to_one_process(rt, o, "DDP", wrap[what])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("bits", "differs from the others in 24 of 24 steps"),
        ("alone", "difference"),
        ("scaled", "difference"),
    ],
)
def test_wrong_training_is_found(what: str, words: str) -> None:
    line = spawn(wrong_training, 2, what)[0]
    assert line.status == "fail"
    assert words in line.found


def stressed(rt: Runtime, what: str, state: Path | None) -> tuple[list[Line], int]:
    """Stress with something broken on rank 1 in the second round; return the lines and the rounds."""
    good_products, good_walk = stress.Work.products, stress.Work.walk

    def products(self: stress.Work) -> tuple[float, str]:
        if what == "odd":
            self.digest = "odd"
        if what == "bit":
            self.right[3, 5] += 1e-6
        seconds, problem = good_products(self)
        return 10 * seconds if what == "slow" else seconds, problem

    def walk(self: stress.Work) -> tuple[int, str]:
        return (64, "memory does not hold what was written") if what == "memory" else good_walk(self)

    if rt.rank == 1:
        stress.Work.products, stress.Work.walk = products, walk  # type: ignore[method-assign]
    o = StressOptions(minutes=0.02, size=64, memory=0.02, calls=5, state=state)
    lines = stress.stress(rt, o)
    return lines, len(state.read_text().splitlines()) if state and state.exists() else 0


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nothing", "PASS"),
        ("bit", "FAIL: bits and memory: rank 1: a product's bits changed: 1 of 4,096 numbers"),
        ("memory", "FAIL: bits and memory: rank 1: memory does not hold what was written"),
        ("odd", "FAIL: bits across ranks: rank 1 differ"),
        ("slow", "WARN: slowest rank: rank 1 with "),
    ],
)
def test_stress_names_what_is_wrong(what: str, words: str, tmp_path: Path) -> None:
    lines, rounds = spawn(stressed, 2, what, tmp_path / "state")[0]
    if what != "slow":
        lines = [line for line in lines if line.name not in ("slowest rank", "speed over time")]
    assert re.match(words, headline(lines)), headline(lines)
    assert rounds >= 1
    if what == "memory":
        assert rounds == 1  # it ended at once


def again(rt: Runtime, state: Path, size: int) -> list[Line]:
    """Stress for a moment with this state."""
    return stress.stress(rt, StressOptions(minutes=0.01, size=size, memory=0.02, calls=5, state=state))


def test_a_stopped_stress_goes_on_and_a_finished_one_begins_anew(tmp_path: Path) -> None:
    state = tmp_path / "state"
    spawn(again, 2, state, 64)
    whole = state.read_text().splitlines()
    first = json.loads(whole[0])
    first["rounds"][0]["seconds"] = 0.1
    state.write_text(json.dumps(first) + "\n")
    found = line_of(spawn(again, 2, state, 64)[0], "time").found
    assert "1 round(s) from before" in found
    found = line_of(spawn(again, 2, state, 64)[0], "time").found
    assert "0 round(s) from before" in found
    first["rounds"][1]["digest"] = "0"  # of rank 1
    state.write_text(json.dumps(first) + "\n")
    found = headline(spawn(again, 2, state, 64)[0])
    assert found.startswith("FAIL: bits and memory: rank 1: a product's bits changed")
    state.write_text(json.dumps(first) + "\n")
    with pytest.raises(RankError, match="other ranks or --size"):
        spawn(again, 2, state, 32)
    state.write_text("no JSON\n")
    with pytest.raises(RankError, match="remove it to begin anew"):
        spawn(again, 1, state, 64)


@pytest.mark.parametrize("most", [1, 5, 100])
@pytest.mark.parametrize("fits", [0, 1, 2, 3, 37, 64, 99, 1000])
def test_the_largest_batch_is_found(fits: int, most: int) -> None:
    tried: list[int] = []

    def try_batch(batch: int) -> bool:
        tried.append(batch)
        return batch <= fits

    assert largest.largest_batch(try_batch, most) == min(fits, most)
    assert len(tried) == len(set(tried)) <= 15


def test_links_are_compared_with_others_of_their_kind() -> None:
    host = machine_of(machines.machine("h100", 8))
    speeds = dict.fromkeys(itertools.combinations(range(8), 2), 400000000000.0)
    delays = dict.fromkeys(speeds, 1e-5)
    assert not [x for x in communication.pair_lines(delays, speeds, host, 8) if x.status != "pass"]
    speeds[2, 5] = 90e9
    found = line_of(communication.pair_lines(delays, speeds, host, 8), "links")
    assert found.status == "warn"
    assert "slowest 2-5 with 90.00 GB/s, median 400.00 (NV18)" in found.found


def test_the_fit_of_times_is_exact() -> None:
    sizes = [2**k for k in range(10, 27, 4)]
    latency, bandwidth = communication.fit(sizes, [5e-6 + size / 20e9 for size in sizes])
    assert latency == pytest.approx(5e-6)
    assert bandwidth == pytest.approx(20e9)


def test_the_range_of_a_machine_is_compared() -> None:
    host = machine_of(machines.machine("a100", 8))
    rt = Runtime(0, 8, 0, 8, "torchrun", torch.device("cpu"), "nccl", 60.0, communication.comm.Group.alone())
    for gb_s, status in ((250, "pass"), (160, "warn"), (40, "fail")):
        size = 64 * 2**20
        row = communication.Row("all-reduce", True, size, [size / (gb_s * 1e9) * 1.75], 1.75)
        line = communication.expected([row], host, rt)
        assert line.status == status
        assert f"{gb_s} GB/s at 64 MiB, expected 200 to 300 for 8 A100 80GB" in line.found


def bus_factors(rt: Runtime) -> dict[str, float]:
    """Return the bus factors by name."""
    return {f"{name} {place}": factor for (name, place), (_, factor) in communication.cases(rt, 4096).items()}


def test_bus_factors_are_those_of_nccl_tests() -> None:
    found = spawn(bus_factors, 4)[1]
    ring = {"all-reduce": 2 * 3 / 4, "all-gather": 3 / 4, "reduce-scatter": 3 / 4, "all-to-all": 3 / 4}
    for name, factor in found.items():
        assert factor == ring.get(name.rpartition(" ")[0], 1.0), name


def test_stress_compares_before_and_after() -> None:
    whole = machines.machine("h100", 8)
    before = machine_of(whole)
    assert [line.status for line in stress.watched(before, machine_of(whole))] == ["pass"] * 4
    for change, words in (
        ({"DeviceGetTotalEccErrors 3 1 0": 2}, "FAIL: ECC errors: GPU 3: 2 uncorrected"),
        ({"DeviceGetTotalEccErrors 3 0 0": 1}, "WARN: corrected ECC errors: GPU 3: 1 corrected"),
        ({"run dmesg": f"NVRM: Xid (PCI:{machines.bus(2)}): 79, x"}, "FAIL: XID errors: XID 79"),
        ({"DeviceGetCount": 7}, "FAIL: GPUs: some are not listed"),
    ):
        assert headline(stress.watched(before, machine_of(whole | change))).startswith(words)
    cool, hot = (
        stress.Round(1.0, "x", 1.0, 0, temperature=t, throttle=b) for t, b in ((60, 0x4), (97, 0x40))
    )
    assert [line.status for line in stress.heat([[cool, cool]], before)] == ["pass", "pass"]
    lines = stress.heat([[cool, cool], [cool, hot]], before)
    assert "rank 1 with 97 °C" in lines[0].found
    assert [line.status for line in lines] == ["fail", "fail"]


def run_of(**changes: Any) -> throughput.Run:
    """Return a run of 8 A100 with 100 steps of a quarter of a second."""
    options = throughput.ThroughputOptions(amp=True)
    given = {
        "seconds": [0.25] * 100,
        "medians": [0.25] * 8,
        "losses": [7.0] * 105,
        "alone": 0.2,
        "gpu": machines.KINDS["a100"][0],
    }
    return throughput.Run(options, 8, flops=24e9, peak=2**30, **(given | changes))  # type: ignore[arg-type]


def test_throughput_by_hand() -> None:
    run = run_of()
    assert run.speed == 8 * 64 / 0.25
    assert run.efficiency == pytest.approx(0.8)
    found = {line.name: line for line in throughput.lines_of(run)}
    assert found["speed"].found == "2,048.0 images/s on 8 rank(s), 256.0 per rank"
    assert found["MFU"].found == f"{24e9 * 64 / 0.25 / 312e12:.1%} of 312 TFLOP/s"
    assert found["efficiency"].found == "80% of 320.0 images/s of one rank alone"
    assert found["images/s against the expected"].status == "warn"  # 3500 to 4500 with AMP
    assert found["step"].status == "pass"
    slow = {
        line.name: line
        for line in throughput.lines_of(run_of(seconds=[0.1] * 80 + [0.5] * 20, medians=[0.1] * 7 + [0.3]))
    }
    assert slow["step"].status == slow["ranks"].status == "warn"
    assert slow["ranks"].found.startswith("rank 7: 300.0 ms")
    assert throughput.lines_of(run_of(losses=[7.0, float("nan")]))[-1].status == "fail"


def test_monitor_of_a_recorded_machine() -> None:
    fields = [{"nvmlReturn": 0, "value": 1000}, {"nvmlReturn": 0, "value": 2000}]
    links = {"DeviceGetFieldValues 0 138 139": fields}
    answers = machines.machine("h100", 8) | {"DeviceGetPcieThroughput 0 0": 1_000_000} | links
    machines.lose(answers, 7)
    sample = monitor.Monitor(Source(answers)).sample()
    assert [gpu["temperature_c"] for gpu in sample["gpus"]] == [34] * 7 + [None]
    assert sample["gpus"][0]["pcie_gb_s"] == [1.0, None]
    assert sample["gpus"][7]["lost"]
    assert sample["gpus"][0]["nvlink_gb_s"] == []  # a rate needs two samples
    assert monitor.rates((1.0, [1000, 2000]), (3.0, [1000 + 10**6, 2000])) == [0.512, 0.0]
    assert "GPU 3 0 % 0.5 GiB 34 °C 60 W" in monitor.as_line(sample)
    assert monitor.as_table(sample).row_count == 9


def test_monitor_writes_samples(tmp_path: Path) -> None:
    done = tool("monitor", "--seconds", "0.5", "--every", "0.2", "--json", str(tmp_path / "load"))
    assert done.returncode == 0, done.stderr
    samples = [json.loads(line) for line in (tmp_path / "load").read_text().splitlines()]
    assert len(samples) == len(done.stdout.splitlines()) >= 2
    assert all(s["memory_used_gib"] > 0 and s["gpus"] == [] for s in samples)


def test_report_of_two_machines(tmp_path: Path) -> None:
    for name, fault in (("good", None), ("bad", "an XID")):
        answers = machines.machine("a100", 8)
        if fault:
            machines.FAULTS[fault][2](answers)
        (tmp_path / f"{name}.json").write_text(json.dumps(answers))
        tool("check", "--answers", str(tmp_path / f"{name}.json"), "--json", str(tmp_path / f"{name}.jsonl"))
    rows = [{"name": "all-reduce", "in_place": True, "bytes": 2**k, "alg": k, "bus": k} for k in (20, 24)]
    lines = [{"name": "links", "status": "pass", "found": "<b>", "cure": "", "host": ""}]
    record = {"tool": "communication", "time": "now", "lines": lines, "rows": rows, "pairs": [[0, 1, 5, 90]]}
    with (tmp_path / "good.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    page = tmp_path / "page.html"
    code = report.main(report.ReportOptions((tmp_path / "good.jsonl", tmp_path / "bad.jsonl"), page))
    text = page.read_text()
    assert code == 1
    assert text.index("FAIL: check: XID errors") < text.index("<h2>check</h2>", text.index("FAIL"))
    assert text.count("<svg") == 2
    assert "<b>" not in text
    assert "GPU-7" in text  # the serial numbers
    assert text.count('<section class="machine">') == 2


def test_an_earlier_failure_is_in_the_report(tmp_path: Path) -> None:
    def record(status: str, title: str) -> str:
        line = {"name": "x", "status": status, "found": "y", "cure": "", "host": ""}
        return json.dumps({"tool": "stress", "title": title, "time": "now", "lines": [line]})

    file = tmp_path / "x.jsonl"
    file.write_text(f"{record('fail', 'a')}\n{record('pass', 'a')}\n{{cut\n")
    assert report.machine(file).verdict == "PASS: 1 pass; 1 earlier run(s) failed"
    file.write_text(f"{record('fail', 'a')}\n{record('pass', 'b')}\n")
    assert report.machine(file).verdict.startswith("FAIL: stress: x: y")
    file.write_text(record("FAILED", "a"))
    with pytest.raises(UsageError, match="line 1 is damaged"):
        report.machine(file)


@pytest.mark.parametrize("text", ["", "{}", "no JSON"])
def test_report_of_nothing_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(UsageError, match=r"x\.jsonl"):
        report.machine(tmp_path / "x.jsonl")


def test_tracker_and_its_pictures(tmp_path: Path) -> None:
    tracker = Tracker("tensorboard", "a run", folder=tmp_path / "logs")
    for step in range(3):
        tracker.log(step, {"images/s": 10.0 * step})
    tracker.end()
    assert read_tensorboard(tmp_path / "logs")["a-run"]["images/s"] == [(0, 0.0), (1, 10.0), (2, 20.0)]
    command = [python(), SCRIPTS / "plot_tracker.py", "--folder", tmp_path / "logs"]
    done = subprocess.run([*command, "--output", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "images_per_s.png").stat().st_size > 1000
    with pytest.raises(UsageError, match="pip install swanlab"):
        Tracker("swanlab", "a run")


@pytest.mark.parametrize(
    "options",
    [
        ("--strategy", "ddp", "--optimizer", "adamw", "--channels-last", "--loader", "1"),
        ("--strategy", "fsdp", "--amp", "--optimizer", "adam", "--no-alone"),
        ("--model", "gpt2-10m", "--sequence", "16", "--no-alone"),
    ],
    ids=" ".join,
)
def test_throughput(options: tuple[str, ...], tmp_path: Path) -> None:
    small = ("--batch-size", "2", "--image", "64", "--iterations", "2", "--warm-up", "0", "--nproc", "2")
    done = tool("throughput", *small, *options, "--json", str(tmp_path / "x"))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "x").read_text())
    assert record["speed"] > 0
    assert len(record["seconds"]) == 2


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_are_whole(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK) or script.name == "python.sh"


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.name)
def test_python_scripts_have_help(script: Path) -> None:
    done = subprocess.run([python(), script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--" in done.stdout


@pytest.mark.slow
def test_everything_without_a_gpu(tmp_path: Path) -> None:
    env = {**os.environ, "NPROC": "2"}
    done = subprocess.run(["bash", str(SCRIPTS / "test_8gpu.sh")], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    for file in ROOT.glob("gpu_test_*"):
        file.unlink()
