"""Log: what rpcpipe tells of its work, each line with the rank and the role of who tells it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["be", "lasting", "logger", "progress", "show"]

T = TypeVar("T")

logger = logging.getLogger("rpcpipe")

PERIOD = 5.0  # seconds between two lines about one piece of work

_who = ""


class _Sign(logging.Filter):
    """Puts who speaks before the message; formatters find it as ``%(who)s``, too."""

    def filter(self, record: logging.LogRecord) -> bool:
        who, thread = _who, threading.current_thread().name
        if who and thread.startswith("stage "):  # a driver may share the process
            who = f"{who.split(',')[0]}, {thread.removesuffix(' aside')}"
        record.__dict__["who"] = who
        if who:
            record.msg = f"{who}: {record.msg}"
        return True


logger.addFilter(_Sign())


def be(rank: int, role: str) -> None:
    """Sign as this process from now on."""
    global _who
    _who = f"rank {rank}, {role}"


def show(level: int) -> None:
    """Let records from this level on be seen, in a process whose logging nobody has set up."""
    logger.setLevel(level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)


def progress(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """The items, with a line every few seconds of how many of them are done."""
    begin = last = time.monotonic()
    for k, item in enumerate(items):
        now = time.monotonic()
        if now - last >= PERIOD:
            last = now
            logger.info("%s: %d of %d done in %.0f s", what, k, total, now - begin)
        yield item


@contextmanager
def lasting(what: str) -> Iterator[None]:
    """Tell every few seconds that work is going on of which nothing more is known."""
    if not logger.isEnabledFor(logging.INFO):
        yield
        return
    over, begin = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(PERIOD):
            logger.info("%s: %.0f s so far", what, time.monotonic() - begin)

    thread = threading.Thread(target=tell, name=threading.current_thread().name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
