"""The rules of the house, checked on the syntax trees of all tracked files; each is shown to catch its violation."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = {"dp": "01", "pp": "02", "tp": "03", "sp": "04", "ep": "05", "hybrid": "06"}
COLLECTIVE = re.compile("all_|reduce|broadcast|gather|scatter|barrier|monitored_barrier|i?send|i?recv|P2POp")
# Functions that show the library's own version beside ours: {(file, function)}.
SHOWS_THE_LIBRARY = {("common/benchmarks/all_reduce.py", "implementations")}

# Files that unpickle: what this program's own processes send, and classes of an allow-list.
UNPICKLES = {"common/spawn.py", "06-hybrid-parallelism/pytorch/hybrid_files.py"}


def tracked(*patterns: str) -> list[Path]:
    """The repository's files that match; the test is skipped in a copy without git."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout")
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported anywhere in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def chapter_imports(source: str, place: str) -> list[str]:
    """Modules of chapters that `place` ("common", "01" .. "06") must not import. Chapter 06 composes all."""
    modules = (re.match(r"([a-z]+)_", name) for name in imported(ast.parse(source)))
    found = [(m.string, CHAPTERS[m[1]]) for m in modules if m and m[1] in CHAPTERS]
    return [module for module, chapter in found if place != "06" and chapter != place]


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """What `dist.all_reduce` stands for: torch.distributed.all_reduce."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


def library_collectives(tree: ast.AST) -> Iterator[tuple[ast.AST, str, ast.Call | None]]:
    """Each use of a torch.distributed collective: where, its name, and the call if it is called there."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.split(".")[0]
                names[alias.asname or package] = alias.name if alias.asname else package
        elif isinstance(node, ast.ImportFrom):
            names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        path, _, name = dotted(node, names).rpartition(".")
        if re.match(r"torch\.distributed\b", path) and COLLECTIVE.match(name):
            yield node, name, calls.get(id(node))


def without_group(source: str) -> list[str]:
    """Collectives called without `group=`, or with the default group, which is None."""
    found = []
    for _, name, call in library_collectives(ast.parse(source)):
        group = [k.value for k in call.keywords if k.arg == "group"] if call else [ast.Name("a reference")]
        if not group or (isinstance(group[0], ast.Constant) and group[0].value is None):
            found.append(name)
    return found


def outside_comm(source: str, file: str = "") -> list[str]:
    """Collectives of torch.distributed used at all, except where the library's version is shown."""
    tree = ast.parse(source)
    shown = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and (file, node.name) in SHOWS_THE_LIBRARY
        for inner in ast.walk(node)
    }
    return [name for node, name, _ in library_collectives(tree) if id(node) not in shown]


def unpickled(source: str) -> list[str]:
    """What can run code that a file holds: pickle, torch's reader of checkpoints, torch.load without weights_only."""
    calls = [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    loads = [call for call in calls if call.startswith("torch.load(") and "weights_only=True" not in call]
    return loads + re.findall(r"^import pickle|^from pickle|\bFileSystemReader\b", source, re.MULTILINE)


def undocumented(source: str) -> list[str]:
    """Public functions and classes of a module, and the module itself, without a docstring."""
    tree = ast.parse(source)
    public = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    missing = [node.name for node in public if not ast.get_docstring(node)]
    return missing if not tree.body or ast.get_docstring(tree) else ["the module", *missing]


def machine_paths(text: str) -> list[str]:
    """Folders of one machine: of users, of this checkout, of this Python environment."""
    here = [p for p in (str(ROOT), sys.prefix, str(Path.home())) if p.count("/") > 1]
    return re.findall("|".join([r"(?<![\w.~])/(?:root|home|Users)/\w+", *map(re.escape, here)]), text)


def report(found: dict[Path, list[str]]) -> str:
    return "\n".join(f"{file.relative_to(ROOT)}: {', '.join(what)}" for file, what in found.items() if what)


def test_imports_run_one_way() -> None:
    files = {
        file: re.split(r"[-/]", str(file.relative_to(ROOT)))[0]
        for file in tracked("common/*.py", "0[1-6]-*.py")
    }
    assert len(files) > 1
    assert not report({file: chapter_imports(file.read_text(), place) for file, place in files.items()})


def test_collectives_are_called_in_comm_and_with_a_group() -> None:
    comm = ROOT / "common/comm.py"
    assert len(list(library_collectives(ast.parse(comm.read_text())))) > 5
    assert not without_group(comm.read_text())
    others = [file for file in tracked("common/*.py", "0[1-6]-*.py") if file != comm]
    assert not report({f: outside_comm(f.read_text(), str(f.relative_to(ROOT))) for f in others})


def test_no_file_is_unpickled() -> None:
    files = {str(f.relative_to(ROOT)): f for f in tracked("common/*.py", "0[1-6]-*.py", "scripts/*.py")}
    assert {name for name, file in files.items() if unpickled(file.read_text())} == UNPICKLES
    assert unpickled("x = torch.load(file)")
    assert not unpickled("x = torch.load(file, weights_only=True)")


def test_common_is_documented() -> None:
    assert not report({file: undocumented(file.read_text()) for file in tracked("common/*.py")})


def test_no_file_names_a_machine() -> None:
    files = tracked("*")
    assert len(files) > 10
    assert not report({file: machine_paths(file.read_text(errors="ignore")) for file in files})


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("common", "from dp_basic import train"),
        ("common", "def f():\n    import tp_megatron.layers"),
        ("01", "from pp_1f1b import schedule"),
        ("05", "import hybrid_3d"),
    ],
)
def test_a_chapter_import_is_caught(place: str, source: str) -> None:
    assert chapter_imports(source, place)


@pytest.mark.parametrize(
    ("place", "source"), [("01", "from dp_basic import train"), ("06", "import tp_megatron")]
)
def test_a_chapter_may_import_itself_and_06_all(place: str, source: str) -> None:
    assert not chapter_imports(source, place)


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist\ndist.all_reduce(x)",
        "import torch.distributed as dist\ndist.all_reduce(x, group=None)",
        "import torch\ntorch.distributed.barrier()",
        "import torch.distributed\ntorch.distributed.broadcast(x, 0)",
        "from torch import distributed\ndistributed.isend(x, 1)",
        "from torch.distributed import reduce_scatter_tensor as rs\nrs(out, x)",
        "import torch.distributed.nn as nn\nnn.functional.all_gather(x)",
    ],
)
def test_a_collective_without_group_is_caught(source: str) -> None:
    assert without_group(source)
    assert outside_comm(source)


def test_a_collective_outside_comm_is_caught_even_with_its_group() -> None:
    assert outside_comm("import torch.distributed as dist\ndist.all_reduce(x, group=g)")
    assert outside_comm("import torch.distributed as dist\nf = dist.all_reduce")
    assert not without_group("import torch.distributed as dist\ndist.all_reduce(x, group=g)")
    assert not outside_comm("import torch.distributed as dist\ndist.new_group([0]); dist.ReduceOp.SUM")


def test_a_missing_docstring_is_caught() -> None:
    assert undocumented('"""Module."""\ndef f(): ...\nclass C: ...\ndef _private(): ...') == ["f", "C"]
    assert undocumented("x = 1") == ["the module"]


def test_a_machine_path_is_caught() -> None:
    assert machine_paths("see /" + "home/ada/data")
    assert machine_paths(f"cd {ROOT}")
    assert not machine_paths("~/data /usr/bin/env docs/home/index.md")
