"""Ports for servers that are about to start.

vLLM binds its port after ten seconds, and fails where it is taken by then. Until it has, the port
is kept by a socket of ours that is bound to it and does not listen. Linux lets vLLM bind it beside
that, since both set SO_REUSEADDR (socket(7)). Ours sets it after it was bound: then nobody else
could be bound, and of two commands that want a port at once only one gets it.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from types import TracebackType
from typing import Self

from rlm_kernel.errors import UsageError

__all__ = ["HOST", "PortKeeper"]

HOST = "127.0.0.1"
_FIRST = 8100
"""Below the ports that the system gives away by itself."""

_LAST = 8999
_MOST = 65535


class PortKeeper:
    """Keeps ports while it is entered."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.let_go()

    def keep(self, count: int, first: int | None, taken: Collection[int] = ()) -> list[int]:
        """*count* free ports, from *first* on in a row where that is given; none of *taken*.

        Raises
        ------
        UsageError
            There are not so many, or one of the row is taken.
        """
        if first is None:
            return self._any(count)
        if not 0 < first <= _MOST + 1 - count:
            raise UsageError(f"--port {first} is no port: give a number from 1 to {_MOST}")
        for port in range(first, first + count):
            # Connections of a server that was just stopped keep its port from being had alone for
            # a minute: no reason to refuse it to who wants this one.
            if port in taken or not self._take(port, alone=False):
                raise UsageError(f"port {port} is taken by another program: give another --port")
        return list(range(first, first + count))

    def let_go(self) -> None:
        """The servers have their ports, or will not get them any more."""
        while self._sockets:
            self._sockets.pop().close()

    def _any(self, count: int) -> list[int]:
        found: list[int] = []
        for port in range(_FIRST, _LAST + 1):
            if len(found) == count:
                break
            if self._take(port, alone=True):
                found.append(port)
        if len(found) < count:
            raise UsageError(f"no {count} ports are free from {_FIRST} to {_LAST}: give --port N")
        return found

    def _take(self, port: int, *, alone: bool) -> bool:
        """Keep *port* where it is free; *alone* takes one that somebody else keeps for taken."""
        kept = socket.socket()
        try:
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, not alone)
            kept.bind((HOST, port))
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
        except OSError:
            kept.close()
            return False
        self._sockets.append(kept)
        return True
