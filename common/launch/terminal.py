"""Console for tables: the user's terminal, or a file or pipe, in which no name is cut."""

from rich.console import Console

WIDE = 1000  # columns; a table takes those that it needs


def terminal(quiet: bool = False, plain: bool = False) -> Console:
    """Return a console. plain: write as into a file even on a terminal."""
    out = Console(quiet=quiet, highlight=False)
    if out.is_terminal and not plain:
        return out
    return Console(quiet=quiet, highlight=False, width=WIDE, force_terminal=False)
