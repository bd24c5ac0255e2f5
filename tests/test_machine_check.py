"""The check of a machine: whole machines pass, each faulty one is named in the first line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import machines
import pytest

from common.errors import UsageError
from common.machine.check import checked
from common.machine.source import Source
from common.machine.verdict import failed, headline

WHOLE = [
    ("a100", 8, "PASS"),
    ("h100", 8, "PASS"),
    ("4090", 4, "WARN: peer access: not between GPUs 0-1"),
    ("h100", 1, "PASS"),
]


def levelled(answers: machines.Answers) -> machines.Answers:
    """Return the answers of a host with one socket, which has no far pairs of GPUs."""
    return {k: 40 if "CommonAncestor" in k and v == 50 else v for k, v in answers.items()}


@pytest.mark.parametrize(("kind", "count", "verdict"), WHOLE)
def test_whole_machines(kind: str, count: int, verdict: str) -> None:
    host, lines = checked(Source(levelled(machines.machine(kind, count))))
    assert headline(lines).startswith(verdict)
    assert len(host.gpus) == count
    assert not failed(lines)
    assert all(line.cure for line in lines if line.status in ("warn", "fail"))


@pytest.mark.parametrize("fault", machines.FAULTS)
def test_a_fault_is_named_in_the_first_line(fault: str) -> None:
    kind, count, break_it, words = machines.FAULTS[fault]
    answers = levelled(machines.machine(kind, count))
    break_it(answers)
    _, lines = checked(Source(answers))
    found = [line for line in lines if line.status != "pass"]
    if kind == "4090":  # these have no peer access, which is the first warning
        lines = [line for line in lines if line.name != "peer access"]
    assert re.match(words, headline(lines)), found
    assert failed(lines) == words.startswith("FAIL")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"DeviceGetCount": "8"}, "damaged"),
        ({"DeviceGetCount": 2.5}, "damaged"),
        ({"DeviceGetMemoryInfo 0": "x"}, "damaged"),
        ({"run df -B1 --output=size,avail /dev/shm": "a b c d"}, "damaged"),
        ({"torch cuda": "x"}, "damaged"),
    ],
)
def test_damaged_answers_are_refused(answers: machines.Answers, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        checked(Source(machines.machine("h100", 8) | answers))


def test_cards_for_slots_are_not_taken_for_others() -> None:
    answers = levelled(machines.machine("a100", 8))
    for i in range(8):
        answers[f"DeviceGetName {i}"] = "NVIDIA A100 80GB PCIe"
        answers |= {f"DeviceGetNvLinkState {i} {n}": 0 for n in range(12)}
    _, lines = checked(Source(answers))
    assert not failed(lines), headline(lines)
    [line] = [line for line in lines if line.name == "NVLink"]
    assert line.status == "skipped"


def test_bridges_join_pairs_only() -> None:
    answers = machines.machine("a100", 4)
    for i in range(4):
        answers |= {
            f"DeviceGetNvLinkRemotePciInfo {i} {n}": {"busId": f"0000{machines.bus(i ^ 1)}"}
            for n in range(12)
        }
    host, _ = checked(Source(answers))
    assert host.peers == {
        (0, 1): "NV12",
        (2, 3): "NV12",
        (0, 2): "SYS",
        (0, 3): "SYS",
        (1, 2): "SYS",
        (1, 3): "SYS",
    }


def test_sockets_far_apart_are_a_warning() -> None:
    _, lines = checked(
        Source(
            machines.machine("a100", 8)
            | {f"DeviceGetNvLinkState {i} {n}": None for i in range(8) for n in range(18)}
        )
    )
    [line] = [line for line in lines if line.name == "topology"]
    assert line.status == "warn"
    assert "16 pairs SYS" in line.found


def test_nvlinks_count_before_sockets() -> None:
    host, lines = checked(Source(machines.machine("h100", 8)))
    assert set(host.peers.values()) == {"NV18"}
    [line] = [line for line in lines if line.name == "topology"]
    assert line.status == "pass"


def test_this_machine_can_be_recorded_and_read_again(tmp_path: Path) -> None:
    here = Source()
    _, lines = checked(here)
    here.write(tmp_path / "machine.json")
    assert checked(Source.of(tmp_path / "machine.json"))[1] == lines


def test_a_file_without_answers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(UsageError, match="no object of answers"):
        Source.of(tmp_path / "x.json")


@pytest.mark.parametrize(("fault", "code"), [(None, 0), ("an XID", 1), ("MIG", 0)])
def test_command_line(fault: str | None, code: int, tmp_path: Path) -> None:
    answers = levelled(machines.machine("a100", 8))
    if fault:
        machines.FAULTS[fault][2](answers)
    (tmp_path / "machine.json").write_text(json.dumps(answers))
    command = [sys.executable, "-m", "common.machine", "check", "--answers", str(tmp_path / "machine.json")]
    outputs = ["--log", str(tmp_path / "log"), "--json", str(tmp_path / "records")]
    done = subprocess.run([*command, *outputs], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    verdict = done.stdout.splitlines()[0]
    assert verdict == (tmp_path / "log").read_text().splitlines()[0]
    record = json.loads((tmp_path / "records").read_text())
    assert record["verdict"] == verdict
    assert len(record["lines"]) == len((tmp_path / "log").read_text().splitlines()) - 2


def test_unknown_tool() -> None:
    done = subprocess.run([sys.executable, "-m", "common.machine", "cheque"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "choose one of check, communication" in done.stderr
