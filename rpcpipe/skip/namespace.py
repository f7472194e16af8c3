"""A namespace keeps skips of equal names apart."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

__all__ = ["Key", "Namespace"]


@dataclass(frozen=True, order=True, slots=True)
class Namespace:
    """Isolates skips: layers of one namespace see only each other's names.

    Give it to layers with ``layer.isolate(namespace)``. Two namespaces differ, a namespace and
    its copies are equal, also after pickling and in another process.
    """

    id: uuid.UUID = field(default_factory=uuid.uuid4, init=False)


Key = tuple[Namespace | None, str]
"""What a skip is stored under: its namespace (``None`` unless isolated) and its name."""
