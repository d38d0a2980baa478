"""Server-sent events, as far as chat completions use them."""

from __future__ import annotations

from rlm_kernel.subcalls.endpoint import EndpointError

__all__ = ["EventReader"]


class EventReader:
    """Takes the ``data`` of events out of a byte stream that comes in any pieces.

    Other fields and comments are passed over. An event's data is taken to be one line, as
    all servers of chat completions write it. (Source: WHATWG HTML, 9.2.)

    Parameters
    ----------
    limit
        Bytes of the whole stream; more raise `EndpointError`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen = 0
        self._pieces: list[bytes] = []  # of a line that is not whole yet

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that *chunk* completes, without surrounding blanks."""
        self._seen += len(chunk)
        if self._seen > self._limit:
            raise EndpointError(
                f"the streamed reply is longer than {self._limit >> 20} MiB: set max_tokens"
            )
        self._pieces.append(chunk)
        if b"\n" not in chunk:
            return []
        *lines, rest = b"".join(self._pieces).split(b"\n")
        self._pieces = [rest]
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
