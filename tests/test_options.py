"""Every option of every runnable Python file refuses impossible values: exit code 2 and one line.

C++ binaries without LibTorch: every option. Those with LibTorch: every fourth option, as they start slowly.
"""

from __future__ import annotations

import math
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
import tyro
from mpi.launch import need_binary, run
from rich.table import Table
from test_rules import ROOT, tracked

from common.errors import UsageError
from common.launch import command_line as options
from common.launch.command_line import Checked, Count, Within
from common.launch.terminal import terminal
from common.lesson import runner as lesson
from common.utils import profiler

SOURCES = {
    str(file.relative_to(ROOT)): file.read_text()
    for file in tracked("common/*.py", "0[1-6]-*.py", "scripts/*.py")
}
IMPORTS_MPI = {
    "common/benchmarks/all_reduce.py",
    "common/benchmarks/latency.py",
}  # a process that pytest runs in is no rank
FILES = [
    file
    for file, source in SOURCES.items()
    if re.search(r"\nif __name__ ==", source) and re.search(r"\b(parse|run)\((main|[A-Z])", source)
]
# Options to which 0 is a value like any other, and those that may be as long as one has time for.
TAKES_0 = (
    "seed momentum jitter coefficient rate balance_coefficient balance_rate z_coefficient dropout curve_steps "
    "bandwidth clip warm_up learning_rate final weight_decay temperature evaluate_every generate peak_tflops debug "
    "top_k stop mask_token"
)
TAKES_10_9 = (
    "steps seed curve_steps interval repeats clip rate condition rows columns learning_rate warm_up final periods "
    "weight_decay temperature evaluate_every generate peak_tflops log_every evaluation checkpoint_every keep cores "
    "scale sizes every bandwidth rank tokens stop"
)
TAKES_TEXT = "prompt prompts"


@dataclass(unsafe_hash=True)
class Many(Checked):
    share: float = 0.0
    flag: bool = False


@dataclass(unsafe_hash=True)
class Few(Many, without=("share", "flag")):
    size: Count = 1


def inside(hint: Any) -> Iterator[Any]:
    """Yield a type and all types that it contains."""
    yield hint
    for part in (*get_args(hint), *getattr(hint, "__metadata__", ())):
        yield from inside(part)


def number_of(hint: Any) -> type | None:
    """Return int or float if the option is such a number or contains some, else None."""
    return next((part for part in inside(hint) if part in (int, float)), None)


def construct(kind: type[Any], name: str, hint: Any, value: float) -> None:
    """Construct options with `value` in one option (in all elements of a tuple). Raises UsageError."""
    parts = next((get_args(part) for part in inside(hint) if get_origin(part) is tuple), ())
    given = (value,) * len([part for part in parts if part is not Ellipsis]) if parts else value
    kind(**{name: given}, **({"script": Path()} if "script" in kind.__annotations__ else {}))


def refuses(kind: type[Any], name: str, hint: Any, value: float) -> bool:
    """Return True if the constructor refuses the value, with one line that names the option."""
    try:
        construct(kind, name, hint, value)
    except UsageError as error:
        return str(error).startswith(f"--{name.replace('_', '-')} ") and "\n" not in str(error)
    return False


def accepted(kind: type[Any]) -> list[list[str]]:
    """Return arguments with bad values that pass the constructor: they must be refused before the work."""
    found = [["--no-such-option", "1"]]
    for field in fields(kind):
        name, hint = field.name, get_type_hints(kind, include_extras=True)[field.name]
        flag = f"--{name.replace('_', '-')}"
        if tyro.conf.Suppress in inside(hint):
            continue
        if number_of(hint):
            assert any(isinstance(part, Within) for part in inside(hint)), f"{flag} has no bounds"
            bad = {0, -1, 10**9, 1e308, math.inf, math.nan}
            bad -= {v for v, fine in ((0, TAKES_0), (10**9, TAKES_10_9)) if name in fine.split()}
            length = {"shape": 3, "grid": 2}.get(name, 1)
            found += [[flag] + [str(v)] * length for v in bad if not refuses(kind, name, hint, v)]
        elif str in inside(hint) and name not in TAKES_TEXT:
            found.append([flag, "nonsense"])
    return found


class Found(Exception):
    """Carries `accepted` of the options that a file gives to `parse` or `run`."""


