"""Exercises: stubs say what to do first, solutions pass, and wrong answers get a message that points at the mistake.

tests/wrong_answers/NN.toml lists the wrong answers to the exercises of a chapter. Answers that neither raise nor hang
are graded one after the other on ranks that are started once per exercise.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from common.grade.attempt import attempt, targets_of, tried
from common.grade.exercises import ROOT, Exercise, Outcome, find, refused
from common.launch.spawn import spawn

try:
    import tomllib
except ImportError:
    import tomli as tomllib

STUBS = {e.name: e for e in find() if e.path.suffix == ".py"}
SOLUTIONS = {e.name: e for e in find("", "solutions") if e.path.suffix == ".py"}
SEED = 7


def wrong_answers() -> dict[str, list[dict[str, Any]]]:
    """Return the wrong answers by exercise."""
    found: dict[str, list[dict[str, Any]]] = {e.name: [] for e in find("", "solutions")}
    for file in sorted((Path(__file__).parent / "wrong_answers").glob("*.toml")):
        for answer in tomllib.loads(file.read_text())["wrong"]:
            name = f"{file.stem[:2]}/{answer['exercise']}"
            if name in found:
                found[name].append(answer)
    return found


WRONG = wrong_answers()


def source_of(exercise: Exercise, answer: dict[str, Any]) -> str:
    """Return the text of a wrong answer."""
    if "source" in answer:
        return answer["source"]
    solution = exercise.path.read_text()
    assert solution.count(answer["right"]) >= 1, f"{answer['name']}: not in the solution"
    return solution.replace(answer["right"], answer["wrong"])


def graded(exercise: Exercise, sources: list[str]) -> list[Outcome]:
    """Grade answers that neither raise nor hang, on ranks that are started once."""
    targets, also = targets_of(exercise)
    names = tuple(t.name for t in targets)
    static = [refused(source, also) for source in sources]
    run = [source for source, why in zip(sources, static, strict=True) if not why]
    ranks = spawn(tried, max(max(t.ranks) for t in targets), exercise, run, SEED)
    outcomes = iter(ranks[0])
    return [Outcome(names, 0, why) if why else next(outcomes) for why in static]


def test_each_stub_has_targets_and_a_solution() -> None:
    for name, exercise in STUBS.items():
        assert exercise.targets.exists(), name
        assert exercise.title.endswith("."), f"{name}: its text begins with a line that ends in a full stop"
    assert [e.path.name for e in find()] == [e.path.name for e in find("", "solutions")]


def test_the_docs_list_all_exercises() -> None:
    page = (ROOT / "docs" / "exercises.md").read_text()
    listed = re.findall(r"^\| \[(\d\d/\d+)\]\(\.\./(.+?)\) \| (.+) \|$", page, re.M)
    assert listed == [(e.name, str(e.path.relative_to(ROOT)), e.title.rstrip(".")) for e in find()]


@pytest.mark.parametrize("name", list(SOLUTIONS))
def test_exercise(name: str) -> None:
    """The solution passes, the stub says what to do first, every wrong answer is told its mistake."""
    exercise, together = SOLUTIONS[name], [a for a in WRONG[name] if not a.get("alone")]
    stub = STUBS[name].path.read_text()
    sources = [exercise.path.read_text(), stub, *(source_of(exercise, a) for a in together)]
    solved, unsolved, *outcomes = graded(exercise, sources)
    assert solved.passed, solved
    assert unsolved.to_write, unsolved
    assert len(unsolved.wrong) > 20, "the stub says what to do first"
    for answer, outcome in zip(together, outcomes, strict=True):
        assert not outcome.passed, answer["name"]
        assert re.search(answer["says"], outcome.wrong), (answer["name"], outcome)


@pytest.mark.parametrize("name", list(SOLUTIONS))
def test_each_exercise_has_its_wrong_answers(name: str) -> None:
    kinds = [answer.get("kind", "mistake") for answer in WRONG[name]]
    assert kinds.count("mistake") >= 3
    alone = max(max(t.ranks) for t in targets_of(SOLUTIONS[name])[0]) == 1  # nothing to gather
    assert set(kinds) >= {"constant", "library"} | (set() if alone else {"gather"})


CPP = {e.name: e for e in find("", "solutions") if e.path.suffix == ".cpp"}


@pytest.mark.parametrize("name", list(CPP))
def test_exercise_in_cpp(name: str) -> None:
    """The same of an answer in C++; each wrong one is compiled."""
    exercise = CPP[name]
    solved = attempt(exercise, SEED)
    assert solved.passed, solved
    unsolved = attempt(next(e for e in find(name) if e.path.suffix == ".cpp"), SEED)
    assert unsolved.to_write, unsolved
    kinds = [answer.get("kind", "mistake") for answer in WRONG[name]]
    assert kinds.count("mistake") >= 3
    assert "library" in kinds
    for answer in WRONG[name]:
        outcome = attempt(exercise, SEED, source_of(exercise, answer), wait=8.0)
        assert not outcome.passed, answer["name"]
        assert re.search(answer["says"], outcome.wrong), (answer["name"], outcome)


ALONE = [(name, answer) for name in SOLUTIONS for answer in WRONG[name] if answer.get("alone")]


@pytest.mark.parametrize(("name", "answer"), ALONE, ids=[f"{n} {a['name']}" for n, a in ALONE])
def test_an_answer_that_raises_or_hangs(name: str, answer: dict[str, Any]) -> None:
    outcome = attempt(SOLUTIONS[name], SEED, source_of(SOLUTIONS[name], answer), wait=3.0)
    assert not outcome.passed
    assert re.search(answer["says"], outcome.wrong), outcome
