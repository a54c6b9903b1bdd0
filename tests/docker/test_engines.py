"""One-shot service that builds engines, run by its entry point without a GPU."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from testkit.models.sized import SIZES, random_model
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.container import ENTRYPOINT, image_environment
from token2wav.published.artifacts import Artifact, EngineFolder, fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Model of a single layer, because the time of an export grows with its operations."""
    return random_model(tmp_path / "model", SIZES["tiny"] | {"depth": 1})


def leave_vocoder(engines: EngineFolder, model: Path) -> None:
    """Writes the vocoder that an interrupted build leaves in the folder.

    The file is empty, because no test runs this graph and a real export takes long.
    """
    with engines.staging() as staged:
        (staged / "vocoder.onnx").touch()
        engines.add(
            staged,
            Artifact(
                file="vocoder.onnx",
                graph="vocoder",
                precision="float32",
                backend="onnx",
                fingerprint=fingerprint(model, "vocoder"),
                opset=20,
                schedule={},
                versions={},
                target={},
                flags=(),
                profiles=(),
                created="2026-11-21T00:00:00+00:00",
                seconds=0.0,
                command="",
            ),
        )


@pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="on a machine with a GPU it builds TensorRT engines, in minutes",
)
@pytest.mark.slow
def test_missing_engines_are_built_once(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "engines"
    folder = root / f"cpu-{platform.machine()}_onnx-{version('onnxruntime')}"
    leave_vocoder(EngineFolder(model, folder), model)
    settings = tmp_path / "server.yaml"
    settings.write_text("runtime: {backend: onnx}")
    environment = image_environment(tmp_path) | {
        "TOKEN2WAV_SETTINGS_FILE": str(settings),
        "TOKEN2WAV_MODEL_FOLDER": str(model),
        "TOKEN2WAV_ENGINES_FOLDER": str(root),
    }

    def build() -> list[str]:
        done = subprocess.run(
            [str(ENTRYPOINT), "engines"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=4 * PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first, *_, last = lines = build()
    assert first == f"engines: building step in float32 for onnx in {folder}"
    assert not [line for line in lines if "vocoder" in line]
    assert last == f"engines: {folder} is complete"
    assert list(root.iterdir()) == [folder]
    made = EngineFolder(model, folder).artifacts()
    assert {artifact.graph: artifact.precision for artifact in made} == {
        "step": "float32",
        "vocoder": "float32",
    }
    assert build() == [f"engines: no engine is built: {folder} is up to date"]
    assert EngineFolder(model, folder).artifacts() == made
