from __future__ import annotations

import pytest

from token2wav_server.model_process import CANARY_VARIABLE, is_canary


@pytest.mark.parametrize(
    ("secret", "client", "known"),
    [
        ("secret", "secret", True),
        ("secret", "secre", False),
        ("secret", "", False),
        ("secret", "sécret", False),
        ("", "", False),  # a server that the launcher has not started
        (None, "", False),
    ],
)
def test_only_the_launcher_can_name_itself_canary(
    secret: str | None, client: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CANARY_VARIABLE, raising=False)
    if secret is not None:
        monkeypatch.setenv(CANARY_VARIABLE, secret)
    assert is_canary(client) is known
