"""Bugs to find: each is one wrong line, its symptoms are measured, the line and no other is accepted."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from mpi.launch import python

from common.errors import UsageError
from common.launch.command_line import parse
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.launch.terminal import terminal
from common.spot.__main__ import SpotOptions, ask, main
from common.spot.bugs import ROOT, SYMPTOMS, Bug, find
from common.spot.run import OPTIMIZERS, Symptoms, examine, visit, world_size

BUGS = find()
RUNS = [bug for bug in BUGS if bug.symptom != "hang"]
HANGS = [bug for bug in BUGS if bug.symptom == "hang"]
PAGES = list({bug.path: bug for bug in BUGS}.values())
Found = dict[str, Symptoms]
Given = tuple[str, str, Path]
STEPS = 5  # the checkpoint's page goes on after three


def ids(bug: Bug) -> str:
    return f"{bug.place} {bug.name}"


def visit_all(rt: Runtime, right: list[Given], wrong: list[Given]) -> list[Found]:
    """Run right pages with both optimizers, wrong ones with AdamW, which hides more."""
    return visit(rt, right, STEPS) + visit(rt, wrong, STEPS, ["adamw"])


@pytest.fixture(scope="module")
def measured() -> dict[tuple[Path, str], list[Found]]:
    """Run the right pages and the wrong ones that end, on ranks started once for each number of them."""
    found: dict[tuple[Path, str], list[Found]] = {}
    for world in sorted({world_size(bug) for bug in PAGES}):
        right = [(bug.page, bug.page, bug.path) for bug in PAGES if world_size(bug) == world]
        wrong = [(bug.page, bug.text, bug.path) for bug in RUNS if world_size(bug) == world]
        of_ranks = spawn(visit_all, world, right, wrong)
        for i, (_, text, path) in enumerate(right + wrong):
            found[path, text] = [of_rank[i] for of_rank in of_ranks]
    return found


@pytest.mark.parametrize("bug", PAGES, ids=lambda bug: bug.path.stem)
def test_right_page_equals_one_device(bug: Bug, measured: dict[tuple[Path, str], list[Found]]) -> None:
    for found in measured[bug.path, bug.page]:
        for optimizer in OPTIMIZERS:
            differences = found[optimizer].differences
            assert max(d.value for d in differences.values()) <= 1e-12, differences


@pytest.mark.parametrize("bug", RUNS, ids=ids)
def test_wrong_page_shows_its_symptom(bug: Bug, measured: dict[tuple[Path, str], list[Found]]) -> None:
    kinds = [symptoms.kind for found in measured[bug.path, bug.text] for symptoms in found.values()]
    assert next((kind for kind in SYMPTOMS if kind in kinds), "") == bug.symptom


@pytest.mark.parametrize("bug", HANGS, ids=ids)
def test_ranks_that_wait_for_ever_are_shown_with_their_lines(bug: Bug) -> None:
    said = examine(bug)
    assert isinstance(said, str)
    lines = {int(n) for n in re.findall(rf"{bug.path.name}:(\d+)", said)}
    assert lines
    assert max(lines) <= len(bug.text.splitlines())


@pytest.mark.parametrize("bug", BUGS, ids=ids)
def test_one_place_is_wrong(bug: Bug) -> None:
    right, wrong = bug.page.splitlines(), bug.text.splitlines()
    more = len(bug.wrong.splitlines())
    assert right[: bug.first - 1] == wrong[: bug.first - 1]
    assert right[bug.first :] == wrong[bug.first - 1 + more :]
    assert right != wrong
    assert bug.symptom in SYMPTOMS
    ast.parse(bug.text)
    assert max(map(len, wrong)) <= 120


@pytest.mark.parametrize("bug", BUGS, ids=ids)
def test_the_wrong_line_is_accepted_and_its_neighbour_is_not(
    bug: Bug, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(SpotOptions(bug.place, answer=bug.first)) == 0
    found = capsys.readouterr().out
    assert bug.source in found
    neighbour = next(n for n in range(bug.first - 1, 0, -1) if n not in bug.answers)
    assert main(SpotOptions(bug.place, answer=neighbour)) == 1
    refused = capsys.readouterr().out
    assert "Hint: " in refused
    for secret in (bug.right, bug.source, bug.name):
        assert secret not in refused


def test_every_bug_has_a_source_and_its_exhibits_are_in_the_museum() -> None:
    for bug in BUGS:
        assert re.search(r"[\w.-]+/[\w.-]+#\d+|arXiv:\d{4}\.\d{5}", bug.source), bug.place
        for exhibit in bug.exhibits:
            file, name = exhibit.split(": ")
            museum = Path(__file__).with_name(f"test_museum_{file}.py").read_text()
            assert f'"{name}"' in museum or f"def test_{name.replace(' ', '_')}(" in museum, exhibit


NOT_TURNED = {  # exhibits without a bug to find, with the reason
    "pp: activations overwritten before the send has left": "a race: its symptoms differ from run to run",
    "dp_compression: memory behind the sum": "takes several lines",
    "dp_data_parallel: weights replicated once": "a mistake of one process, without ranks",
    "dp_matrices: rows without a sum": "the sum of the input's gradient, which two other bugs leave out",
    "ep: auxiliary loss times micro-batches": "a factor, as in the balance loss times the ranks",
    "ep: dropped tokens left out of the load": "the pages drop no tokens",
    "ep: capacity of whatever a rank has": "the pages drop no tokens",
    "hybrid: routers taken for complete along tp": "takes several lines",
    "hybrid_checkpoint: rank 0 writes": "takes several lines",
    "hybrid_checkpoint: the library, told nothing": "a call of the library",
}


def test_every_exhibit_is_a_bug_to_find_or_has_a_reason_not_to_be() -> None:
    exhibits = set()
    for file in Path(__file__).parent.glob("test_museum_*.py"):
        (made,) = re.findall(r"^EXHIBITS.*? = (\{.*?^\})", file.read_text(), re.M | re.S)
        keys = ast.parse(made, mode="eval").body.keys  # type: ignore[attr-defined]
        names = [ast.literal_eval(key) for key in keys]
        exhibits |= {f"{file.stem[12:]}: {name}" for name in names if not name.startswith("right")}
    turned = {exhibit for bug in BUGS for exhibit in bug.exhibits}
    assert len(exhibits) > 50
    assert exhibits - turned == set(NOT_TURNED)


def test_pages_are_short_and_use_torch_and_comm_alone() -> None:
    for bug in PAGES:
        lines = bug.page.splitlines()
        assert len(lines) <= 110, bug.path
        modules = re.findall(r"^(?:from|import) (\S+)", bug.page, re.M)
        assert {m for m in modules if m.split(".")[0] == "common"} <= {
            "common",
            "common.comm",
            "common.comm.mesh",
            "common.comm.placement",
            "common.spot.run",
        }


def answers(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reader type these lines."""
    typed = iter(given)
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))


