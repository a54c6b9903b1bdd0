"""Fixtures of the demo voice: its front end, and the voice that this makes of a recording."""

from __future__ import annotations

import pytest

from examples import demo
from examples.demo_voice.recordings import PROMPT
from token2wav_voice import FrontEnd, PromptVoice, Recording


@pytest.fixture(scope="session")
def front_end() -> FrontEnd:
    return FrontEnd(demo.MODEL)


@pytest.fixture(scope="session")
def demo_prompt(front_end: FrontEnd) -> PromptVoice:
    return front_end.voice(Recording.load(PROMPT))
