"""The command `token2wav export`: its messages and its exit codes.

Only one graph is really exported here.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from testkit.models.folders import write_folder
from testkit.models.golden import TINY
from tests.exporters.rig import ARTIFACT, Export, add, engine
from token2wav.errors import BackendUnavailableError, ConfigError
from token2wav.published.artifacts import EngineFolder
from token2wav_export import ExportError, engines, making
from token2wav_export.cli import main
from token2wav_export.engines import build_target, load_package
from token2wav_export.inspection import as_text, inspect_folder


def failure(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    """Returns the one line that a failing command prints to standard error."""
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert error.startswith("token2wav export: error: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("command", ["onnx", "tensorrt", "inspect"])
def test_a_model_that_is_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    add(EngineFolder(TINY, tmp_path / "out"))
    arguments = [command, "--model", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]
    if command == "tensorrt":
        pytest.importorskip(
            "tensorrt_rtx", reason="TensorRT-RTX is not installed (pip install tensorrt-rtx-cu13)"
        )
    assert "no such model folder" in failure(capsys, 2, *arguments)


def test_settings_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    message = failure(capsys, 2, "tensorrt", "--model", str(TINY), "--config", "nowhere.yaml")
    assert "nowhere.yaml: cannot be read" in message


def test_no_tensorrt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = failure(capsys, 2, "tensorrt", "--model", str(TINY))
    assert "tensorrt and tensorrt_rtx cannot be imported; install TensorRT-RTX" in message
    with pytest.raises(BackendUnavailableError, match=r"^tensorrt_rtx cannot be imported"):
        load_package("tensorrt_rtx")


def test_tensorrt_without_its_libraries(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt.py").write_text("raise OSError('libnvinfer.so.10: not there')")
    monkeypatch.syspath_prepend(tmp_path)
    message = failure(capsys, 2, "tensorrt", "--model", str(TINY))
    assert "tensorrt cannot be imported: libnvinfer.so.10: not there" in message


def test_ordinary_tensorrt_builds_for_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError,
        match="--compute-capability: ordinary TensorRT builds only for the GPU of this machine",
    ):
        build_target("tensorrt", ["8.9"])
    monkeypatch.setattr(engines, "own_target", dict)
    with pytest.raises(
        ConfigError, match="needs the GPU that it builds for, but torch finds no GPU"
    ):
        build_target("tensorrt", [])
    monkeypatch.setattr(engines, "own_target", lambda: {"compute_capability": "9.0", "gpu": "H100"})
    assert build_target("tensorrt", []) == {"compute_capability": ("9.0",), "gpu": ("H100",)}


def test_an_export_that_fails_keeps_the_one_before(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add(EngineFolder(TINY, tmp_path))

    def write(module: object, signature: object, path: Path, **_: object) -> None:
        path.write_bytes(b"other graph")

    def disagree(*_: object) -> float:
        raise ExportError("step in float32: ONNX Runtime and torch differ by 1.0e+00")

    monkeypatch.setattr(making, "write_onnx", write)
    monkeypatch.setattr(making, "check_parity", disagree)
    arguments = ["onnx", "--model", str(TINY), "--out", str(tmp_path), "--graphs", "step"]
    assert "differ" in failure(capsys, 3, *arguments)
    assert EngineFolder(TINY, tmp_path).find("step", "float32", "onnx") == path
    assert path.read_bytes() == b"graph"
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".partial")] == []


def test_an_interrupted_export(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(making, "write_onnx", interrupted)
    assert main(["onnx", "--model", str(TINY), "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "token2wav export: interrupted\n"


# verify


def verify(folder: Path, *options: str) -> list[str]:
    arguments = [f"--model={TINY}", f"--out={folder}", "--device=cpu", "--seconds=1"]
    return ["verify", *arguments, *options]


def test_verify_warns_that_it_compares_torch_with_itself(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(verify(tmp_path)) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("torch, float32, cpu, against torch, float32: 1 s of audio")
    assert f"{tmp_path} has no graph that can run on this device" in captured.err
    assert f"token2wav export onnx --model {TINY} --out {tmp_path}\n" in captured.err
    assert main(verify(tmp_path, "--backend=torch")) == 0
    assert "compared with itself" not in capsys.readouterr().err  # the option was given


def test_verify_draws_a_voice_for_a_decoder_with_voices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_folder("cosyvoice1", tmp_path)
    assert main(["verify", f"--model={tmp_path}", "--device=cpu", "--seconds=1"]) == 0
    assert capsys.readouterr().out.startswith("torch, float32, cpu, against torch, float32: 1 s")


def test_verify_does_not_skip_a_graph_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    add(
        EngineFolder(TINY, tmp_path),
        dataclasses.replace(ARTIFACT, fingerprint="of another checkpoint"),
    )
    assert "made from another checkpoint" in failure(capsys, 2, *verify(tmp_path))


# inspect


def test_an_empty_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for _ in range(2):  # at first empty, then without artefacts
        assert main(["inspect", "--model", str(TINY), "--out", str(tmp_path)]) == 0
        command = f"token2wav export onnx --model {TINY} --out {tmp_path}"
        assert capsys.readouterr().out == f"{tmp_path}: no artefacts exported yet; run: {command}\n"
        assert main(["inspect", "--model", str(TINY), "--out", str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == []
        (tmp_path / "flow.pt").touch()
        (tmp_path / "folder").mkdir(exist_ok=True)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_an_engine_folder_that_is_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    arguments = [command, "--model", str(TINY), "--out"]
    message = failure(capsys, 2, *arguments, str(tmp_path / "nowhere"))
    assert (
        f"{tmp_path / 'nowhere'}: no such engine folder; to export graphs, run: token2wav export "
        f"onnx" in message
    )
    file = tmp_path / "file"
    file.touch()
    assert f"{file}: not a folder; pass the engine folder with --out" in failure(
        capsys, 2, *arguments, str(file)
    )


def test_a_model_that_has_no_engine_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert not (TINY / "engines").exists()
    message = failure(capsys, 2, "inspect", "--model", str(TINY))
    assert f"{TINY / 'engines'}: no such engine folder; to export graphs, run: " in message
    assert message.endswith(f"token2wav export onnx --model {TINY}\n")


def test_inspect_prints_the_content_of_a_graph(
    capsys: pytest.CaptureFixture[str], export: Export, engine_folders: dict[str, EngineFolder]
) -> None:
    path, folder = export("tiny", "step", "float32"), engine_folders["tiny"].path
    arguments = ["inspect", "--model", str(TINY), "--out", str(folder)]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert str(path.relative_to(folder)) in table
    assert "bias (rows, 1, frames, past+frames)" in table
    assert "past_key_0..1 (rows, past, 64)" in table
    assert main([*arguments, "--json"]) == 0
    graphs = json.loads(capsys.readouterr().out)
    step = next(one for one in graphs if one["artifact"]["file"] == str(path.relative_to(folder)))
    assert step["problem"] is None
    assert step["nodes"] == sum(step["operators"].values()) > 100
    assert step["outputs"]["velocity"] == ["rows", 80, "frames"]
    assert 100_000 < step["weights"] <= sum(step["artifact"]["sizes"].values())


def test_inspect_prints_why_an_artefact_is_stale(tmp_path: Path) -> None:
    folder = EngineFolder(TINY, tmp_path)
    graph = add(folder, content=b"no graph at all")
    add(folder, engine("8.9", "0.1"))
    first, second = inspect_folder(folder)
    assert first.problem is not None
    assert "is not an ONNX graph" in first.problem
    assert second.problem is not None
    assert "tensorrt_rtx" in second.problem
    text = as_text([first, second])
    assert "2026-01-31T12:00  stale: " in text
    assert "x              (2, 80, 1) .. (2, 80, 50) .. (8, 80, 50)" in text
    graph.unlink()
    assert inspect_folder(folder)[0].problem == f"{graph.relative_to(tmp_path)} is missing"
