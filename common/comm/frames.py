"""Frames of a stack that are the user's: neither a library's nor those of our own code that carries out their calls.

The programs of tensors/examples are users' programs.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch

COMMON = Path(__file__).parents[1]
EXAMPLES = f"{COMMON / 'tensors' / 'examples'}{os.sep}"
TENSORS = f"{COMMON / 'tensors'}{os.sep}"
OURS = (COMMON / name for name in ("comm", "launch", "lesson", "tensors"))
LIBRARIES = (Path(torch.__file__).parent, Path(os.__file__).parent, *OURS)
INSIDE = (*(f"{folder}{os.sep}" for folder in LIBRARIES), "<")


def is_users(file: str) -> bool:
    """Return True if a frame with code of this file is the user's."""
    packages = "site-packages" in file or "dist-packages" in file
    return file.startswith(EXAMPLES) or not (packages or file.startswith(INSIDE))


def line_of_user() -> str:
    """Return file:line of the innermost frame that is the user's, of the outermost frame if none is."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def line_of_call(error: BaseException) -> str:
    """Return file:line of the user's call of a tensor operation that raised the error, "" if no operation did."""
    stack = traceback.extract_tb(error.__traceback__)
    inside = any(f.filename.startswith(TENSORS) and not is_users(f.filename) for f in stack)
    users = [f for f in stack if is_users(f.filename)] if inside else []
    return f"{Path(users[-1].filename).name}:{users[-1].lineno}" if users else ""
