"""Named voices on real servers: sent once, named later, or known to the server at its start."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import tritonclient.grpc as triton
from numpy.typing import NDArray
from safetensors.numpy import save_file

from testkit.models.golden import DATA, TINY, GoldenSet
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.serve_command import synth
from testkit.rigs.server_rig import Rig, voice_inputs
from token2wav import Token2Wav, Voice
from token2wav_client import Client, ClientVoice, ServerError

UNKNOWN = "0" * 64


def named(voice_id: str) -> dict[str, NDArray[Any]]:
    return {"voice_id": np.frombuffer(bytes.fromhex(voice_id), np.uint8)}


def spoken(rig: Rig, tokens: NDArray[np.int32], voice: ClientVoice | str) -> NDArray[Any]:
    with Client(rig.server.grpc_url) as client:
        return np.concatenate([chunk.audio for chunk in client.synthesize([tokens], voice)])


def test_a_voice_is_sent_once_and_named_afterwards(
    rig: Rig, golden: GoldenSet, voice: ClientVoice
) -> None:
    sent = spoken(rig, golden.tokens, voice)
    by_name = spoken(rig, golden.tokens, voice.id)
    assert np.array_equal(by_name, sent)


def test_voices_that_differ_in_their_mel_only_are_not_mixed_up(
    rig: Rig, golden: GoldenSet, model: Token2Wav
) -> None:
    original = golden.voice
    tokens = golden.tokens[:60]
    for factor in (1.0, 0.5):
        voice = Voice(
            original.prompt_tokens, factor * original.prompt_mel, original.speaker_embedding
        )
        client_voice = ClientVoice(voice.prompt_tokens, voice.prompt_mel, voice.speaker_embedding)
        for speaker in (client_voice, client_voice.id):
            assert (
                np.abs(spoken(rig, tokens, speaker) - model.synthesize(tokens, voice)).max() <= 1e-4
            )


def test_an_unknown_voice_is_refused(rig: Rig, golden: GoldenSet) -> None:
    with pytest.raises(
        ServerError,
        match=f"voice_id: '{UNKNOWN}' is not registered here; send the voice itself once",
    ):
        spoken(rig, golden.tokens, UNKNOWN)


def test_the_command_reports_an_unknown_voice(rig: Rig, tmp_path: Path) -> None:
    arguments = [f"--tokens={DATA}/demo/tokens.npy", f"--out={tmp_path / 'out.wav'}"]
    command = synth(rig.server.grpc_url, *arguments, f"--voice-id={UNKNOWN}")
    completed = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert completed.returncode == 4
    assert "is not registered here; send the voice itself once" in completed.stderr


def test_a_malformed_id_is_refused(rig: Rig) -> None:
    with rig.connect() as connection:
        connection.send([1], named("0123"))
        [error] = connection.answers().errors
        assert "unexpected shape for input 'voice_id'" in error


def test_a_voice_and_an_id_together_are_refused(rig: Rig, golden: GoldenSet) -> None:
    with rig.connect() as connection:
        connection.send([1], voice_inputs(golden.voice) | named(UNKNOWN))
        assert connection.answers().errors == [
            "voice_id: sent together with a voice; send only one of them"
        ]


def test_an_id_in_the_middle_is_refused(rig: Rig, golden: GoldenSet) -> None:
    with rig.connect() as connection:
        connection.send([1], golden.voice, "middle", start=True)
        assert not connection.answers().errors
        connection.send([1], named(golden.voice.content_hash), "middle")
        assert connection.answers().errors == [
            "voice_id: only the first request of an utterance may have this field"
        ]


def test_an_id_as_a_string_does_not_kill_the_process(rig: Rig, golden: GoldenSet) -> None:
    string = triton.InferInput("voice_id", [1], "BYTES")
    string.set_data_from_numpy(np.array([UNKNOWN.encode()], np.object_))
    with rig.connect() as connection:
        connection.client.async_stream_infer("token2wav", [string])
        [error] = connection.answers().errors
        assert "data-type is 'BYTES'" in error
        connection.send(golden.tokens[:1], golden.voice)
        assert connection.answers().audio.shape == (960,)


@pytest.fixture(scope="module")
def keeping(golden: GoldenSet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Server that knows the voice anna from its start, and keeps eight other voices."""
    folder = tmp_path_factory.mktemp("keeping")
    save_file(voice_inputs(golden.voice), folder / "anna.safetensors")
    settings = "voices: [anna.safetensors]\nlimits: {streams: 2}"
    with Rig.start(TINY, folder, settings) as rig:
        yield rig
        rig.wait_until_empty()


def variant(voice: ClientVoice, factor: float) -> ClientVoice:
    return ClientVoice(voice.prompt_tokens, voice.prompt_mel, factor * voice.speaker_embedding)


def test_a_voice_of_the_settings_goes_by_its_name_and_by_its_id(
    keeping: Rig, golden: GoldenSet, voice: ClientVoice, tmp_path: Path
) -> None:
    def prompts(result: str) -> int:
        [count] = re.findall(
            rf'token2wav_voice_prompts_total\{{result="{result}"\}} (\d+)', keeping.metrics()
        )
        return int(count)

    computed = prompts("miss")
    by_name = spoken(keeping, golden.tokens, "anna")
    assert prompts("miss") == computed  # the prompt was computed before the first request
    for factor in range(2, 11):  # more voices than the server keeps of voices that are sent
        spoken(keeping, golden.tokens[:3], variant(voice, factor))
    assert np.array_equal(spoken(keeping, golden.tokens, voice.id), by_name)
    assert np.array_equal(spoken(keeping, golden.tokens, voice), by_name)
    tokens, out = tmp_path / "tokens.npy", tmp_path / "out.wav"
    np.save(tokens, golden.tokens)
    arguments = ["--quiet", "--voice-name=anna", f"--tokens={tokens}", f"--out={out}"]
    command = synth(keeping.server.grpc_url, *arguments, "--audio-format=float32")
    subprocess.run(command, timeout=PATIENCE_SECONDS, check=True)
    assert np.array_equal(soundfile.read(out, dtype="float32")[0], by_name)


def test_an_unknown_name_is_refused_with_the_known_names(keeping: Rig, rig: Rig) -> None:
    tokens = np.array([1], np.int32)
    with pytest.raises(
        ServerError, match=r"^voice: 'Änne .b' is unknown; this server has the voices anna$"
    ):
        spoken(keeping, tokens, 'Änne "b')
    with pytest.raises(
        ServerError, match=r"^voice: 'anna' is unknown; this server has no named voices$"
    ):
        spoken(rig, tokens, "anna")


@pytest.mark.parametrize(
    ("value", "message"),
    [(7, "7 is not a valid voice name"), ("", "'' is not a valid"), (True, "True is not a")],
)
def test_invalid_voice_names_are_refused(rig: Rig, value: object, message: str) -> None:
    with rig.connect() as connection:
        connection.send([1], parameters={"voice": value})
        [error] = connection.answers().errors
        assert error.startswith(f"voice: {message}")


def test_a_name_and_another_voice_together_are_refused(keeping: Rig, golden: GoldenSet) -> None:
    with keeping.connect() as connection:
        for voice in (
            golden.voice,
            named(UNKNOWN),
            {"speaker_embedding": golden.voice.speaker_embedding},
        ):
            connection.send([1], voice, parameters={"voice": "anna"})
            assert connection.answers().errors == [
                "voice: sent together with a voice; send only one of them"
            ]
