"""Skip connections: tensors that layers hand to later layers by name, past those between."""

from __future__ import annotations

from rpcpipe.skip.namespace import Namespace
from rpcpipe.skip.skippable import pop, skippable, stash
from rpcpipe.skip.verify import verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
