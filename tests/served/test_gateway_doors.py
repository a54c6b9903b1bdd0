"""Gateway in front of a real server: the audio of the library through each door. All else of the
doors is in tests/gateway/doors/test_contract.py.
"""

from __future__ import annotations

import pytest

from testkit.rigs.gateway_lines import DOORS
from testkit.rigs.gateway_rig import GatewayRig
from testkit.rigs.gateway_speech import TEXT, assert_same, expected
from token2wav import Token2Wav
from token2wav_client import ClientVoice


@pytest.mark.parametrize("door", DOORS)
def test_a_connection_says_the_audio_of_the_library(
    gateway: GatewayRig, model: Token2Wav, voice: ClientVoice, door: str
) -> None:
    with DOORS[door](gateway) as line:
        assert_same(line.say(f"{TEXT}."), expected(model, voice, TEXT))
