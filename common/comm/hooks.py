"""Seam between communication and its checker: without `with checked(...)` a hook costs one comparison with None."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from common.comm import ledger

Given = ParamSpec("Given")
Result = TypeVar("Result")

active: Any = None
"""The Checker of the innermost `with checked(...)`; see checked.py."""


def checked_call(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Let the checker see every call of a function of calls.py."""

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if active is None or ledger.paused:
            return function(*args, **kwargs)
        result: Result = active.call(function, args, kwargs)
        return result

    return call


def typed(takes: str, gives: str) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Declare the types of a differentiable collective's input and output along its group's axis."""

    def decorate(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @wraps(function)
        def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            if active is None or ledger.paused:
                return function(*args, **kwargs)
            result: Result = active.collective(function, takes, gives, args, kwargs)
            return result

        return call

    return decorate
