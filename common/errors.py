"""Errors that are shown to the user."""


class UsageError(Exception):
    """Bad input: one line with the given value, what is needed and what would work. Exit code 2."""


class RankError(RuntimeError):
    """Error of ranks that failed, died or never returned; the message is the first one's traceback."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class AbsentRank(RuntimeError):
    """A rank has not come to a collective in time; the message says how long the others waited."""
