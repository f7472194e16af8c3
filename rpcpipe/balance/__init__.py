"""Balance: how many layers each stage gets, measured and then split at the best places."""

from __future__ import annotations

from rpcpipe.balance.partition import partition, validate
from rpcpipe.balance.profile import by_size, by_time

__all__ = ["by_size", "by_time", "partition", "validate"]
