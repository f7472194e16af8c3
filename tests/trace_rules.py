"""The rules of a trace in JSON, read strictly; docs/verify_perfetto.py asks Perfetto itself."""

from __future__ import annotations

from typing import Any


def read_strictly(entries: list[dict[str, Any]]) -> list[Any]:
    """The arrows that are left where events are taken one by one.

    In the order of time, which is truncated to whole nanoseconds; on a thread there is a stack of
    open slices, and one may not end after the one around it; an arrow starts and ends in the
    innermost open slice, and is dropped where there is none; 0 is the process and the thread that
    idle, and a name is given to a thread by its number alone.
    """
    for e in entries:
        assert all(isinstance(e[key], int) and e[key] > 0 for key in ("pid", "tid"))
        assert e["ph"] in "MXsf"
    names = [e for e in entries if e["ph"] == "M"]
    assert entries[: len(names)] == names
    assert len({e["tid"] for e in names}) == len({e["pid"] for e in names})
    events = [e for e in entries if e["ph"] != "M"]
    times = [int(e["ts"] * 1000) for e in events]
    assert times == sorted(times)
    open_: dict[int, list[Any]] = {e["tid"]: [] for e in names}
    begun, arrows = {}, []
    for now, e in zip(times, events, strict=True):
        stack = open_[e["tid"]]
        stack[:] = [slice_ for slice_ in stack if slice_[0] > now]
        if e["ph"] == "X":
            end = now + int(e["dur"] * 1000)
            assert now < end
            assert not stack or end <= stack[-1][0], "a slice ends after the one around it"
            stack.append((end, (e["pid"], e["name"], e["args"]["step"])))
            continue
        key = e["cat"], e["name"], e["id"]
        if e["ph"] == "s" and stack:
            begun[key] = stack[-1][1]
        elif e["ph"] == "f" and stack and key in begun:
            assert e["bp"] == "e"
            arrows.append((begun.pop(key), stack[-1][1]))
    return sorted(arrows)
