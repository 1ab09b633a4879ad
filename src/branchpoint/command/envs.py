"""``branchpoint envs``: the shipped environments, and what each needs."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from branchpoint.env import LISTINGS


def listing(console: Console) -> int:
    """Print a line for each environment: ready, or what is missing and how to get it."""
    table = Table("environment", "here", "what it is", box=None, pad_edge=False)
    for name, entry in LISTINGS.items():
        lack = entry.missing()
        table.add_row(name, "no" if lack else "yes", entry.summary)
        if lack:
            table.add_row("", "", lack)
    console.print(table)
    console.print("Your own: module:make, see docs/howto/environment.md", highlight=False)
    return 0
