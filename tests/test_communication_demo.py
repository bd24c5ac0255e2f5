"""The output of the primitives, their bytes, their bandwidths, and the deadlock that the demo names."""

from __future__ import annotations

import inspect
import json
import subprocess
from dataclasses import replace
from fractions import Fraction
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch
from mpi.launch import python, refusal
from rich.console import Console
from torch import Tensor

from common.benchmarks import bandwidth
from common.benchmarks.bandwidth import BandwidthOptions, Row, measure
from common.benchmarks.primitives import PRIMITIVES, one_to_many, rounds
from common.comm import Group
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.utils import communication_demo
from common.utils.communication_demo import demonstrate, show

BY_NAME = {p.name: p for p in PRIMITIVES}
TWO = """\
one to many: rank 0 sends to each in turn
  rank 0   10 11  ->  10 11
  rank 1   20 21  ->  10 11
  bytes sent by all: counted 16, formula (n-1) |x| = 16

one to many, tree: each rank that has it sends it on
  rank 0   10 11  ->  10 11
  rank 1   20 21  ->  10 11
  bytes sent by all: counted 16, formula (n-1) |x| = 16

broadcast: the library's one to many
  rank 0   10 11  ->  10 11
  rank 1   20 21  ->  10 11
  bytes sent by all: counted 16, formula (n-1) |x| = 16

reduce: many to one, summed; undefined on other ranks
  rank 0   10 11  ->  30 32
  rank 1   20 21  ->  (undefined)
  bytes sent by all: counted 16, formula (n-1) |x| = 16

all-reduce: all get the sum
  rank 0   10 11  ->  30 32
  rank 1   20 21  ->  30 32
  bytes sent by all: counted 32, formula 2(n-1) |x| = 32

all-gather: all get all pieces
  rank 0   10 11  ->  10 11 20 21
  rank 1   20 21  ->  10 11 20 21
  bytes sent by all: counted 32, formula (n-1) |x| = 32

reduce-scatter: each gets its piece of the sum
  rank 0   10 11  ->  30
  rank 1   20 21  ->  32
  bytes sent by all: counted 16, formula (n-1) |x| = 16

all-to-all: piece j of rank i becomes piece i of rank j
  rank 0   10 11  ->  10 20
  rank 1   20 21  ->  11 21
  bytes sent by all: counted 16, formula (n-1) |x| = 16

messages of one to many, in turn: 1; rounds of the tree: 1
  round 1   0 -> 1
8 of 8 primitives gave what they must, with the bytes of their formula
"""


def printed(rt: Runtime) -> tuple[bool, str]:
    out = Console(file=StringIO(), width=200)
    good = demonstrate(rt, out)
    return good, out.file.getvalue()  # type: ignore[attr-defined]


def test_every_line_at_two_ranks() -> None:
    assert spawn(printed, 2) == [(True, TWO)] * 2


@pytest.mark.parametrize("n", [3, 4])
def test_every_result_at_more_ranks(n: int) -> None:
    (good, text), *_ = spawn(printed, n)
    assert good
    blocks = {block.split(":")[0]: block.splitlines()[1:] for block in text.split("\n\n")}
    held = [[10 * (r + 1) + i for i in range(n)] for r in range(n)]
    summed = [sum(column) for column in zip(*held, strict=True)]
    after: dict[str, list[list[int]]] = {
        "one to many": [held[0]] * n,
        "one to many, tree": [held[0]] * n,
        "broadcast": [held[0]] * n,
        "reduce": [summed],
        "all-reduce": [summed] * n,
        "all-gather": [[v for row in held for v in row]] * n,
        "reduce-scatter": [[v] for v in summed],
        "all-to-all": [list(column) for column in zip(*held, strict=True)],
    }
    size = 8 * n
    sent = dict.fromkeys(after, (n - 1) * size) | {
        "all-reduce": 2 * (n - 1) * size,
        "all-gather": (n - 1) * n * size,
    }
    for name, rows in after.items():
        for rank, row in enumerate(rows):
            assert (
                blocks[name][rank]
                == f"  rank {rank}   {' '.join(map(str, held[rank]))}  ->  {' '.join(map(str, row))}"
            )
        assert f"counted {sent[name]}," in blocks[name][n]


def adds_one(x: Tensor, group: Group) -> Tensor:
    return x.add_(1)


