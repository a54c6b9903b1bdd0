"""Crowd of long texts at full speed: the server stays up, and serves newcomers."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testkit.models.golden import TINY, GoldenSet
from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.serve_command import Serving
from token2wav_client import Client, ClientVoice

CROWD, LONG_TOKENS = 60, 3000
SHORT_TEXTS = 3
CANARIES = 3


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    config: Path = tmp_path_factory.mktemp("overload") / "config.yaml"
    # Room for the crowd and one newcomer.
    config.write_text(f"stream: {{first_tokens: 0}}\nlimits: {{streams: {CROWD + 1}}}\n")
    # Less patience than a turn of the crowd takes, so that a canary without priority fails.
    options = [f"--config={config}", "--canary-seconds=1", "--canary-patience-seconds=10"]
    with Serving.ready(TINY, *options) as serving:
        yield serving


class Crowd:
    """Clients that send long texts at once, and read their audio until `leave`."""

    def __init__(self, url: str, voice: ClientVoice, tokens: np.ndarray) -> None:
        self._client = Client(url, response_timeout_s=PATIENCE_SECONDS)
        self.ended: list[BaseException | None] = []
        self.heard = [threading.Event() for _ in range(CROWD)]
        self._threads = [
            threading.Thread(target=self._speak, args=(voice, tokens, heard), daemon=True)
            for heard in self.heard
        ]
        for thread in self._threads:
            thread.start()

    def _speak(self, voice: ClientVoice, tokens: np.ndarray, heard: threading.Event) -> None:
        try:
            for _ in self._client.synthesize([tokens], voice):
                heard.set()
            self.ended.append(None)
        except Exception as error:
            self.ended.append(error)

    def leave(self) -> None:
        self._client.close()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)


def test_a_crowd_of_long_texts(serving: Serving, golden: GoldenSet, voice: ClientVoice) -> None:
    tokens = np.resize(golden.tokens, LONG_TOKENS)
    crowd = Crowd(serving.url, voice, tokens)
    until(lambda: crowd.ended or all(heard.is_set() for heard in crowd.heard))
    assert crowd.ended == []
    with Client(serving.url, response_timeout_s=PATIENCE_SECONDS) as client:
        for _ in range(SHORT_TEXTS):
            audio = [chunk.audio for chunk in client.synthesize([golden.tokens[:75]], voice)]
            assert sum(map(len, audio)) == 75 * 960
        # One more long text fills the server, for all clients but the canary.
        last = client.synthesize([tokens], voice)
        next(last)
        assert client.health(timeout_s=PATIENCE_SECONDS).first_audio_s is None
        before = len(canaries(serving))
        until(lambda: len(canaries(serving)) >= before + CANARIES)
    assert crowd.ended == []  # newcomers and canaries have passed every long text
    assert not [line for line in serving.printed if "restart" in line]
    [gauge] = re.findall(r"^token2wav_canary_seconds (\S+)$", serving.metrics(), re.MULTILINE)
    assert float(gauge) > 0
    crowd.leave()


def canaries(serving: Serving) -> list[str]:
    return [line for line in serving.printed if re.search("canary stream=.* reason=finished", line)]