def start(file: str, *arguments: str) -> None:
    """Start a file in this process, on one rank; as when Python starts it, its folder is first on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [file, *arguments])
        patch.setattr(sys, "path", [str((ROOT / file).parent), *sys.path])
        runpy.run_path(str(ROOT / file), run_name="__main__")


@pytest.mark.parametrize("file", sorted(set(FILES) - IMPORTS_MPI))
def test_bad_values_are_refused(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*given: Any, **_: Any) -> None:
        raise Found(accepted(next(one for one in given if isinstance(one, type))))

    with monkeypatch.context() as patch:
        for module, name in ((lesson, "run"), (options, "parse"), (profiler, "parse")):
            patch.setattr(module, name, stop)
        with pytest.raises(Found) as found:
            start(file)
    for arguments in found.value.args[0]:
        with pytest.raises(SystemExit) as end:
            start(file, *arguments)
        said = capsys.readouterr().err
        assert (end.value.code, said[:7], said.count("\n")) == (2, "error: ", 1), (arguments, said)


@pytest.mark.parametrize(
    "name",
    [
        *("dp_mpi", "dp_matmul_mpi", "pp_mpi", "tp_mpi", "tp_summa_mpi", "sp_mpi", "ep_mpi"),
        *("dp_libtorch", "pp_libtorch", "tp_libtorch", "sp_libtorch", "ep_libtorch"),
    ],
)
def test_binaries_refuse_bad_values(name: str) -> None:
    alone = {"OMPI_MCA_btl": "self"}  # with a network each start takes Open MPI a second
    said = run([str(need_binary(name)), "--help"], environment=alone).stdout
    found = re.findall(r"^  --(\S+) .*?(?:; default (\S+))?$", said, re.M)
    assert len(found) > 9
    bad = ["--no-such-option=1", "--seed"]
    for i, (option, default) in list(enumerate(found))[:: 4 if "libtorch" in name else 1]:
        values = ["-1", "nonsense", "0"] if option not in TAKES_0.split() else ["-1", "nonsense"]
        is_number = re.fullmatch(r"[\d.e+-]+", default)
        bad.append(f"--{option}={values[i % len(values)] if is_number else '/no/such/folder/file'}")
    for argument in bad:
        done = run([str(need_binary(name)), argument], timeout=20, environment=alone)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), (argument, done.stderr)
        assert done.stderr.startswith(f"{name}: ")


def test_another_box_is_one_line_too() -> None:
    rows = (
        "╭─ Parsing error ─╮",
        "│ a             b │",
        "│ c.              │",
        "│ ─────────────── │",
        "│ d               │",
    )
    box = "\n".join((*rows, "╰─────────────────╯\n"))
    for text, line in (
        (box, "a             b c"),
        (re.sub("[│╭╰─╮╯]+", "\x1b[31m\\g<0>\x1b[0m", box), "a             b c"),  # on a terminal
        ("", ""),
        ("│\n", "│"),
        ("no such\noption.\n", "no such option"),
    ):
        assert options._one_line(text) == f"{line}; --help lists the options"


def test_there_is_one_parser() -> None:
    assert [file for file, source in SOURCES.items() if "tyro.cli(" in source] == [
        "common/launch/command_line.py"
    ]
    assert len(FILES) > 55


@pytest.mark.parametrize("added", ["--local-rank=1", "--local_rank=1"])
def test_the_rank_that_torch_distributed_launch_passes_is_ignored(
    added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert options.parse(Few, args=[added, "--size", "2"]) == Few(size=2)
    monkeypatch.setattr(sys, "argv", ["lesson.py", added, "--size", "3"])
    assert options.parse(Few) == Few(size=3)
    with pytest.raises(UsageError, match="--local-rank"):
        options.parse(Few, args=["--local-rank=x"])


def test_what_documented_commands_write_is_ignored() -> None:
    texts = [file.read_text() for file in tracked("*.md", "0[1-6]-*.py")]
    shown = {name for text in texts for name in re.findall(r"--(?:plot|json) ([\w/]+\.(?:png|jsonl))", text)}
    written = {name for name in shown if not name.startswith("docs/images/")}
    assert len(written) > 4
    written |= {f"06-hybrid-parallelism/examples/run/{name}" for name in (".lock", "step-00000020/metadata")}
    written |= {
        "traces/trace.json",
        *(f"0{i}-chapter/cpp/{name}_mpi" for i, name in ((1, "dp_matmul"), (2, "pp"))),
    }
    command = ["git", "-c", f"safe.directory={ROOT}", "check-ignore", *written]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert set(done.stdout.split()) == written


def test_names_are_whole_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("implementation", "difference of")
    table.add_row("bucketed", name := "layers.0.attention.q_proj.weight; " * 5)
    terminal(plain=True).print(table)
    assert name.strip() in capsys.readouterr().out


def test_the_visualizer_alone_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    start("common/utils/visualizer.py")
    assert "python scripts/visualize_results.py --help" in capsys.readouterr().out


def test_options_left_out_keep_their_types() -> None:
    """Under pytest, tyro compares a tenth of its answers with those kept for equal types and defaults: 0.0 is False."""
    assert {options.parse(Few, args=["--size", "2"]) for _ in range(100)} == {Few(size=2)}
