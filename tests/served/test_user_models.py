"""A user's own model folder in CosyVoice3's format: yaml, flow.pt, hift.pt, served and spoken end
to end.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file, save_file

from testkit.models.golden import TINY, GoldenSet
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.serve_command import synth
from testkit.rigs.server_rig import Rig
from token2wav import Token2Wav

# Keys of a real cosyvoice3.yaml that have nothing to do with serving, code to be run included.
UNRELATED_YAML = """
llm: !new:cosyvoice.llm.llm.CosyVoice3LM
    llm: !new:cosyvoice.llm.llm.Qwen2Encoder
        pretrain_path: !ref <qwen_pretrain_path>
    sampling: !name:cosyvoice.utils.common.ras_sampling
        top_p: 0.8
feat_extractor: !name:matcha.utils.audio.mel_spectrogram
    fmax: null
data_pipeline: [
    !ref <feat_extractor>,
]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as its owner would have it: public names in their older form, pickled, float16
    nowhere.
    """
    folder = tmp_path_factory.mktemp("CosyVoice3")
    (folder / "cosyvoice3.yaml").write_text((TINY / "cosyvoice3.yaml").read_text() + UNRELATED_YAML)
    torch.save(load_file(TINY / "flow.safetensors"), folder / "flow.pt")
    hift = {}
    for name, value in load_file(TINY / "hift.safetensors").items():
        name = name.replace("parametrizations.weight.original0", "weight_g")
        name = name.replace("parametrizations.weight.original1", "weight_v")
        hift[f"generator.{name}"] = value
    torch.save(hift, folder / "hift.pt")
    (folder / "llm.pt").write_bytes(b"not ours to read")
    return folder


def test_served_and_spoken(folder: Path, golden: GoldenSet, tmp_path: Path) -> None:
    voice = golden.voice
    save_file(
        {
            "prompt_tokens": torch.tensor(voice.prompt_tokens),
            "prompt_mel": torch.tensor(voice.prompt_mel),
            "speaker_embedding": torch.tensor(voice.speaker_embedding),
        },
        tmp_path / "voice.safetensors",
    )
    # so that no hop is cut short
    with Rig.start(folder, tmp_path, "limits: {player_buffer_seconds: 60}") as rig:
        arguments = ["--json", "--tokens=-", "--voice=voice.safetensors", "--out=out.wav"]
        arguments += ["--audio-format=float32", "--tokens-per-request=1"]
        command = synth(rig.server.grpc_url, *arguments)
        with subprocess.Popen(
            command,
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=0,
        ) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            half = len(golden.tokens) // 2
            client.stdin.write("".join(f"<|s_{token}|>" for token in golden.tokens[:half]))
            wav, deadline = tmp_path / "out.wav", time.monotonic() + PATIENCE_SECONDS
            # its header comes before the first samples
            while not (wav.is_file() and wav.stat().st_size > 2 * 960):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            early = soundfile.info(wav).frames  # grows on disk while tokens are still to come
            client.stdin.write("".join(f"<|s_{token}|>" for token in golden.tokens[half:]))
            client.stdin.close()
            report = json.loads(client.stdout.read())
        assert client.returncode == 0
        rig.wait_until_empty()
    audio, rate = soundfile.read(wav, dtype="float32")
    assert 0 < early < len(audio) == 960 * len(golden.tokens)
    assert rate == 24000
    assert len(report["chunks"]) == 3
    expected = Token2Wav.load(folder).synthesize(golden.tokens, voice)
    assert np.abs(audio - expected).max() <= 1e-5
    assert np.isfinite(audio).all()
    assert audio.std() > 0.01
