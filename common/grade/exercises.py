"""Exercises of the chapters: where their files are, and what an answer may use.

Each chapter's folder has `exercises/` with the files to write, `targets/` with what they must do, and `solutions/`.
Files of one exercise have the same name; its number is the beginning of that name.
"""

from __future__ import annotations

import ast
import builtins
import re
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
    "parallel", "multiprocessing", "threading", "ctypes", "inspect", "save", "from_file", "package", "fx", "f_back",
    "tb_frame", "gi_frame",
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
        """First line of the exercise's text; the file's name if there is none."""
        stub = self.path.parents[1] / "exercises" / self.path.name
        text = stub.read_text(encoding="utf-8-sig", errors="replace") if stub.is_file() else ""
        first = re.match(r'\s*(?:"""|//)[ ]*(.+)', text)  # the file may be no Python yet
        return first[1].rstrip('" ') if first else self.path.name


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
        Exercise(path.parents[1].name[:2], int(path.name.split("_")[0]), path.parents[1] / folder / path.name)
        for path in sorted(ROOT.glob("0[1-6]-*/targets/[0-9]*_*.*"))
    ]
    chapter, _, number = which.partition("/")
    chapter, number = chapter.zfill(2), number.lstrip("0")
    found = [e for e in every if not which or (e.chapter == chapter and number in ("", str(e.number)))]
    if not found:
        known = ", ".join(e.name for e in every if e.chapter == chapter) or ", ".join(
            sorted({e.chapter for e in every})
        )
        raise UsageError(f"there is no exercise {which!r}; choose from {known}")
    return found


def refused(source: str, also: frozenset[str] = frozenset()) -> str:
    """Return what an answer in Python uses that it must not; empty if there is nothing.

    also: further modules that the exercise allows.
    """
    hidden = HIDDEN - {name.split(".")[-1] for name in also}
    nodes = list(ast.walk(ast.parse(source)))
    imports = [
        alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    ]
    imported = {(alias.asname or alias.name).split(".")[0] for alias in imports}
    for node in nodes:
        for name in _imported(node):
            if name not in MODULES | also:
                return (
                    f"line {node.lineno} imports {name}; write it yourself, with torch and common.comm alone"  # type: ignore[attr-defined]
                )
        used, private = "", False
        if isinstance(node, ast.Attribute):
            if (root := _root(node)) in imported:
                if not isinstance(node.ctx, ast.Load):
                    return f"line {node.lineno} changes {ast.unparse(node)}, which the answer imports"
                private = node.attr.startswith("_")
            else:
                private = node.attr.startswith("__") and node.attr.endswith("__") and node.attr != "__init__"
            used = node.attr if private or root not in ("self", "ctx") else ""  # those are the answer's own
        if isinstance(node, ast.Name) and (hasattr(builtins, node.id) or node.id.startswith("__")):
            used = node.id  # any other name is the answer's own or imported, and imports are checked
        if used in hidden or private:
            return f"line {node.lineno} uses {used!r}; an answer must not: communicate through common.comm"  # type: ignore[attr-defined]
    return ""


def _root(node: ast.AST) -> str:
    """Return the name that a chain of attributes begins with; empty if it begins with another expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


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
            yield from (
                f"{module}.{alias.name}"
                for alias in node.names
                if alias.name in HIDDEN | {"*"} or (alias.name.startswith("_") and module != "__future__")
            )
