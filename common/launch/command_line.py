"""Command lines: a dataclass names the options, their types state the allowed values; all are checked.

    @dataclass
    class Options(Checked):
        steps: Count = 3
        rate: Annotated[float, Within(0, 1)] = 0.5

    if __name__ == "__main__":
        run_program(lambda: main(parse(Options)))

A class names inherited options that it does not use: `class Memory(Training, without=("steps", "plot"))`.
"""

from __future__ import annotations

import io
import itertools
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import tyro

from common.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Within:
    """Bounds of a number, or of each number in a tuple, as metadata of its type."""

    least: float
    most: float


Count = Annotated[int, Within(1, 10**9)]
Size = Annotated[int, Within(1, 2**27)]  # of a batch or a sequence; more tokens do not fit in memory
Width = Annotated[int, Within(1, 2**20)]  # of a layer
Ranks = Annotated[int, Within(1, 4096)]
Seed = Annotated[int, Within(0, 2**63 - 1)]
LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")


class Checked:
    """Base class of all options. Construction raises UsageError for a number outside of its bounds."""

    def __init_subclass__(cls, without: Sequence[str] = ()) -> None:
        """Hide the inherited options `without` from the command line; they keep their defaults."""
        super().__init_subclass__()
        # the option's own type, not Any: tyro takes (Any, 0.0) for (Any, False)
        hints: dict[str, Any] = {}
        for base in reversed(cls.__bases__):
            hints |= get_type_hints(base, include_extras=True)
        cls.__annotations__.update({name: Annotated[hints[name], tyro.conf.Suppress] for name in without})

    def __post_init__(self) -> None:
        for name, bounds in _bounds(type(self)).items():
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and not bounds.least <= number <= bounds.most:
                    given = " ".join(map(str, value)) if isinstance(value, tuple) else value
                    between = f"from {bounds.least:.12g} to {bounds.most:.12g}"
                    raise UsageError(f"--{name.replace('_', '-')} {given}: give a number {between}")


def _bounds(options: type[Any]) -> dict[str, Within]:
    """Return the bounds of all options that have them, by name."""

    def found(hint: object) -> list[Within]:
        here = [data for data in getattr(hint, "__metadata__", ()) if isinstance(data, Within)]
        return here + [bounds for inner in get_args(hint) for bounds in found(inner)]

    hints = get_type_hints(options, include_extras=True)
    return {name: bounds[0] for name, hint in hints.items() if (bounds := found(hint))}


def fits(value: object, hint: Any) -> bool:
    """Return True if a value of a JSON or TOML file has this type, and its numbers lie within their bounds.

    A list is a sequence of at least one element, or a tuple. Text is text that can be encoded: without half of a
    surrogate pair.
    """
    kind, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind is Annotated:
        least, most = inner[1].least, inner[1].most
        return fits(value, inner[0]) and least <= cast(float, value) <= most
    if kind is Literal:
        return value in inner
    if kind in (Union, UnionType):
        return any(fits(value, one) for one in inner)
    if isinstance(value, list):
        if kind is tuple:
            return len(value) == len(inner) and all(map(fits, value, inner))
        return kind is Sequence and bool(value) and all(fits(one, inner[0]) for one in value)
    if isinstance(value, dict):
        return kind is Mapping and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if isinstance(value, str):
        return hint is str and value == value.encode(errors="replace").decode()
    if hint is float and type(value) is int:
        return abs(value) <= sys.float_info.max
    return type(value) is (type(None) if hint is None else hint)


def check_names(option: str, given: Sequence[str], known: Collection[str]) -> None:
    """Raise UsageError for names of an option that are unknown or missing."""
    for name in given:
        if name not in known:
            raise UsageError(f"--{option} {name!r} is unknown; choose from {', '.join(known)}")
    if not given:
        raise UsageError(f"--{option} is empty; choose from {', '.join(known)}")


def parse(
    options: type[T],
    description: str | None = None,
    args: Sequence[str] | None = None,
    default: T | None = None,
) -> T:
    """Return the options of the command line, or of `args`. Raises UsageError, one line, for invalid ones.

    The --local-rank=N that `python -m torch.distributed.launch` adds is ignored: N is in LOCAL_RANK as well.
    """
    given = [arg for arg in (sys.argv[1:] if args is None else args) if not LOCAL_RANK.fullmatch(arg)]
    said = io.StringIO()
    known: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with redirect_stderr(said):
            found: T = tyro.cli(options, description=description, args=given, **known)
    except SystemExit as end:
        if end.code in (0, None):
            raise  # --help
        raise UsageError(_one_line(said.getvalue())) from None
    return found


def _one_line(box: str) -> str:
    """Return the reason in tyro's box: its rows up to the first rule; all of the text if there is no box."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)  # on a terminal the box has colours
    rows = [row.strip("│| ") for row in plain.splitlines() if row.startswith(("│", "|"))]
    parts = itertools.groupby(rows, lambda row: bool(row.strip("─-")))
    said = next((list(part) for is_text, part in parts if is_text), plain.split())
    return " ".join(said).rstrip(".") + "; --help lists the options"


def check_folder(option: str, target: Path, folder: Path) -> None:
    """Create the folder in which `target` will be written. Raises UsageError if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        why = f"{folder} is a file" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(f"--{option} {target} cannot be written: {why}") from None
