"""The worker's end of the link, shared by all its threads.

Frames are read by whichever thread waits (leader and followers): the leader
polls the socket and hands replies to the threads that wait for them; when its
own reply came, it wakes a follower to lead. No thread of our own exists, so a
worker that is idle is single-threaded and can be forked.

While a thread is blocked in writing it goes on reading: with both buffers
full, kernel and worker would else wait for each other forever.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import msgspec

from rlm_kernel.errors import SubcallError
from rlm_kernel.repl import messages
from rlm_kernel.repl.messages import CallTool, FromWorker, ToWorker
from rlm_kernel.repl.worker.captured import captured
from rlm_kernel.repl.worker.encoding import FrameTooLarge, frame_of
from rlm_kernel.repl.worker.interrupts import Interrupts
from rlm_kernel.repl.worker.waiter import Accept, Reply, Request, Waiter

if TYPE_CHECKING:
    import asyncio  # costs 30 ms at start, and most sessions never await

__all__ = [
    "Command",
    "FrameTooLarge",
    "Interrupted",
    "Link",
    "LinkLost",
    "Reply",
    "Request",
    "settle",
]

_READ = 1 << 18


class LinkLost(RuntimeError):
    """This process has no link: it was forked off by user code."""


class Interrupted(RuntimeError):
    """The cell was interrupted while another thread of it waited for the kernel."""


class Command(msgspec.Struct, frozen=True):
    """A message that is not a reply, with the file descriptor that came beside it."""

    message: ToWorker
    fd: int | None = None


class Link:
    """Framed messages over a stream socket.

    Parameters
    ----------
    sock
        The worker's end; becomes non-blocking and close-on-exec.
    interrupts
        Says where a signal may raise.
    """

    def __init__(self, sock: socket.socket, interrupts: Interrupts) -> None:
        sock.setblocking(False)
        sock.set_inheritable(False)
        self._sock = sock
        self.interrupts = interrupts
        interrupts.on_interrupt = self._note_interrupt
        self._decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
        self._in = bytearray()
        self._out = bytearray()
        self._fds: deque[int] = deque()
        self._ids = itertools.count(1)
        self._last_id = 0
        self._cut = 0
        self._waiters: dict[int, Waiter] = {}
        self._followers: deque[Waiter] = deque()
        self._leader: Waiter | None = None
        self._mutex = threading.Lock()
        # Reentrant, because a finalizer or a signal handler of the user's may print while
        # this very thread is in here.
        self._reading = threading.RLock()
        self._writing = threading.RLock()
        self._filling = self._draining = False
        self._loops: dict[asyncio.AbstractEventLoop, int] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._idle: Waiter | None = None
        self.commands: deque[Command] = deque()
        self.on_tool: Callable[[CallTool], None] = _no_tools
        """Runs a tool in the thread or task that waits for the sub-call, which then goes on."""

        self.on_command: Callable[[], None] | None = None
        """Called, in any thread, when a command came and nobody waits for one."""

        self.dead = False

    def next_id(self) -> int:
        """An id for a new request."""
        self._last_id = number = next(self._ids)
        return number

    # --- sending ----------------------------------------------------------------------------

    def send(self, message: FromWorker) -> None:
        """Send one message, whole, whatever other threads and signals do.

        Raises
        ------
        FrameTooLarge
            Nothing was sent then.
        TypeError
            It holds an object that the link cannot carry.
        """
        if self.dead:
            return
        frame = frame_of(message)
        main = self.interrupts.enter()
        try:
            self._acquire_writing(main)
            try:
                self._write(frame, main)
            finally:
                self._writing.release()
        finally:
            self.interrupts.leave(main)

    def _acquire_writing(self, main: bool) -> None:
        # Not in a window: an exception right after the acquisition would leave it locked.
        while not self._writing.acquire(timeout=0.05):
            self.interrupts.check(main)

    def _write(self, frame: bytearray, main: bool) -> None:
        # What an interrupt left in `_out` is the rest of an earlier frame and goes first.
        if self._out:
            self._out += frame
        else:
            self._out = frame
        if self._draining:
            return  # reentered: the call below us sends this too
        try:
            self._draining = True
            self._drain(main)
        finally:
            self._draining = False

    def _drain(self, main: bool) -> None:
        while self._out:
            try:
                sent = self._sock.send(self._out)
            except BlockingIOError:
                if self._poll(select.POLLOUT | select.POLLIN, main) & select.POLLIN:
                    self._fill()
            except OSError as error:
                _lost(error)
            else:
                del self._out[:sent]

    # --- asking -----------------------------------------------------------------------------

    def ask(self, message: Request, accept: Accept) -> None:
        """Send a request and wait until *accept* says that it is answered.

        Raises
        ------
        KeyboardInterrupt
            In the main thread, at once.
        Interrupted
            In any other thread of an interrupted cell.
        LinkLost
            In a process that user code forked.
        """
        self._check(message)
        main = threading.current_thread() is threading.main_thread()
        waiter = Waiter(message.id, accept, main=main)
        with self._awaited(message, waiter):
            self.send(message)
            while not self._wait(waiter):
                self.on_tool(waiter.calls.popleft())
        if waiter.aborted:
            raise Interrupted("the cell was interrupted")

    async def ask_async(self, message: Request, accept: Accept) -> None:
        """As `ask`, without blocking the running event loop, whichever it is."""
        import asyncio

        self._check(message)
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        waiter = Waiter(message.id, accept)
        waiter.notify = partial(_call_in, loop, woken.set)
        with self._awaited(message, waiter), self.attached(loop):
            self.send(message)
            while not waiter.done:
                await woken.wait()
                woken.clear()
                while waiter.calls and not waiter.done:
                    self.on_tool(waiter.calls.popleft())

    @contextmanager
    def _awaited(self, message: Request, waiter: Waiter) -> Iterator[None]:
        """While inside, replies go to *waiter*.

        Results of sub-calls do so afterwards too: some may be on their way when their cell is
        interrupted. The kernel ends every such request, with `Failed` where it is cancelled.
        """
        self._waiters[message.id] = waiter
        keep = isinstance(message, messages.SendSubcalls)
        try:
            yield
        except (FrameTooLarge, TypeError):  # nothing was sent
            keep = False
            raise
        finally:
            waiter.open = False
            # Nobody runs these any more; what answers them is the worker's main loop.
            for call in waiter.calls:
                self._order(Command(call))
            if not keep:
                self._waiters.pop(message.id, None)

    def _check(self, message: Request) -> None:
        if captured() is not None and isinstance(message, messages.SendSubcalls):
            # Its own sub-call holds a place among those under way until it returns.
            raise SubcallError("a tool cannot make sub-calls: let the model ask for them")
        if self.dead:
            raise LinkLost(
                "a process forked by a cell cannot reach the kernel; use threads "
                "(ThreadPoolExecutor) or a list of prompts in place of processes"
            )

    def next_command(self) -> Command:
        """Wait for the next command."""
        if self.dead:
            os._exit(0)  # a forked child came to the end of the cell that forked it
        while not self.commands:
            self._idle = waiter = Waiter(0, None, main=True)
            if not self.commands:
                self._wait(waiter)
            self._idle = None
        return self.commands.popleft()

    @contextmanager
    def attached(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """While inside, *loop* reads the link. Nests."""
        count = self._loops.get(loop, 0)
        self._loops[loop] = count + 1
        if not count:
            loop.add_reader(self._sock.fileno(), self._pump)
        try:
            yield
        finally:
            self._loops[loop] -= 1
            if not self._loops[loop]:
                del self._loops[loop]
                if not loop.is_closed():
                    loop.remove_reader(self._sock.fileno())

    # --- reading ----------------------------------------------------------------------------

    def _wait(self, waiter: Waiter) -> bool:
        """Wait for the reply. False where a tool is to be run first."""
        main = self.interrupts.enter()
        try:
            while not (waiter.done or waiter.calls):
                if self._lead_or_follow(waiter):
                    self._lead(waiter, main)
                else:
                    with self.interrupts.window(main):
                        waiter.bell.get()
        finally:
            self._step_down(waiter)
            self.interrupts.leave(main)
        return waiter.done

    def _lead_or_follow(self, waiter: Waiter) -> bool:
        with self._mutex:
            if self._leader is None or self._leader is waiter:
                self._leader = waiter
                return True
            if waiter not in self._followers:
                self._followers.append(waiter)
            return False

    def _lead(self, waiter: Waiter, main: bool) -> None:
        while not (waiter.done or waiter.calls):
            self._poll(select.POLLIN, main, leading=True)
            self._fill()

    def _finish(self, waiter: Waiter) -> None:
        waiter.done = True
        self._wake_up(waiter)

    def _wake_up(self, waiter: Waiter) -> None:
        """Wake whoever waits. A leader does not hear its bell: it is in poll().

        It may not have read its reply itself: an event loop, or a thread that is
        blocked in writing, reads too.
        """
        waiter.wake()
        if waiter is self._leader and waiter.thread != threading.get_ident():
            os.eventfd_write(self._wake, 1)

    def _step_down(self, waiter: Waiter) -> None:
        with self._mutex:
            if self._leader is waiter:
                self._leader = None
            with suppress(ValueError):
                self._followers.remove(waiter)
            # Also where this one was only a follower: it may have been woken to lead.
            if self._leader is None and self._followers:
                self._followers[0].bell.put(None)

    def _poll(self, events: int, main: bool, *, leading: bool = False) -> int:
        poll = select.poll()
        poll.register(self._sock, events)
        if leading:
            poll.register(self._wake, select.POLLIN)
        if not main:
            poll.register(self.interrupts.alert, select.POLLIN)
        with self.interrupts.window(main):
            ready = dict(poll.poll())
        if self._wake in ready:
            _drain_event(self._wake)
        if self.interrupts.alert in ready:
            self._abort_threads()
        return ready.get(self._sock.fileno(), 0)

    def _note_interrupt(self) -> None:
        """In the signal handler, so no lock may be taken."""
        self._cut = self._last_id

    def _abort_threads(self) -> None:
        """An interrupt ends the waits of all threads that had begun before it."""
        _drain_event(self.interrupts.alert)
        for waiter in list(self._waiters.values()):
            if not waiter.main and waiter.notify is None and waiter.id <= self._cut:
                waiter.aborted = True
                self._finish(waiter)

    def _pump(self) -> None:
        main = self.interrupts.enter()
        try:
            self._fill()
        finally:
            self.interrupts.leave(main)

    def _fill(self) -> None:
        """Read what is there and hand it out. Never blocks for long."""
        with self._reading:
            if self._filling:
                return
            try:
                self._filling = True
                self._read()
            finally:
                self._filling = False

    def _read(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(
                _READ, socket.CMSG_SPACE(16 * 4), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError as error:
            _lost(error)
        if not data:
            os._exit(0)  # the kernel closed the link: nobody needs this process any more
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array("i")
                fds.frombytes(payload[: len(payload) // 4 * 4])
                self._fds.extend(fds)
        self._in += data
        self._hand_out()

    def _hand_out(self) -> None:
        start, held = 0, len(self._in)
        with memoryview(self._in) as view:
            while held - start >= 4:
                end = start + 4 + int.from_bytes(view[start : start + 4], "little")
                if held < end:
                    break
                self._dispatch(self._decode(bytes(view[start + 4 : end])))
                start = end
        del self._in[:start]

    def _decode(self, frame: bytes) -> ToWorker:
        try:
            return self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            # Kernel and worker are of different versions: nothing sensible can follow.
            os.write(2, f"the worker cannot read what the kernel sent: {error}\n".encode())
            os._exit(1)

    def _dispatch(self, message: ToWorker) -> None:
        if isinstance(message, Reply):
            waiter = self._waiters.get(message.id)
            # A reply that nobody takes answers an interrupted request.
            if waiter is not None and waiter.accept is not None and waiter.accept(message):
                self._waiters.pop(message.id, None)
                self._finish(waiter)
            return
        if isinstance(message, CallTool):
            waiter = self._waiters.get(message.batch)
            if waiter is not None and waiter.open:
                waiter.calls.append(message)
                self._wake_up(waiter)
                return
        fd = None
        if isinstance(message, messages.LoadPrompt) and self._fds:
            fd = self._fds.popleft()
        self._order(Command(message, fd))

    def _order(self, command: Command) -> None:
        self.commands.append(command)
        idle = self._idle
        if idle is not None:
            self._finish(idle)
        elif self.on_command is not None:
            self.on_command()

    # --- forks ------------------------------------------------------------------------------

    def forget(self) -> None:
        """In a forked child of user code: let go of the link."""
        self.dead = True
        with suppress(OSError):
            self._sock.close()


def _no_tools(call: CallTool) -> None:
    """Before a run has any."""


def _drain_event(fd: int) -> None:
    with suppress(BlockingIOError):
        os.eventfd_read(fd)


def _lost(error: OSError) -> NoReturn:
    """The kernel is gone, or user code closed the link: in both cases there is no way on."""
    os.write(2, f"the worker lost its link to the kernel: {error}\n".encode())
    os._exit(1)


def settle(future: asyncio.Future[None]) -> None:
    """Let whoever awaits *future* go on."""
    if not future.done():
        future.set_result(None)


def _call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop was closed: nobody waits there any more
        loop.call_soon_threadsafe(callback)
