"""Errors that a user is to read."""


class UsageError(Exception):
    """Bad input: one line that says what was given, what is needed, and what would work. Exit code 2."""
