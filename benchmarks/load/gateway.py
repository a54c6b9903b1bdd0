"""Gateway under load, in front of a language model server that answers with stored tokens."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.load.subject import Subject
from testkit.rigs.gateway_rig import GatewayRig
from token2wav_server.demo import language_model


@contextmanager
def gateway(grpc_url: str, subject: Subject, speed: float) -> Iterator[str]:
    """Runs a gateway in a thread, and yields its URL.

    Args:
        speed: pace of the tokens, as a multiple of speech; 0 sends all tokens at once.
    """
    pace = speed * subject.config.token_frame_rate or math.inf
    answer = language_model.create_app(lambda _: subject.tokens.tolist(), pace)
    limits = {"limits": {"streams": 4_000}}
    with (
        tempfile.TemporaryDirectory() as folder,
        GatewayRig.between(
            answer, Path(folder), grpc_url=grpc_url, voice=subject.voice, settings=limits
        ) as rig,
    ):
        yield rig.url