def test_a_reader_gets_the_hint_once_and_the_explanation_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bug = BUGS[0]
    answers(["1", "two", "999", "2", str(bug.first)], monkeypatch)
    assert ask(terminal(), bug)
    said = capsys.readouterr().out
    assert said.count("Hint: ") == 1
    assert said.count("give the number of a line") == 2
    assert said.index("Hint: ") < said.index(bug.source)
    answers(["1", ""], monkeypatch)
    assert not ask(terminal(), bug)
    assert bug.source in capsys.readouterr().out


def command(*arguments: str, start: Sequence[str | Path] = ()) -> subprocess.CompletedProcess[str]:
    line = [*(start or (python(), ROOT / "common" / "spot" / "__main__.py")), *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=200)


def test_the_command_shows_symptoms_and_page_and_not_the_answer(tmp_path: Path) -> None:
    bug, picture = BUGS[0], tmp_path / "loss.png"
    done = command(bug.place, "--plot", str(picture))
    assert done.returncode == 1, done.stderr
    assert picture.stat().st_size > 1000
    for shown in (bug.wrong.splitlines()[0].strip(), "gradient norm", "--answer LINE"):
        assert shown in done.stdout
    for secret in (bug.explanation, bug.source, f" {bug.right}\n"):
        assert secret not in done.stdout


def test_bad_input_is_one_line_and_code_2() -> None:
    done = command("09/1", start=(sys.executable, "-m", "common.spot"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: there is no bug '09/1'; choose from 01, 02, 03, 04, 05, 06\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["01/1", "--answer", "1000"], "line 1000: the page has lines 1 to"),
        (["01/1", "--answer", "x"], "--answer"),
        (["01/1", "--plot", "loss.txt"], "--plot loss.txt: give a file"),
        (["01/99"], "there is no bug '01/99'; choose from 01/1, 01/2"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        main(parse(SpotOptions, args=arguments))


def test_the_list_gives_nothing_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SpotOptions(list=True)) == 0
    shown = capsys.readouterr().out
    for bug in BUGS:
        assert f" {bug.place} " in shown
        for secret in (bug.name, bug.source, bug.right, bug.explanation):
            assert secret not in shown


def test_the_docs_show_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "bugs-to-find.md").read_text()
    blocks = re.findall(r"^```\n\$ python -m common.spot (\S+) --answer (\d+)\n(.*?)^```", page, re.M | re.S)
    assert len(blocks) == 2
    for place, line, printed in blocks:
        main(SpotOptions(place, answer=int(line)))
        assert capsys.readouterr().out == printed
    counts = {kind: sum(bug.symptom == kind for bug in BUGS) for kind in SYMPTOMS}
    assert f"{len(BUGS)} bugs" in page
    for kind, count in counts.items():
        assert f"| {SYMPTOMS[kind]} | {count} |" in page
