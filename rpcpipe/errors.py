"""What can go wrong, as few classes, each of one sentence."""

from __future__ import annotations

import pickle
import socket
import traceback
from dataclasses import dataclass, replace
from typing import NoReturn

__all__ = ["BalanceError", "Failure", "StageError", "StageLost", "StageTimeout"]


class BalanceError(ValueError):
    """The balance does not fit the module: says the rule, what was given and what to change."""


class StageError(RuntimeError):
    """Code of the model raised in a stage; ``__cause__`` is the original exception.

    Attributes:
        stage: index ``j`` of the stage.
        microbatch: index ``i`` of the micro-batch, ``None`` outside of a step.
        phase: ``"forward"``, ``"recompute"``, ``"backward"``, or what else the stage was to do.
        host: name of the host the stage runs on.
        remote_traceback: the traceback as text, as it would have been printed there.
    """

    def __init__(
        self,
        stage: int,
        microbatch: int | None,
        phase: str,
        host: str,
        message: str,
        remote_traceback: str,
    ) -> None:
        at = "" if microbatch is None else f", micro-batch {microbatch}"
        super().__init__(
            f"stage {stage}{at}, {phase}, on host {host}: {message}\n\n"
            f"Traceback in stage {stage}:\n{remote_traceback}"
        )
        self.stage = stage
        self.microbatch = microbatch
        self.phase = phase
        self.host = host
        self.message = message
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[type[StageError], tuple[object, ...]]:
        where = (self.stage, self.microbatch, self.phase, self.host)
        return StageError, (*where, self.message, self.remote_traceback)


class StageLost(RuntimeError):
    """A process of the job died, froze or cannot be reached; says which, and how it was noticed.

    Attributes:
        stage: index ``j`` of the stage it computed, ``None`` if none.
        host: name of its host.
        pid: its process id there.
        step: number of the last step that was completed before, counted from 0 as the calls of
            the pipe are; ``None`` before the first, and where it is not known.
        how: what was noticed, such as ``"was ended by SIGKILL"``, ``"has been stopped (SIGSTOP)
            for 9.1 s"`` or ``"has not been heard for 9.2 s: its host or the network is down"``.
    """

    def __init__(
        self,
        message: str,
        *,
        stage: int | None = None,
        host: str = "",
        pid: int | None = None,
        step: int | None = None,
        how: str = "",
    ) -> None:
        super().__init__(message)
        self.stage = stage
        self.host = host
        self.pid = pid
        self.step = step
        self.how = how

    def during(self, what: str) -> StageLost:
        """The same, for somebody who was waiting."""
        where = {"stage": self.stage, "host": self.host, "pid": self.pid, "step": self.step}
        return StageLost(f"{self}, while waiting for {what}", **where, how=self.how)  # type: ignore[arg-type]


class StageTimeout(TimeoutError):
    """Something took longer than ``timeout=`` allows; every process has told what it was doing."""

    def during(self, what: str) -> StageTimeout:
        """The same, for somebody else who was waiting."""
        return StageTimeout(f"{self}; meanwhile something waited for {what}")


@dataclass(frozen=True)
class Failure:
    """An exception on its way to another process: answers carry a value or one of these.

    RPC itself turns most exceptions into ``RuntimeError`` and loses those nobody waits for.
    """

    message: str
    traceback: str
    host: str
    pickled: bytes
    stage: int = -1
    microbatch: int | None = None
    phase: str = ""

    @staticmethod
    def capture(exc: BaseException) -> Failure:
        text = "".join(traceback.format_exception(exc))
        message = "".join(traceback.format_exception_only(exc)).strip()
        return Failure(message, text, socket.gethostname(), _pickle_exception(exc))

    def at(self, stage: int, microbatch: int | None, phase: str) -> Failure:
        return replace(self, stage=stage, microbatch=microbatch, phase=phase)

    def original(self) -> BaseException:
        """The exception as it was raised, or a ``RuntimeError`` naming one that cannot travel."""
        try:
            exc = pickle.loads(self.pickled)
        except Exception:
            return RuntimeError(self.message)
        return exc if isinstance(exc, BaseException) else RuntimeError(self.message)

    def raise_(self) -> NoReturn:
        """Raise as `StageError` from the original."""
        where = (self.stage, self.microbatch, self.phase, self.host)
        raise StageError(*where, self.message, self.traceback) from self.original()


def _pickle_exception(exc: BaseException) -> bytes:
    try:
        data = pickle.dumps(exc)
        pickle.loads(data)  # many exceptions pickle but do not come back
        return data
    except Exception:
        return b""
