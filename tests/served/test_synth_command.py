"""`token2wav synth` on a real server: what Triton and the settings of the server decide.
`tests/client/with_server/test_synth_command.py` has all else.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from testkit.models.golden import DATA, GoldenSet
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.serve_command import synth
from testkit.rigs.server_rig import Rig, voice_inputs
from tests.served.conftest import ANNA
from tests.served.test_streaming import SERVER_EQUALS_LIBRARY

TOKENS = DATA / "demo" / "tokens.npy"
VOICE = DATA / "demo" / "voice.safetensors"


def run(rig: Rig, **options: Any) -> subprocess.CompletedProcess[str]:
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = synth(rig.server.grpc_url, *arguments)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )


def test_a_voice_of_the_settings_by_its_name(
    rig: Rig, name: str, golden: GoldenSet, whole: NDArray[np.float32], tmp_path: Path
) -> None:
    tokens, out = tmp_path / "tokens.npy", tmp_path / "out.wav"
    np.save(tokens, golden.tokens)
    options = {"audio_format": "float32", "voice_name": ANNA, "model": name}
    done = run(rig, tokens=tokens, out=out, **options)
    assert done.returncode == 0, done.stderr
    audio, _ = soundfile.read(out, dtype="float32")
    assert np.abs(audio - whole).max() <= SERVER_EQUALS_LIBRARY


@pytest.mark.parametrize(
    ("file", "array", "message"),
    [
        (
            "tokens",
            np.ones((60, 2), np.int32),
            "tokens: shape (60, 2), expected 1 dimension for this model",
        ),
        (
            "tokens",
            np.zeros((4, 2), np.float32),
            "latents: sent, but this model takes no latents",
        ),
        (
            "voice",
            np.ones(9, np.float32),
            "speaker_embedding: shape (9,), expected (192,) for this model",
        ),
    ],
)
def test_an_input_that_triton_refuses_names_its_file(
    rig: Rig, golden: GoldenSet, tmp_path: Path, file: str, array: NDArray[Any], message: str
) -> None:
    options: dict[str, Any] = {"tokens": TOKENS, "voice": VOICE, "out": tmp_path / "out.wav"}
    if file == "tokens":
        options["tokens"] = tmp_path / "tokens.npy"
        np.save(options["tokens"], array)
    else:
        options["voice"] = tmp_path / "voice.npz"
        inputs: dict[str, Any] = voice_inputs(golden.voice) | {"speaker_embedding": array}
        np.savez(options["voice"], **inputs)
    done = run(rig, **options)
    assert done.returncode == 4
    assert done.stderr == f"token2wav synth: error: {options[file]}: {message}\n"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("voice_id", "0" * 64, "is not registered here; send the voice itself once"),
        ("voice_name", "nobody", f"'nobody' is unknown; this server has the voices {ANNA}"),
        ("steps", "4", "steps: 4 is not one of 10, 3"),
    ],
)
def test_an_option_that_the_server_refuses(
    rig: Rig, name: str, tmp_path: Path, option: str, value: str, message: str
) -> None:
    voice = {} if option.startswith("voice") else {"voice": VOICE}
    done = run(rig, tokens=TOKENS, out=tmp_path / "out.wav", model=name, **voice, **{option: value})
    assert done.returncode == 4
    assert message in done.stderr
