"""Access keys, and the limits of each key."""

from __future__ import annotations

import hashlib

import pytest

from token2wav_gateway.access import Access
from token2wav_gateway.errors import AccessDeniedError, BusyError
from token2wav_gateway.settings import KeySettings


def key(name: str, **limits: int) -> KeySettings:
    return KeySettings(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), **limits)


def test_only_known_keys_are_admitted() -> None:
    access = Access([key("one"), key("two")])
    for authorization in ("Bearer one", "bearer two"):
        with access.admitted(authorization):
            pass
    for wrong in (None, "", "one", "Basic one", "Bearer", "Bearer ONE", "Bearer one two"):
        with pytest.raises(AccessDeniedError, match="a valid key is needed"):
            access.check(wrong)
    Access([]).check(None)


def test_a_key_has_limits_of_its_own() -> None:
    now = 0.0
    access = Access([key("one", streams=1, requests_per_minute=2), key("two")], lambda: now)
    with access.admitted("Bearer one"):
        with (
            pytest.raises(BusyError, match="1 requests are running"),
            access.admitted("Bearer one"),
        ):
            pass
        with access.admitted("Bearer two"):
            pass
    with access.admitted("Bearer one"):
        pass
    now = 59.0
    with pytest.raises(BusyError, match="2 requests a minute"), access.admitted("Bearer one"):
        pass
    now = 60.0
    with access.admitted("Bearer one"):
        pass
