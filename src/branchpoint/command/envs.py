"""``branchpoint envs``: the shipped environments, and what each needs."""

from __future__ import annotations

from rich.console import Console

from branchpoint.env import LISTINGS


def listing(console: Console) -> int:
    """Print for each environment what it is, whether it can run here, and if not, what is missing and how to get it."""
    width = max(map(len, LISTINGS))
    for name, entry in LISTINGS.items():
        console.print(f"{name:<{width}}  {entry.missing() or 'ready'}", highlight=False, markup=False)
        console.print(f"{'':<{width}}  {entry.summary}", style="dim", highlight=False, markup=False)
    console.print("Your own: module:make, see docs/howto/environment.md", highlight=False)
    return 0
