"""CPU: the processor time of a process, to the nanosecond, as the Linux scheduler counts it."""

from __future__ import annotations

import contextlib
from pathlib import Path


def seconds_used(pid: int) -> float:
    """Seconds that all threads of a process have run; those of threads that have ended are lost."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9
