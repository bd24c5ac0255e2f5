"""Errors that a user is to read."""


class UsageError(Exception):
    """Bad input: one line that says what was given, what is needed, and what would work. Exit code 2."""


class RankError(RuntimeError):
    """Ranks that failed, died or never returned; the message is the first one's traceback."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code
