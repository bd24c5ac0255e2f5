"""The project's rules, checked on the syntax trees of all tracked files; each check finds a violation."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = {"dp": "01", "pp": "02", "tp": "03", "sp": "04", "ep": "05", "hybrid": "06"}
COLLECTIVE = re.compile("all_|reduce|broadcast|gather|scatter|barrier|monitored_barrier|i?send|i?recv|P2POp")
# Rooms of common, from the ground up: each imports its own and those before it.
ROOMS = [
    "errors.py",
    "random.py",
    "data",
    "models",
    "comm",
    "launch",
    "utils",
    "lesson",
    "tensors",
    "grade",
    "spot",
    "benchmarks",
    "machine",
]
CPP_ROOMS = ["error.hpp", "named.hpp", "math", "mpi", "lesson", "torch"]  # of cpp/include/fived, likewise
PROGRAMS = {"common/utils/communication_demo.py"}  # imported by nothing
# Functions that show the library's own version beside ours: {(file, function)}.
SHOWS_THE_LIBRARY = {
    ("common/benchmarks/all_reduce.py", "implementations"),
    ("common/benchmarks/latency.py", "layers"),
}

# Files that unpickle: what this program's own processes send, and classes of an allow-list.
UNPICKLES = {
    "common/launch/spawn.py",
    "common/tensors/manager/mpi_manager.py",
    "06-hybrid-parallelism/trainer/hybrid_files.py",
}


def tracked(*patterns: str) -> list[Path]:
    """Return the repository's files that match; skip the test in a copy without git."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("not a git checkout")
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield every module that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def chapter_imports(source: str, place: str) -> list[str]:
    """Return chapter modules that `place` ("common", "01" .. "06") must not import; 06 may import all."""
    modules = (re.match(r"([a-z]+)_", name) for name in imported(ast.parse(source)))
    found = [(m.string, CHAPTERS[m[1]]) for m in modules if m and m[1] in CHAPTERS]
    return [module for module, chapter in found if place != "06" and chapter != place]


