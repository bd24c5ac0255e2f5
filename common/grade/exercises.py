"""Exercises of the chapters: where their files are, and what an answer may use.

Each chapter's folder has `exercises/` with the files to write, `targets/` with what they must do, and `solutions/`.
Files of one exercise have the same name; its number is the beginning of that name.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "__future__", "collections", "collections.abc", "contextlib", "copy", "dataclasses", "fractions", "functools",
    "itertools", "math", "typing", "torch", "torch.nn", "torch.nn.functional", "common", "common.comm",
}  # fmt: skip
# of the modules above, parts by which an answer could go round the count or reach another module
HIDDEN = {
    "distributed", "dist", "ledger", "uncounted", "calls", "travel", "everyones", "modules", "sys", "os", "importlib",
    "__import__", "eval", "exec", "compile", "open", "globals", "vars", "getattr", "setattr", "__dict__",
    "__builtins__", "__globals__", "hub", "load", "library", "utils", "export", "jit", "collectives", "pg", "ops", "_C",
    "parallel",
}  # fmt: skip


@dataclass(frozen=True)
class Exercise:
    """An exercise: its chapter ("01"), its number in the chapter and the path of the file to grade."""

    chapter: str
    number: int
    path: Path

    @property
    def name(self) -> str:
        """Name on the command line: 01/1."""
        return f"{self.chapter}/{self.number}"

    @property
    def targets(self) -> Path:
        """File of the exercise's targets."""
        return self.path.parents[1] / "targets" / self.path.name

    @property
    def title(self) -> str:
        """First line of the exercise's text."""
        stub = (self.path.parents[1] / "exercises" / self.path.name).read_text()
        if self.path.suffix == ".cpp":
            return stub.splitlines()[0].removeprefix("//").strip()
        return (ast.get_docstring(ast.parse(stub)) or "").splitlines()[0]


@dataclass(frozen=True)
class Outcome:
    """Result of a grading: names of all targets, how many were met, and of the next one what was wrong."""

    targets: tuple[str, ...]
    met: int
    wrong: str = ""
    to_write: bool = False
    """True if the exercise raised NotImplementedError: `wrong` says what to do first."""

    @property
    def passed(self) -> bool:
        """True if all targets are met."""
        return self.met == len(self.targets)


def find(which: str = "", folder: str = "exercises") -> list[Exercise]:
    """Return the exercises of all chapters, of one ("03") or one exercise ("03/2"). Raises UsageError.

    folder: "exercises" or "solutions", the files to grade.
    """
    every = [
        Exercise(path.parents[1].name[:2], int(path.name.split("_")[0]), path)
        for path in sorted(ROOT.glob(f"0[1-6]-*/{folder}/[0-9]*_*.*"))
    ]
    found = [e for e in every if which in ("", e.chapter, e.name)]
    if not found:
        known = ", ".join(e.name for e in every if e.chapter == which[:2]) or ", ".join(
            sorted({e.chapter for e in every})
        )
        raise UsageError(f"there is no exercise {which!r}; choose from {known}")
    return found


def refused(source: str, also: frozenset[str] = frozenset()) -> str:
    """Return what an answer in Python uses that it must not; empty if there is nothing.

    also: further modules that the exercise allows.
    """
    hidden = HIDDEN - {name.split(".")[-1] for name in also}
    for node in ast.walk(ast.parse(source)):
        for name in _imported(node):
            if name not in MODULES | also:
                return (
                    f"line {node.lineno} imports {name}; write it yourself, with torch and common.comm alone"  # type: ignore[attr-defined]
                )
        own = (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "ctx")
        )
        used = node.attr if isinstance(node, ast.Attribute) and not own else ""
        if isinstance(node, ast.Name) and (hasattr(builtins, node.id) or node.id.startswith("__")):
            used = node.id  # any other name is the answer's own or imported, and imports are checked
        if used in hidden:
            return f"line {node.lineno} uses {used!r}; an answer must not: communicate through common.comm"  # type: ignore[attr-defined]
    return ""


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the modules that an import statement names; a hidden name imported from a module counts as one."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = node.module or "."
        if module == "common":
            yield from (f"common.{alias.name}" for alias in node.names)
        else:
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names if alias.name in HIDDEN | {"*"})