def broken(rt: Runtime) -> tuple[bool, bool, bool]:
    out = Console(file=StringIO(), width=200)
    silent = replace(BY_NAME["all-reduce"], run=adds_one)
    wrong_sum = replace(BY_NAME["reduce"], run=one_to_many)
    chatty = replace(BY_NAME["all-reduce"], passes=1)
    return show(silent, rt, out), show(wrong_sum, rt, out), show(chatty, rt, out)


def test_wrong_results_and_wrong_bytes_are_seen() -> None:
    assert spawn(broken, 2) == [(False, False, False)] * 2


@pytest.mark.parametrize("n", range(1, 18))
def test_the_tree_reaches_all_in_the_fewest_rounds(n: int) -> None:
    have = {0}
    for pairs in rounds(n):
        assert {source for source, _ in pairs} <= have
        new = [destination for _, destination in pairs]
        assert not have & set(new)
        have |= set(new)
    assert have == set(range(n))
    assert 2 ** len(rounds(n)) >= n > (2 ** len(rounds(n)) - 1) / 2


def test_bandwidths_by_nccl_tests() -> None:
    factors = {name: p.bus_factor(4) for name, p in BY_NAME.items()}
    once = dict.fromkeys(("one to many", "one to many, tree", "broadcast", "reduce"), 1)
    pieces = dict.fromkeys(("all-gather", "reduce-scatter", "all-to-all"), Fraction(3, 4))
    assert factors == once | pieces | {"all-reduce": Fraction(3, 2)}
    row = Row("all-reduce", 4, "gloo", "float32", 8_000_000, 1.5, True, [9.0, 0.001, 0.004, 0.002, 0.002])
    assert row.algorithm_bandwidth == pytest.approx(4e9)
    assert row.bus_bandwidth == pytest.approx(6e9)
    assert BY_NAME["all-gather"].sent(100, 4) == 300


def measured(rt: Runtime) -> list[Row]:
    wrong = replace(BY_NAME["all-reduce"], name="wrong", run=adds_one)
    return measure(rt, 1000, torch.float32, 5, (*PRIMITIVES, wrong))


def test_the_benchmark_measures_and_checks() -> None:
    first, *others = spawn(measured, 3)
    assert all(rows == first for rows in others)
    assert [row.correct for row in first] == [True] * len(PRIMITIVES) + [False]
    assert {row.bytes for row in first} == {996}  # 249 numbers: the most below 1000 bytes that divide by 3
    assert all(len(row.seconds) == 5 and min(row.seconds) > 0 for row in first)


def benchmarked(rt: Runtime, options: BandwidthOptions) -> tuple[bool, str]:
    out = Console(file=StringIO(), width=200)
    good = bandwidth.benchmark(rt, options, out)
    return good, out.file.getvalue()  # type: ignore[attr-defined]


def test_the_benchmark_writes_table_records_and_picture(tmp_path: Path) -> None:
    json_file, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    options = BandwidthOptions(sizes_mb=(0.001, 0.002), repeats=5, json=json_file, plot=plot)
    (good, text), _ = spawn(benchmarked, 2, options)
    assert good
    records = [json.loads(line) for line in json_file.read_text().splitlines()]
    assert len(records) == 2 * len(PRIMITIVES)
    assert {"primitive", "bytes", "seconds", "bus_bandwidth", "correct"} <= set(records[0])
    assert all(name in text for name in BY_NAME)
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_deadlock_is_named_with_both_ranks_and_lines() -> None:
    out = Console(file=StringIO(), width=200)
    assert communication_demo.deadlock(out)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    source, start = inspect.getsourcelines(communication_demo.both_send_first)
    for rank in (0, 1):
        line = start + next(
            i for i, code in enumerate(source) if f"comm.send(x, rt.world, dst={1 - rank})" in code
        )
        (where,) = (said for said in text.splitlines() if said.strip().startswith(f"rank {rank} "))
        assert f"in send to {1 - rank} over 'world'" in where
        assert f"communication_demo.py:{line} (both_send_first)" in where
    assert text.count("each has the other rank") == 2


def test_as_a_command() -> None:
    command = [str(python()), communication_demo.__file__, "--nproc", "2"]
    two = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (two.returncode, two.stdout) == (0, TWO)


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    refused = partial(refusal, communication_demo.main, communication_demo.Options, capsys)
    assert refused() == "error: communication takes at least 2 ranks, not 1; add --nproc 4"
    assert "starts its own two ranks" in refused("--nproc", "2", "--deadlock")