def ours(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the modules that import statements name, submodules of ours in full."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for inner in (f"{node.module}.{alias.name}" for alias in node.names):
                path = ROOT / inner.replace(".", "/")
                found.append(inner if path.is_dir() or path.with_suffix(".py").exists() else node.module)
    return found


def module_of(file: Path) -> str:
    """Return the name by which a file of common or of a chapter is imported."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__") if parts[0] == "common" else parts[-1]


def room_imports(source: str, name: str) -> list[str]:
    """Return what a file of common imports from rooms above its own."""
    room = name.split("/")[1]
    allowed = ROOMS[: ROOMS.index(room) + 1] if room in ROOMS and name not in PROGRAMS else ROOMS
    modules = [m for m in ours(ast.walk(ast.parse(source))) if m.startswith("common.")]
    rooms = {m: m.split(".")[1] for m in modules}
    return [m for m, other in rooms.items() if other not in allowed and f"{other}.py" not in allowed]


def room_includes(source: str, name: str) -> list[str]:
    """Return what a header of cpp/include/fived includes from rooms above its own."""
    allowed = CPP_ROOMS[: CPP_ROOMS.index(name.split("/")[3]) + 1]
    return [room for room in re.findall(r'#include "fived/([^/"]+)', source) if room not in allowed]


def circle(imports: dict[str, list[str]]) -> list[str]:
    """Return the modules of one circle of imports; empty if there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done or module not in imports:
            return []
        found = next((c for other in imports[module] if (c := visit(other, [*path, module]))), [])
        done.add(module)
        return found

    return next((c for module in imports if (c := visit(module, []))), [])


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """Return the full name of a reference: torch.distributed.all_reduce for `dist.all_reduce`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, "") if isinstance(node, ast.Name) else ""


def library_collectives(tree: ast.AST) -> Iterator[tuple[ast.AST, str, ast.Call | None]]:
    """Yield each use of a torch.distributed collective: node, name, and its call if it is called there."""
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
    """Return the collectives called without `group=`, or with the default group, None."""
    found = []
    for _, name, call in library_collectives(ast.parse(source)):
        group = [k.value for k in call.keywords if k.arg == "group"] if call else [ast.Name("a reference")]
        if not group or (isinstance(group[0], ast.Constant) and group[0].value is None):
            found.append(name)
    return found


def outside_comm(source: str, file: str = "") -> list[str]:
    """Return torch.distributed's collectives used outside functions that show the library's version."""
    tree = ast.parse(source)
    shown = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and (file, node.name) in SHOWS_THE_LIBRARY
        for inner in ast.walk(node)
    }
    return [name for node, name, _ in library_collectives(tree) if id(node) not in shown]


def unpickled(source: str) -> list[str]:
    """Return uses of pickle, torch's checkpoint reader, or unsafe torch.load: a file's code could run."""
    calls = [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    loads = [call for call in calls if call.startswith("torch.load(") and "weights_only=True" not in call]
    return loads + re.findall(r"^import pickle|^from pickle|\bFileSystemReader\b", source, re.MULTILINE)


def undocumented(source: str) -> list[str]:
    """Return the public functions and classes without a docstring, and the module if it has none."""
    tree = ast.parse(source)
    public = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    missing = [node.name for node in public if not ast.get_docstring(node)]
    return missing if not tree.body or ast.get_docstring(tree) else ["the module", *missing]


def machine_paths(text: str) -> list[str]:
    """Return paths specific to one machine: home folders, this checkout, this Python environment."""
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


def test_rooms_of_common_import_one_way() -> None:
    files = {file: str(file.relative_to(ROOT)) for file in tracked("common/*.py")}
    assert {name.split("/")[1] for name in files.values()} <= {*ROOMS, "__init__.py"}
    assert not report({file: room_imports(file.read_text(), name) for file, name in files.items()})
    programs = {name.removesuffix(".py").replace("/", ".") for name in PROGRAMS}
    assert not {m for file in files for m in ours(ast.walk(ast.parse(file.read_text())))} & programs


def test_rooms_of_cpp_include_one_way() -> None:
    files = {file: str(file.relative_to(ROOT)) for file in tracked("cpp/include/fived/*.hpp")}
    assert len(files) > 1
    assert not report({file: room_includes(file.read_text(), name) for file, name in files.items()})
    assert room_includes('#include "fived/torch/ranks.hpp"', "cpp/include/fived/lesson/lesson.hpp") == [
        "torch"
    ]
    assert not room_includes('#include "fived/error.hpp"', "cpp/include/fived/math/matrix.hpp")


def test_no_circle_of_imports() -> None:
    files = tracked("common/*.py", "0[1-6]-*/pytorch/*.py", "06-*/trainer/*.py")
    trees = {module_of(file): ast.walk(ast.parse(file.read_text())) for file in files}  # in functions, too
    assert not circle({name: [m for m in ours(tree) if m != name] for name, tree in trees.items()})


def test_collectives_are_called_in_comm_and_with_a_group() -> None:
    comm = [ROOT / "common/comm/calls.py", ROOT / "common/comm/travel.py"]
    assert len([use for file in comm for use in library_collectives(ast.parse(file.read_text()))]) > 5
    assert not report({file: without_group(file.read_text()) for file in comm})
    others = [file for file in tracked("common/*.py", "0[1-6]-*.py") if file not in comm]
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


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("common/comm/mesh.py", "from common.launch.runtime import Runtime"),
        ("common/models/moe.py", "from common import comm"),
        ("common/data/text.py", "def f():\n    from common.lesson import training"),
        ("common/launch/spawn.py", "import common.lesson.runner"),
        ("common/utils/profiler.py", "from common.benchmarks import bandwidth"),
    ],
)
def test_an_import_from_a_room_above_is_caught(name: str, source: str) -> None:
    assert room_imports(source, name)


def test_imports_within_a_room_and_from_below_are_allowed() -> None:
    source = "from common import comm, random\nfrom common.errors import UsageError\nfrom common.launch import spawn"
    assert not room_imports(source, "common/launch/runtime.py")


def test_a_circle_of_imports_is_found() -> None:
    assert circle({"a": ["b", "torch"], "b": ["c"], "c": ["b"]}) == ["b", "c"]
    assert circle({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_a_missing_docstring_is_caught() -> None:
    assert undocumented('"""Module."""\ndef f(): ...\nclass C: ...\ndef _private(): ...') == ["f", "C"]
    assert undocumented("x = 1") == ["the module"]


def test_a_machine_path_is_caught() -> None:
    assert machine_paths("see /" + "home/ada/data")
    assert machine_paths(f"cd {ROOT}")
    assert not machine_paths("~/data /usr/bin/env docs/home/index.md")


def parameters_of(source: str) -> dict[str, int]:
    """Return the number of parameters of every function, without self and cls."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return {
        f.name: sum(
            a.arg not in ("self", "cls") for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)
        )
        for f in functions
    }


def test_the_harness_has_few_parameters() -> None:
    assert parameters_of("def f(self, a, /, b, *, c=1): ...") == {"f": 3}
    found = {
        (path.name, name): count
        for path in tracked("common/lesson/*.py")
        for name, count in parameters_of(path.read_text()).items()
    }
    assert [key for key, count in found.items() if count > 6] == []
