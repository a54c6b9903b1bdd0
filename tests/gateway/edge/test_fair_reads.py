"""Fair reads of connections: quiet connections go first, and reads pause as long as they last."""

from __future__ import annotations

import asyncio

import pytest

from token2wav_gateway.edge.fair_reads import FairReads

pytestmark = pytest.mark.anyio


class Line:
    """Connections whose reads take a fixed time of a clock that nothing else moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads = FairReads(lambda: self.now)
        self.log: list[str] = []

    def join(self, name: str, took: float, reads: int = 1) -> None:
        client = Client(self, name, took, reads)
        self.reads.join(client, client.read)

    async def finish(self, reads: int) -> None:
        while len(self.log) < reads:
            await asyncio.sleep(0)
            self.now += 0.001


class Client:
    turn = 0.0

    def __init__(self, line: Line, name: str, took: float, reads: int) -> None:
        self._line, self._name, self._took, self._left = line, name, took, reads

    def read(self) -> None:
        self._line.now += self._took
        self._line.log.append(self._name)
        self._left -= 1
        if self._left:  # the next bytes have arrived already
            asyncio.get_running_loop().call_soon(self._line.reads.join, self, self.read)


async def test_reads_pause_as_long_as_they_last() -> None:
    line = Line()
    for _ in range(10):
        line.join("flood", 0.003)
    assert len(line.log) == 2
    await asyncio.sleep(0.05)  # much longer than the pause, but the clock stands still
    assert len(line.log) == 2
    line.now += 0.006
    while len(line.log) < 4:
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert len(line.log) == 4


async def test_tasks_take_turns_with_reads_and_pause_too() -> None:
    line, done = Line(), list[str]()
    storm = Client(line, "storm", 0.003, 1)

    async def work(number: int) -> None:
        line.now += 0.003
        await asyncio.sleep(0)
        line.now += 0.003
        done.append(f"message {number}")

    messages = asyncio.gather(*(line.reads.run(storm, work(number)) for number in range(3)))
    await asyncio.sleep(0.05)
    assert done == []  # two steps, and then a pause
    line.join("health", 0.0001)
    await line.finish(1)
    while len(done) < 3:
        await asyncio.sleep(0)
        line.now += 0.001
    assert line.log == ["health"]
    await messages
    assert storm.turn == pytest.approx(0.018)


async def test_a_task_that_is_cancelled_keeps_no_turn() -> None:
    line, done = Line(), list[str]()
    storm, ended = Client(line, "storm", 0.003, 1), list[int]()

    async def work(number: int) -> None:
        try:
            line.now += 0.003
            await asyncio.sleep(0.01)
        finally:
            ended.append(number)
        done.append(f"message {number}")

    tasks = [asyncio.ensure_future(line.reads.run(storm, work(number))) for number in range(9)]
    for wait in (0, 0, 0.005):  # some have their turn, some wait for it, some sleep
        await asyncio.sleep(wait)
        tasks.pop().cancel()
        tasks.pop(0).cancel()
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        line.now += 0.001
    assert sorted(done) == sorted(f"message {number}" for number in range(3, 6))
    line.now += 1
    line.join("health", 0.0001)
    assert line.log == ["health"]


async def test_a_quiet_connection_goes_before_floods() -> None:
    line = Line()
    for number in range(50):
        line.join(f"flood {number}", 0.003, reads=4)
    await line.finish(100)
    before = len(line.log)
    line.join("health", 0.0001)
    await line.finish(200 + 1)
    assert line.log.index("health") <= before + 1
    assert all(line.log.count(f"flood {number}") == 4 for number in range(50))
