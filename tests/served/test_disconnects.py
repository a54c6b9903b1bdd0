"""Clients that go away leave nothing behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

from testkit.models.golden import DATA, GoldenSet
from testkit.patience import until
from testkit.rigs.serve_command import synth
from testkit.rigs.server_rig import Rig
from token2wav_client import Client, ClientVoice


def test_cancelled_stream_is_freed_at_once(rig: Rig, golden: GoldenSet, voice: ClientVoice) -> None:
    with Client(rig.server.grpc_url) as client, client.open(voice) as utterance:
        utterance.push(golden.tokens[:60])
        assert next(utterance).index == 0
        assert rig.open_streams()["engine"] == 1
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
