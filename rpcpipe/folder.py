"""Folder: the checkpoints of one directory, each of them whole or not there.

A checkpoint is a subdirectory ``checkpoint-000007``, numbered in the order of saving. It is
written as ``checkpoint-000007.<token>.tmp`` and renamed when everything is on the disk; it is
renamed again before it is removed. What a crash leaves as ``.tmp`` is removed by the next save.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Draft", "begin", "checkpoints", "latest", "locate", "sync_directory"]

_NAME = re.compile(r"checkpoint-(\d{6,})")
_DRAFT = re.compile(r"checkpoint-\d{6,}\.\w+\.tmp")
_TOKEN = "token"


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint of a directory that ``pipe.save`` writes to, if any."""
    found = checkpoints(Path(directory))
    return found[-1] if found else None


def checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints, the oldest first."""
    if not directory.is_dir():
        return []
    found = {child: _NAME.fullmatch(child.name) for child in directory.iterdir()}
    numbers = {child: int(match[1]) for child, match in found.items() if match}
    return sorted(numbers, key=numbers.__getitem__)


def locate(path: str | os.PathLike[str]) -> Path:
    """The checkpoint that is meant by itself or by the directory it is the newest of.

    Raises:
        FileNotFoundError: there is none.
    """
    path = Path(path).absolute()
    if (path / ".metadata").is_file():
        return path
    newest = latest(path)
    if newest is None:
        raise FileNotFoundError(
            f"{path} is no checkpoint and holds none: it has neither .metadata nor a "
            "subdirectory checkpoint-000001 or the like, as pipe.save(directory) makes them"
        )
    return newest


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written."""

    path: Path
    token: str  # unlike that of what stages of a killed driver may still be writing

    @property
    def final(self) -> Path:
        return self.path.with_name(self.path.name.split(".")[0])

    def require_seen(self) -> None:
        """Raise ``ValueError`` in a process that does not see the driver's directory."""
        with contextlib.suppress(OSError):
            if (self.path / _TOKEN).read_text() == self.token:
                return
        raise ValueError(
            f"host {socket.gethostname()} does not see the directory {self.path.parent} that the "
            "driver writes to: save to a file system that all hosts of the job share"
        )

    def complete(self, keep: int | None) -> Path:
        """Make it a checkpoint, and remove all but the ``keep`` newest."""
        (self.path / _TOKEN).unlink()
        sync_directory(self.path)
        self.path.rename(self.final)
        sync_directory(self.path.parent)
        for old in checkpoints(self.path.parent)[:-keep] if keep else []:
            _remove(old)
        return self.final

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def begin(directory: Path) -> Draft:
    """Start a checkpoint; one job at a time writes to a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for child in directory.iterdir():
        if _DRAFT.fullmatch(child.name):
            shutil.rmtree(child, ignore_errors=True)
    newest = latest(directory)
    number = 1 + int(newest.name.removeprefix("checkpoint-")) if newest else 1
    token = uuid.uuid4().hex
    draft = Draft(directory / f"checkpoint-{number:06}.{token}.tmp", token)
    draft.path.mkdir()
    (draft.path / _TOKEN).write_text(draft.token)
    return draft


def _remove(checkpoint: Path) -> None:
    """A crash in between must not leave half a checkpoint under a whole one's name."""
    going = checkpoint.with_name(checkpoint.name + ".old.tmp")
    checkpoint.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Have the names in a directory on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
