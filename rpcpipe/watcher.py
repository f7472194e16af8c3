"""Watcher: the small process beside each process of a job, which tells the others that it lives.

A thread could not: it gets no turn while a layer holds the interpreter's lock, and then a process
that is only slow looks like a frozen one. A watcher sees its ward from outside. It knows at once
when it dies, and of what; it sees whether it is stopped; it ends it when nothing else would; and
it tells all this over a connection of its own, not through RPC, which knows no keepalive.

    ward ── channel ── watcher ─┐
    ward ── channel ── watcher ─┼── the hub: the watcher of the process with rank 0
    ward ── channel ── watcher ─┘

Every connection carries a beat each period, in both directions. Of a watcher that has not been
heard for the heartbeat, the host or the network is gone. Messages are JSON, one a line.

This file is run by its path and imports nothing but the standard library: it starts in some ten
milliseconds and takes ten megabytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from typing import Any

STACKS = signal.SIGRTMIN + 7  # has a ward print its Python stacks, whoever holds its lock
RESPITE = 0.5  # seconds between the news of a frozen process and its end: the news is first
PATIENCE = 1.0  # seconds in which a ward answers, if it can
CONNECT = 30.0  # seconds, at most, to reach the hub
LONGEST = 2**20  # bytes of a message; whoever sends more is none of ours
LINGER = 2.0  # seconds to hand on the last news

Message = dict[str, Any]


class Line:
    """A connection: what was not yet sent, what is not yet whole, and when it was last heard."""

    def __init__(self, sock: socket.socket, now: float, who: Message | None = None) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.who = who
        self.heard = now
        self.left = False  # has said goodbye
        self._inward = b""
        self._outward = b""

    def send(self, kind: str, **content: Any) -> None:
        self._outward += json.dumps({"kind": kind, **content}).encode() + b"\n"
        with contextlib.suppress(OSError):  # what is broken is seen by reading
            while self._outward:
                self._outward = self._outward[self.sock.send(self._outward) :]

    def receive(self) -> list[Message] | None:
        """The messages that have come; ``None`` at the end of all."""
        try:
            data = self.sock.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._inward = (self._inward + data).split(b"\n")
        if len(self._inward) > LONGEST:
            return None
        return [json.loads(line) for line in lines]


class Watcher:
    """One process's watcher; the hub if it is given no address to connect to.

    Args:
        life: ``ward`` (its pid), ``who`` (what others say of it), ``token`` (of the job),
            ``heartbeat`` in seconds, ``leads`` (it runs a training function, which ends it),
            ``grace`` (seconds for a ward that does not lead to end after a loss), and
            ``bind`` (the hub's address) or ``hub`` (address, port) and ``hub_is`` (who that is).
    """

    def __init__(self, channel: socket.socket, life: Message) -> None:
        now = time.monotonic()
        self._life = life
        self._ward: int = life["ward"]
        self._period = min(0.5, life["heartbeat"] / 8)
        self._limit = life["heartbeat"] - 2 * self._period  # noticed within the heartbeat
        self._selector = selectors.DefaultSelector()
        self._channel = Line(channel, now)
        self._watch(channel, self._from_ward)
        self._lines: set[Line] = set()
        self._lost: Message | None = None
        self._ward_left = False
        self._remove: str | None = None  # a folder, if the ward is not left to remove it
        self._due: tuple[float, list[Message]] | None = None  # when they must have connected
        self._stopped_since: float | None = None
        self._asked: float | None = None  # since when an answer of the ward is due
        self._kill_at = self._end_at = float("inf")
        self._last_turn = now
        self._beat_at = now
        try:
            self._pidfd = os.pidfd_open(self._ward)
            self._selector.register(self._pidfd, selectors.EVENT_READ, self._ward_has_ended)
        except (AttributeError, OSError):
            self._pidfd = -1  # an old kernel, or it is gone: seen at the next period

    def _watch(self, sock: socket.socket, act: Any) -> None:
        self._selector.register(sock, selectors.EVENT_READ, act)

    # ------------------------------------------------------------------------------ the loop

    def run(self) -> None:
        self._is_hub = "bind" in self._life
        self._open_hub() if self._is_hub else self._connect()
        while time.monotonic() < self._end_at and not self._done():
            events = self._selector.select(max(0.0, self._beat_at - time.monotonic()))
            self._forgive_own_pause()
            for key, _ in events:
                key.data()
            self._look_at_ward()
            if time.monotonic() >= self._beat_at:
                self._beat_at = time.monotonic() + self._period
                for line in self._lines:
                    line.send("beat")
                self._find_silent()
            if time.monotonic() >= self._kill_at:
                self._kill_ward()

    def _done(self) -> bool:
        """The ward has gone its way, and nobody needs the hub."""
        return self._ward_left and not self._lines and self._kill_at == float("inf")

    def _forgive_own_pause(self) -> None:
        """A watcher that had no turn itself has not heard the others for that reason."""
        now = time.monotonic()
        late = now - self._last_turn - self._period
        self._last_turn = now
        if late > self._period:
            for line in self._lines:
                line.heard += late

    def _open_hub(self) -> None:
        family = socket.AF_INET6 if ":" in self._life["bind"] else socket.AF_INET
        self._server = socket.create_server((self._life["bind"], 0), family=family, backlog=1024)
        self._server.setblocking(False)
        self._watch(self._server, self._accept)
        self._channel.send("open", port=self._server.getsockname()[1])

    def _connect(self) -> None:
        try:
            within = min(self._life["heartbeat"], CONNECT)
            sock = socket.create_connection(tuple(self._life["hub"]), within)
        except OSError as exc:
            self._lose(self._life["hub_is"], f"cannot be reached by its watcher ({exc})")
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = self._add(sock, self._life["hub_is"])
        line.send("hello", token=self._life["token"], who=self._life["who"])

    def _add(self, sock: socket.socket, who: Message | None) -> Line:
        line = Line(sock, time.monotonic(), who)
        self._lines.add(line)
        self._watch(sock, lambda: self._from_line(line))
        return line

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._server.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._add(sock, None)

    def _close(self, line: Line) -> None:
        self._selector.unregister(line.sock)
        line.sock.close()
        self._lines.discard(line)

    # ------------------------------------------------------------------------------ the ward

    def _from_ward(self) -> None:
        messages = self._channel.receive()
        if messages is None:  # a process that ends closes its files first: it is seen in a moment
            self._selector.unregister(self._channel.sock)
            return
        for message in messages:
            if message["kind"] == "bye":
                self._leave()
            elif message["kind"] == "quit" and not self._ward_left:
                self._ward_is_gone("gave up its run")
            elif message["kind"] == "remove":
                self._remove = message["folder"]
            elif message["kind"] == "joined":
                self._due = time.monotonic() + self._limit, message["others"]
            elif message["kind"] == "dump":
                self._tell_all("dump", why=message["why"])
                if self._is_hub:
                    self._channel.send("dump", why=message["why"])
            elif message["kind"] == "dumped":
                self._asked = None
                self._tell_all("dumped")

    def _leave(self) -> None:
        """The ward leaves in order; the hub stays as long as others need it."""
        self._ward_left = True
        self._remove = None
        if not self._is_hub:
            for line in list(self._lines):
                line.send("bye")
                self._close(line)

    def _ward_lives(self) -> bool:
        return os.getppid() == self._ward and _status(self._ward)[0] not in ("Z", "X")

    def _look_at_ward(self) -> None:
        if self._ward_left:
            return
        now = time.monotonic()
        state, code = _status(self._ward)
        if os.getppid() != self._ward or state in ("Z", "X"):
            self._ward_is_gone(_how_it_ended(code))
            return
        # Held by a debugger ("t") it is slow and not dead.
        self._stopped_since = (self._stopped_since or now) if state == "T" else None
        if self._stopped_since is not None and now - self._stopped_since > self._limit:
            self._ward_is_gone(f"has been stopped (SIGSTOP) for {now - self._stopped_since:.1f} s")
            self._kill_at = now + RESPITE
        if self._asked is not None and now - self._asked > PATIENCE:
            self._asked = None
            _print(f"{self._life['who']['name']} does not get to answer; its Python stacks:")
            self._signal_ward(STACKS)
            self._tell_all("dumped")

    def _ward_is_gone(self, how: str) -> None:
        self._ward_left = True
        self._kill_at = float("inf")
        self._end_at = time.monotonic() + LINGER
        self._lose(self._life["who"], how)
        for line in self._lines:
            line.send("gone", how=how)
            with contextlib.suppress(OSError):
                line.sock.shutdown(socket.SHUT_WR)  # it closes when all has been read
        if not self._ward_lives():
            self._tidy_up()

    def _ward_has_ended(self) -> None:
        self._selector.unregister(self._pidfd)
        self._kill_at = float("inf")
        self._tidy_up()

    def _kill_ward(self) -> None:
        self._kill_at = float("inf")
        assert self._lost is not None
        why = f"{self._lost['who']['name']} {self._lost['how']}"
        _print(f"{self._life['who']['name']} (pid {self._ward}) is ended by its watcher: {why}")
        self._signal_ward(signal.SIGKILL)
        self._tidy_up()

    def _tidy_up(self) -> None:
        if self._remove is not None:
            shutil.rmtree(self._remove, ignore_errors=True)

    def _signal_ward(self, signum: int) -> None:
        with contextlib.suppress(OSError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signum)
            elif os.getppid() == self._ward:
                os.kill(self._ward, signum)

    # ---------------------------------------------------------------------------- the others

    def _from_line(self, line: Line) -> None:
        try:
            messages = line.receive()
            if messages is not None:
                for message in messages:
                    self._hear(line, message)
        except (ValueError, KeyError, TypeError):
            messages = None  # not one of ours
        if messages is not None or line not in self._lines:
            return
        self._close(line)
        if line.who is not None and not line.left:
            self._lose(line.who, "is gone, and its watcher with it: the connection was closed")

    def _hear(self, line: Line, message: Message) -> None:
        line.heard = time.monotonic()
        kind = message["kind"]
        if kind == "hello":
            if message["token"] != self._life["token"]:
                self._close(line)
                return
            line.who = message["who"]
            if self._lost is not None:
                line.send("lost", **self._lost)
        elif line.who is None:
            self._close(line)
        elif kind == "bye":
            line.left = True
        elif kind == "gone":
            self._look_at_ward()  # it may be what came first
            self._lose(line.who, message["how"])
        elif kind == "lost":
            self._lose(message["who"], message["how"])
        elif kind == "dump":
            self._asked = time.monotonic()
            self._channel.send("dump", why=message["why"])
            if self._is_hub:
                self._tell_all("dump", why=message["why"])
        elif kind == "dumped":
            self._channel.send("dumped")

    def _find_silent(self) -> None:
        now = time.monotonic()
        for line in list(self._lines):
            silent = now - line.heard
            if silent > self._limit and not line.left:
                self._close(line)
                if line.who is not None:
                    how = f"has not been heard for {silent:.1f} s: its host or the network is down"
                    self._lose(line.who, how)

        if self._due is not None and now > self._due[0]:
            connected = [line.who for line in self._lines]
            missing = [who for who in self._due[1] if who not in connected]
            self._due = None
            if missing:
                self._lose(missing[0], "has no watcher that could connect to the first one's")

    def _tell_all(self, kind: str, **content: Any) -> None:
        for line in self._lines:
            line.send(kind, **content)

    def _lose(self, who: Message, how: str) -> None:
        """Tell everybody, once: what is lost next is lost because of this."""
        if self._lost is not None:
            return
        self._lost = {"who": who, "how": how}
        self._channel.send("lost", **self._lost)
        if self._is_hub:
            self._tell_all("lost", **self._lost)
        if not self._life["leads"] and not self._ward_left:
            self._kill_at = min(self._kill_at, time.monotonic() + self._life["grace"] + LINGER)


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"rpcpipe: {text}", file=sys.stderr, flush=True)


def _status(pid: int) -> tuple[str, int]:
    """The kernel's letter for the state of a process, and its exit status as far as known."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0], int(fields[-1])
    except (OSError, IndexError, ValueError):
        # Without /proc there is nothing to see, and its end shows by another parent.
        return ("X" if os.path.exists("/proc/self/stat") else "?"), -1


def _how_it_ended(code: int) -> str:
    if code < 0:
        return "has ended"
    if os.WIFSIGNALED(code):
        signum = os.WTERMSIG(code)
        known = signum in set(signal.Signals)
        return f"was ended by {signal.Signals(signum).name if known else f'signal {signum}'}"
    return f"exited with code {os.WEXITSTATUS(code)}"


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # it ends with its ward
    life = json.loads(sys.argv[1])
    Watcher(socket.socket(fileno=life["channel"]), life).run()


if __name__ == "__main__":
    main()
