"""Readiness: requests at the same time share a check, and a result is kept for a second."""

from __future__ import annotations

import asyncio

from token2wav_gateway.errors import ModelError
from token2wav_gateway.readiness import Readiness

REQUESTS = 100


def test_requests_share_a_check() -> None:
    now, checks, works = 0.0, 0, True

    async def check() -> None:
        nonlocal checks
        checks += 1
        await asyncio.sleep(0)
        if not works:
            raise ModelError("speech server: gone")

    async def confirm_often() -> None:
        nonlocal now, works
        readiness = Readiness(check, lambda: now)

        async def failures() -> int:
            confirmed = (readiness.confirm() for _ in range(REQUESTS))
            outcomes = await asyncio.gather(*confirmed, return_exceptions=True)
            return sum(isinstance(one, ModelError) for one in outcomes)

        assert (await failures(), checks) == (0, 1)
        now, works = 0.9, False
        assert (await failures(), checks) == (0, 1)
        now = 1.0
        assert (await failures(), checks) == (REQUESTS, 2)
        now, works = 2.0, True
        assert (await failures(), checks) == (0, 3)

    asyncio.run(confirm_often())
