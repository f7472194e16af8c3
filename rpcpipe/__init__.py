"""rpcpipe: pipeline parallelism for PyTorch whose training loop stays a plain script."""

from __future__ import annotations

from rpcpipe import balance, skip
from rpcpipe.checkpoint import is_checkpointing, is_recomputing
from rpcpipe.errors import BalanceError, StageError, StageLost, StageTimeout
from rpcpipe.folder import latest
from rpcpipe.memory import Memory
from rpcpipe.microbatch import NoChunk
from rpcpipe.pipe import Pipe
from rpcpipe.plan import Candidate, Plan, plan
from rpcpipe.run import run
from rpcpipe.timeline import Timeline
from rpcpipe.world import World

__version__ = "0.1.0"

__all__ = [
    "BalanceError",
    "Candidate",
    "Memory",
    "NoChunk",
    "Pipe",
    "Plan",
    "StageError",
    "StageLost",
    "StageTimeout",
    "Timeline",
    "World",
    "balance",
    "is_checkpointing",
    "is_recomputing",
    "latest",
    "plan",
    "run",
    "skip",
]
