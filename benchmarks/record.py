"""Record: what a row of `make bench` found, the machine it was found on, and both as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.harness import Table

RESULTS = Path(__file__).parent / "results"


@dataclass
class Result:
    """One number, and what it should be.

    Attributes:
        case: which one of its row.
        value: a ratio taken in one run, unless ``unit`` says otherwise.
        target: ``None`` where a number is reported and nothing is asked of it.
        atmost: whether the target is an upper bound.
        detail: the numbers it was made of, with units in their names.
    """

    case: str
    value: float
    target: float | None = None
    unit: str = ""
    atmost: bool = True
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value <= self.target if self.atmost else self.value >= self.target

    def cells(self) -> tuple[str, str, str, str, str]:
        bound = "" if self.target is None else f"{'<=' if self.atmost else '>='} {self.target:g}"
        met = {None: "", True: "yes", False: "no"}[self.met]
        detail = "; ".join(f"{k} {_text(v)}" for k, v in self.detail.items())
        return self.case, f"{self.value:.3g}{self.unit}", bound, met, detail


@dataclass
class Skipped:
    """A row that this machine cannot run, and why."""

    reason: str


Row = Sequence[Result] | Skipped


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def machine() -> dict[str, Any]:
    """What a number depends on."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def table(title: str, results: Iterable[Result]) -> Table:
    made = Table(title, ["Case", "Value", "Target", "Met", "From"])
    for result in results:
        made.add(*result.cells())
    return made


def save(
    name: str, title: str, row: Row, quick: bool, before: dict[str, Any], seconds: float
) -> Path:
    """Write a row to its file; ``before`` is the machine as it was when the row began."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}{'.quick' if quick else ''}.json"
    content: dict[str, Any] = {"row": name, "title": title, "quick": quick, "machine": before}
    content["load_average_after"] = [round(x, 2) for x in os.getloadavg()]
    content["seconds"] = round(seconds, 1)
    if isinstance(row, Skipped):
        content["skipped"] = row.reason
    else:
        content["results"] = [{**asdict(r), "met": r.met} for r in row]
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
