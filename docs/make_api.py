"""Write docs/api.md from the docstrings: `python docs/make_api.py`; a test compares."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import rpcpipe

PAGE = Path(__file__).parent / "api.md"
INTRODUCTION = """# API reference

Everything public, from the docstrings. Made by `python docs/make_api.py`: change a docstring, not
this page.
"""


def page() -> str:
    parts = [INTRODUCTION]
    names = sorted(rpcpipe.__all__, key=str.lower)
    modules = [name for name in names if isinstance(getattr(rpcpipe, name), ModuleType)]
    for name in names:
        if name not in modules:
            parts += describe(f"rpcpipe.{name}", getattr(rpcpipe, name))
    for name in modules:
        module = getattr(rpcpipe, name)
        parts.append(f"## `rpcpipe.{name}`\n\n{inspect.getdoc(module)}\n")
        for inner in module.__all__:
            parts += describe(f"rpcpipe.{name}.{inner}", getattr(module, inner), level=3)
    return "\n".join(parts)


def describe(name: str, thing: Any, level: int = 2) -> Iterator[str]:
    kind = "class " if inspect.isclass(thing) else ""
    yield f"{'#' * level} `{name}`\n"
    if callable(thing):
        yield f"```text\n{kind}{name.split('.')[-1]}{signature(thing)}\n```\n"
    yield text(thing)
    if inspect.isclass(thing):
        yield from members(name, thing, level + 1)


def members(name: str, cls: type, level: int) -> Iterator[str]:
    for inner, member in vars(cls).items():
        if inner.startswith("_") or isinstance(member, type):
            continue
        title = f"{'#' * level} `{name.split('.')[-1]}.{inner}`\n"
        if isinstance(member, property):
            yield f"{title}\n{text(member)}"
        elif inspect.isfunction(member) and inspect.getdoc(member):
            yield f"{title}\n```text\n{inner}{signature(member)}\n```\n\n{text(member)}"


def signature(thing: Any) -> str:
    try:
        found = str(inspect.signature(thing))
    except ValueError:  # of a class made in C
        return "(...)"
    found = found.replace("self, ", "").replace("(self)", "()")
    return found.replace("'", "").replace('"', "")


def text(thing: Any) -> str:
    """The docstring as Markdown: sections in bold, the rest as it stands."""
    doc = inspect.getdoc(thing) or ""
    if dataclasses.is_dataclass(thing) and doc.startswith(f"{getattr(thing, '__name__', '')}("):
        return ""
    lines = [f"\n**{line[:-1]}**\n" if line in SECTIONS else line for line in doc.splitlines()]
    return items("\n".join(lines).replace("``", "`")) + "\n"


SECTIONS = {f"{name}:" for name in ("Args", "Returns", "Raises", "Attributes", "Yields")}


def items(doc: str) -> str:
    """What is indented below a section becomes a list: `name: what it is`."""
    found: list[str] = []
    inside = False
    for line in doc.splitlines():
        inside = line.startswith("**") or (inside and (line.startswith(" ") or not line))
        if inside and line.startswith("    ") and not line.startswith("     "):
            found.append(f"- {line.strip()}")
        elif inside and line.startswith("     "):
            found.append(f"  {line.strip()}")
        else:
            found.append(line)
    return "\n".join(found)


if __name__ == "__main__":
    PAGE.write_text(page())
