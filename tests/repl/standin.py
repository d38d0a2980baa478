"""A worker that misbehaves on order: the code of a cell is run with the link in its hands.

Started by a supervisor in place of the real worker, as a process of its own.
Names in a cell: ``send`` (a message), ``raw`` (bytes on the link), ``request``
(the `Execute`), ``receive`` (the next message). A cell that says nothing gets
a plain `Done`.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from typing import Any

import msgspec

from rlm_kernel import cells
from rlm_kernel.repl import messages

link = socket.socket(fileno=int(sys.argv[1]))
decoder = msgspec.msgpack.Decoder(messages.ToWorker)


def raw(data: bytes) -> None:
    link.sendall(data)


def send(message: object) -> None:
    data = msgspec.msgpack.encode(message)
    raw(struct.pack("<I", len(data)) + data)


def take(size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = link.recv(size - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data


def receive() -> Any:
    return decoder.decode(take(struct.unpack("<I", take(4))[0]))


def main() -> None:
    if "STANDIN_SAYS" in os.environ:
        os.write(2, os.environ["STANDIN_SAYS"].encode())
        os._exit(1)
    send(messages.Hello(pid=os.getpid(), python="3.11.0"))
    names = {**vars(messages), **vars(cells), "send": send, "raw": raw, "receive": receive}
    while True:
        request = receive()
        if isinstance(request, messages.Execute):
            exec(request.code, {**names, "request": request, "os": os})
            send(messages.Done(id=request.id, ok=True, execution_count=1))


if __name__ == "__main__":
    main()
