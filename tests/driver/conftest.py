"""A hub on a clock that goes only when it is told to, and what talks to it."""

from __future__ import annotations

import pytest

from rlm_kernel.driver.hub import Hub
from tests.driver.parties import Clock, FrontEnd, Kernel, Script


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hub(clock: Clock) -> Hub:
    return Hub(clock.time, clock.call_later)


@pytest.fixture
def front(hub: Hub) -> FrontEnd:
    return FrontEnd(hub).open()


@pytest.fixture
def script(hub: Hub, clock: Clock) -> Script:
    return Script(hub.on_event, clock)


@pytest.fixture
def kernel(hub: Hub) -> Kernel:
    return Kernel(hub)
