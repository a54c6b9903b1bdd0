"""Exported graphs as engines: streams through them equal torch, and configuration alone chooses
between them.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from testkit.models.golden import snr_db
from testkit.rigs.server_rig import Rig
from testkit.utterances import a_voice, some_tokens
from tests.exporters.rig import Export
from token2wav import RuntimeConfig, StreamConfig, Token2Wav, backends
from token2wav.errors import ArtifactError, BackendUnavailableError
from token2wav.exported.run import ExportedVocoder
from token2wav_export.cli import main
from token2wav_export.verify import stream_mel

MEL = 2e-5  # of float32, as in tests/families/cosyvoice3
AUDIO_DB = 40.0


@pytest.fixture(scope="module")
def tiny(export: Export, models: dict[str, Path]) -> Path:
    """Folder of the tiny model, with all that an ONNX engine needs in its engine folder."""
    export("tiny", "step", "float32")
    export("tiny", "step", "float16")
    export("tiny", "vocoder", "float32")
    return models["tiny"]


def load(
    model: Path, engine: str = "onnx", stream: StreamConfig | None = None, **options: str
) -> Token2Wav:
    runtime = RuntimeConfig(device="cpu", backend=engine, cache_mib=64, **options)  # type: ignore[arg-type]
    return Token2Wav.load(model, stream=stream, runtime=runtime)


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Token2Wav:
    return load(tiny, "torch")


@pytest.fixture(scope="module")
def onnx(tiny: Path) -> Token2Wav:
    return load(tiny)


@pytest.mark.parametrize(("prompt", "length"), [(0, 1), (0, 130), (41, 60), (75, 210)])
def test_streams_on_onnx_equal_torch(
    onnx: Token2Wav, reference: Token2Wav, prompt: int, length: int
) -> None:
    voice, tokens = a_voice(prompt), some_tokens(length)
    whole = reference.mel(tokens, voice)
    assert np.abs(stream_mel(onnx, tokens, voice) - whole).max() <= MEL
    audio = onnx.synthesize(tokens, voice)
    assert len(audio) == 960 * length
    assert snr_db(audio, reference.synthesize(tokens, voice)) >= AUDIO_DB


@pytest.mark.parametrize("engine", ["onnx", "torch"])
def test_float16_stays_finite_on_large_inputs(tiny: Path, engine: str) -> None:
    half, voice = load(tiny, engine, precision="float16"), a_voice(30)
    object.__setattr__(voice, "prompt_mel", voice.prompt_mel * 1e4)
    assert np.isfinite(stream_mel(half, some_tokens(60), voice)).all()


# Which engine.


def test_auto_selects_an_available_engine_and_logs_why(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setitem(backends._ORDER, "cpu", ("tensorrt", "onnx", "torch"))
    with caplog.at_level(logging.INFO):
        assert load(tiny, "auto").summary.name == "onnx"
        assert load(tiny, "auto", engines=str(tmp_path)).summary.name == "torch"
    assert (
        "backend tensorrt has priority but cannot be used: tensorrt needs an NVIDIA GPU"
        in caplog.text
    )
    assert "backend onnx has priority but cannot be used" in caplog.text
    assert "token2wav export onnx" in caplog.text


def test_an_engine_that_is_asked_for_must_be_there(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"token2wav export onnx --model .* --graphs step"):
        load(tiny, "onnx", engines=str(tmp_path))


def test_a_graph_that_is_damaged_is_refused_with_its_command(tiny: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny / "engines", tmp_path / "engines")
    [path] = folder.glob("step.float32.onnx.*/*.onnx")
    path.write_bytes(bytes(path.stat().st_size))
    command = "token2wav export onnx --model .* --graphs step --precision float32"
    with pytest.raises(ArtifactError, match=rf"^{path}: .*; if it is damaged, run: {command}$"):
        load(tiny, "onnx", engines=str(folder))


def test_tensorrt_needs_a_gpu(tiny: Path) -> None:
    with pytest.raises(BackendUnavailableError, match="NVIDIA GPU"):
        load(tiny, "tensorrt")


# The command that compares.


def verify(model: Path, engines: Path) -> list[str]:
    return ["verify", f"--model={model}", f"--out={engines}", "--device=cpu"]


def test_verify_compares_float16_on_torch(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--backend=torch", "--precision=float16", "--seconds=1"]
    assert main([*verify(tiny, tiny / "engines"), *options]) == 0
    assert "torch, float16, cpu, against torch, float32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("precisions", "taken"), [(("float32", "float16"), "float32"), (("float16",), "float16")]
)
def test_verify_compares_the_exported_graphs(
    tiny: Path,
    precisions: tuple[str, ...],
    taken: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The exports are compared although a server on this CPU would use torch."""
    for folder in (tiny / "engines").glob("[!.]*"):
        if folder.name.startswith(
            ("vocoder.", *(f"step.{precision}." for precision in precisions))
        ):
            (tmp_path / folder.name).symlink_to(folder)
    assert main([*verify(tiny, tmp_path), "--seconds=1"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"onnx, {taken}, cpu, against torch, float32")
    assert "compared with itself" not in captured.err


def test_verify_refuses_an_engine_that_differs(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = ExportedVocoder.__call__
    monkeypatch.setattr(ExportedVocoder, "__call__", lambda *arguments: 2 * exact(*arguments))
    assert main([*verify(tiny, tiny / "engines"), "--backend=onnx", "--seconds=1", "--json"]) == 1
    assert "vocoder_max" in capsys.readouterr().err


# The server.


def test_a_server_serves_on_onnx_by_configuration_alone(
    tiny: Path, onnx: Token2Wav, tmp_path: Path
) -> None:
    settings = "runtime: {backend: onnx, device: cpu}"
    tokens, voice = some_tokens(90), a_voice(30)
    with Rig.start(tiny, tmp_path, settings) as rig, rig.connect() as connection:
        connection.send(tokens, voice)
        answers = connection.answers()
        assert answers.errors == []
    assert "token2wav: backend  onnx, float32\n" in (tmp_path / "triton.log").read_text()
    assert snr_db(answers.audio, onnx.synthesize(tokens, voice)) >= AUDIO_DB
    assert snr_db(answers.audio, load(tiny, "torch").synthesize(tokens, voice)) >= AUDIO_DB


def test_a_gpu_needs_the_onnxruntime_for_gpus() -> None:
    """Only the onnxruntime for CPUs is installed here."""
    from token2wav.exported.run import check_provider

    check_provider(torch.device("cpu"))
    with pytest.raises(
        BackendUnavailableError, match=r"no CUDA provider; run: .*'token2wav\[onnx-gpu\]'"
    ):
        check_provider(torch.device("cuda"))
