"""Fixtures of the demo voice: its front end, and the voice that this makes of a recording."""

from __future__ import annotations

import pytest

from examples import demo
from examples.demo_voice.recordings import PROMPT
from token2wav_client import ClientVoice
from token2wav_voice import FrontEnd, PromptVoice, Recording


@pytest.fixture(scope="session")
def front_end() -> FrontEnd:
    return FrontEnd(demo.MODEL)


@pytest.fixture(scope="session")
def demo_prompt(front_end: FrontEnd) -> PromptVoice:
    return front_end.voice(Recording.load(PROMPT))


@pytest.fixture(scope="session")
def spoken(demo_prompt: PromptVoice) -> ClientVoice:
    """Voice of the demo's recording."""
    made = demo_prompt
    return ClientVoice(made.prompt_tokens, made.prompt_mel, made.speaker_embedding)
