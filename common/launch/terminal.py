"""Console for tables: the user's terminal, or a file or pipe, in which no name is cut."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

WIDE = 1000  # columns; a table takes those that it needs


def terminal(quiet: bool = False, plain: bool = False) -> Console:
    """Return a console. plain: write as into a file even on a terminal."""
    out = Console(quiet=quiet, highlight=False)
    if out.is_terminal and not plain:
        return out
    return Console(quiet=quiet, highlight=False, width=WIDE, force_terminal=False)


def make_table(
    title: str, heads: Iterable[str], rows: Iterable[Iterable[str]] = (), show_lines: bool = False
) -> Table:
    """Return a table. A head that begins with ">" stands over numbers, which are aligned right."""
    made = Table(title=title, title_justify="left", show_lines=show_lines)
    for head in heads:
        made.add_column(head.lstrip(">"), justify="right" if head.startswith(">") else "left")
    for row in rows:
        made.add_row(*row)
    return made
