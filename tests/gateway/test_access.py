"""Access keys, and the limits of each key."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from testkit.patience import PATIENCE_SECONDS
from token2wav_gateway.access import Access
from token2wav_gateway.errors import AccessDeniedError, BusyError
from token2wav_gateway.settings import KeySettings

pytestmark = pytest.mark.anyio


def key(name: str, **limits: int) -> KeySettings:
    return KeySettings(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), **limits)


async def test_only_known_keys_are_admitted() -> None:
    access = Access([key("one"), key("two")])
    for authorization in ("Bearer one", "bearer two"):
        async with access.admitted(authorization):
            pass
    for wrong in (None, "", "one", "Basic one", "Bearer", "Bearer ONE", "Bearer one two"):
        with pytest.raises(AccessDeniedError, match="a valid key is needed"):
            access.check(wrong)
    Access([]).check(None)


async def test_a_key_has_limits_of_its_own() -> None:
    now = 0.0
    access = Access([key("one", streams=1, requests_per_minute=2), key("two")], lambda: now)
    async with access.admitted("Bearer one"):
        with pytest.raises(BusyError, match="1 requests are running"):
            await access.admitted("Bearer one").__aenter__()
        async with access.admitted("Bearer two"):
            pass
    async with access.admitted("Bearer one"):
        pass
    now = 59.0
    with pytest.raises(BusyError, match="2 requests a minute"):
        await access.admitted("Bearer one").__aenter__()
    now = 60.0
    async with access.admitted("Bearer one"):
        pass


async def test_a_request_takes_the_place_of_one_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send it as soon as it has left the last one. Only so many wait."""
    monkeypatch.setattr("token2wav_gateway.access._LEAVING_S", PATIENCE_SECONDS)
    holder, running = Access([key("one", streams=2)]).check("Bearer one"), list[int]()

    async def request(number: int) -> None:
        async with holder.admitted():
            running.append(number)
            await asyncio.sleep(0.01)
            assert number in running[-2:]

    tasks = [asyncio.create_task(request(number)) for number in range(5)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [type(None)] * 4 + [BusyError]
    assert running == [0, 1, 2, 3]
