"""Gateway under load, in front of a language model server that answers with stored tokens."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from benchmarks.load.listener import VOICE
from benchmarks.load.subject import Subject
from testkit.rigs.gateway_rig import TEMPLATE, serving, serving_gateway
from token2wav_gateway.settings import Settings
from token2wav_server.demo import language_model


@contextmanager
def settings_of(
    grpc_url: str, subject: Subject, speed: float, limits: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], FastAPI]]:
    """Runs a language model server in a thread.

    Args:
        speed: pace of its tokens, as a multiple of speech; 0 sends all tokens at once.

    Yields:
        Settings of a gateway, and the language model server.
    """
    pace = speed * subject.config.token_frame_rate or math.inf
    answer = language_model.create_app(lambda _: subject.tokens.tolist(), pace)
    with tempfile.TemporaryDirectory() as voices, serving(answer) as port:
        subject.save_voice(Path(voices) / f"{VOICE}.safetensors")
        url = f"http://127.0.0.1:{port}/v1"
        model = {"url": url, "model": language_model.MODEL, "template": TEMPLATE}
        yield (
            {
                "language_model": model,
                "speech_server": {"url": grpc_url},
                "voices": {"folder": voices},
                "limits": dict(limits),
            },
            answer,
        )


@contextmanager
def gateway(grpc_url: str, subject: Subject, speed: float) -> Iterator[tuple[str, FastAPI]]:
    """Runs a gateway in a thread, and yields its URL and the language model server."""
    with (
        settings_of(grpc_url, subject, speed, {"streams": 4_000}) as (settings, answer),
        serving_gateway(Settings.model_validate(settings)) as port,
    ):
        yield f"http://127.0.0.1:{port}", answer
