"""Bench: rpcpipe beside the limit of the machine and beside its peers, as ratios of one run."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks import record
from benchmarks.record import Row, Skipped
from benchmarks.rows import emulation, footprint, hop, idle, link, startup, steps


@dataclass(frozen=True)
class Entry:
    """A kind of row: its title and what measures it."""

    title: str
    run: Callable[[bool], Row]


ROWS = {
    "limit": Entry("Step time beside the limit and beside the peers, n=2, m=8", steps.run),
    "emulated": Entry("Emulated stages beside the ideal schedule", emulation.run),
    "hop": Entry("Cost of one micro-batch hop, 1 KiB", hop.run),
    "recompute": Entry("Early recomputation", emulation.run_recompute),
    "idle": Entry("Processor time of those who wait", idle.run),
    "link": Entry("Two hosts, 1 Gbit/s between them", link.run),
    "memory": Entry("Peak memory of each stage", footprint.run),
    "startup": Entry("Start-up", startup.run),
    "overhead": Entry("The driver's part of a step of empty layers", hop.run_overhead),
}


def chosen(only: str | None) -> list[str]:
    """The rows asked for, in the order in which they run."""
    if only is None:
        return list(ROWS)
    wanted = only.split(",")
    unknown = [name for name in wanted if name not in ROWS]
    if unknown:
        raise SystemExit(f"--only takes {','.join(ROWS)}; not {','.join(unknown)}")
    return [name for name in ROWS if name in wanted]


def measure(name: str, quick: bool) -> Row:
    """Run a row, print and save it."""
    entry, before, start = ROWS[name], record.machine(), time.monotonic()
    row = entry.run(quick)
    seconds = time.monotonic() - start
    if isinstance(row, Skipped):
        print(f"{entry.title}: skipped, {row.reason}\n", flush=True)
    else:
        print(record.table(f"{entry.title} ({seconds:.0f} s)", row), end="\n\n", flush=True)
    record.save(name, entry.title, row, quick, before, seconds)
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the number of rows that could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of all, to see that it works")
    parser.add_argument("--only", help=f"rows by name, of {','.join(ROWS)}")
    options = parser.parse_args(argv)
    print(record.machine(), end="\n\n", flush=True)
    failed = []
    for name in chosen(options.only):
        try:
            measure(name, options.quick)
        except Exception as exc:  # the others are measured all the same
            failed.append(name)
            print(f"{name}: failed, {exc!r}\n", file=sys.stderr, flush=True)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
