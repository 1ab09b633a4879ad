"""What the benchmarks of environments say at their end."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def report(result: Mapping[str, Any], out: Path | None) -> None:
    """Prints the result with the machine it was measured on, and writes it to ``out`` if given."""
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()}
    text = json.dumps({**result, "machine": machine}, indent=2)
    print(text)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
