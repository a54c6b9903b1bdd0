"""Clients that go away leave nothing behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from testkit.models.golden import DATA, GoldenSet
from testkit.patience import until
from testkit.rigs.serve_command import synth
from testkit.rigs.server_rig import Rig
from token2wav_client import Client, ClientVoice

TOLERANCE = 1e-4  # of audio: batches sum in another order than single streams, as in test_streaming


def test_cancelled_stream_is_freed_at_once(rig: Rig, golden: GoldenSet, voice: ClientVoice) -> None:
    with Client(rig.server.grpc_url) as client, client.open(voice) as utterance:
        utterance.push(golden.tokens[:60])
        assert next(utterance).index == 0
        assert rig.open_streams()["engine"] == 1
    rig.wait_until_empty()


def test_a_stream_that_waits_for_tokens_is_freed(rig: Rig, voice: ClientVoice) -> None:
    with Client(rig.server.grpc_url) as client, client.open(voice) as utterance:
        utterance.push([1, 2, 3])
        until(lambda: rig.open_streams()["engine"] == 1)
    rig.wait_until_empty()


def test_killed_client_is_noticed(rig: Rig, tmp_path: Path) -> None:
    """A process that dies in the middle of an utterance, with tokens still to come."""
    command = synth(rig.server.grpc_url, "--quiet", "--rate=25", f"--out={tmp_path / 'out.wav'}")
    command += [f"--tokens={DATA}/demo/tokens.npy", f"--voice={DATA}/demo/voice.safetensors"]
    client = subprocess.Popen(command)
    until((tmp_path / "out.wav").is_file)
    assert rig.open_streams()["engine"] == 1
    client.kill()
    client.wait()
    rig.wait_until_empty()


def test_others_are_not_harmed(
    rig: Rig, golden: GoldenSet, voice: ClientVoice, whole: NDArray[np.float32]
) -> None:
    with Client(rig.server.grpc_url) as client:
        leavers = [client.open(voice) for _ in range(4)]
        stayers = [client.open(voice) for _ in range(4)]
        for utterance in leavers + stayers:
            utterance.push(golden.tokens[:60])
        for utterance in leavers:
            utterance.close()
        for utterance in stayers:
            utterance.finish(golden.tokens[60:])
        audio = [np.concatenate([chunk.audio for chunk in utterance]) for utterance in stayers]
    for samples in audio:
        assert len(samples) == 960 * len(golden.tokens)
        assert np.abs(samples - whole).max() <= TOLERANCE
