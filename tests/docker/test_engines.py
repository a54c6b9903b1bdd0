"""Engines that each machine gets, without a build. The GPUs are made up; the rules are real.

`make images-check` builds engines in an image.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import onnx
import pytest

from testkit.models.sized import SIZES, random_model
from testkit.rigs.container import DOCKER, ROOT
from token2wav import backends
from token2wav.assembly import exportable
from token2wav.config import LimitConfig, RuntimeConfig, ServerConfig
from token2wav.errors import BackendUnavailableError
from token2wav.published.artifacts import Artifact, EngineFolder, GraphName, fingerprint, stage_of
from token2wav_export import cli as export_cli
from token2wav_export import making

L4 = {"compute_capability": "8.9", "gpu": "NVIDIA L4"}
EXAMPLES = ROOT / "examples"
H200 = {"compute_capability": "9.0", "gpu": "NVIDIA H200"}


@pytest.fixture(scope="module")
def engines() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("docker_engines", DOCKER / "engines.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("backend", "version", "target", "key"),
    [
        ("tensorrt_rtx", "1.7.1.116", L4, "nvidia-l4_8.9_tensorrt_rtx-1.7.1.116"),
        ("tensorrt", "10.14.1.48", H200, "nvidia-h200_9.0_tensorrt-10.14.1.48"),
        ("tensorrt", "1", {"compute_capability": "8.0", "gpu": "NVIDIA A100-SXM4-80GB / x"}, None),
    ],
)
def test_key(
    backend: str, version: str, target: dict[str, str], key: str | None, engines: ModuleType
) -> None:
    machine_key = engines.Machine(backend, version, target).key
    assert machine_key == (key or "nvidia-a100-sxm4-80gb-x_8.0_tensorrt-1")


def test_export_command_for_a_gpu(engines: ModuleType) -> None:
    machine = engines.Machine("tensorrt_rtx", "1.7.1.116", L4)
    flow = exportable(EXAMPLES / "demo_voice" / "model")
    assert machine.wanted(RuntimeConfig(), flow) == {"step": "float16"}
    assert machine.wanted(RuntimeConfig(precision="float32"), flow) == {"step": "float32"}
    command = machine.command(ServerConfig())
    assert command[0] == "tensorrt"
    assert command[command.index("--compute-capability") + 1] == "8.9"
    assert "--compute-capability" not in engines.Machine("tensorrt", "10", H200).command(
        ServerConfig()
    )


def test_graph_of_a_codec(engines: ModuleType) -> None:
    codec = exportable(EXAMPLES / "demo_codec" / "model")
    machine = engines.Machine("onnx", "1.31.1", L4)
    assert machine.wanted(RuntimeConfig(), codec) == {"decoder": "float32"}


def test_engines_fit_the_captured_batches_of_a_server(engines: ModuleType) -> None:
    seconds_of_a_block = 1  # of CosyVoice3
    assert max(backends._CAPTURED_STREAMS) == engines.CAPTURED_STREAMS
    assert max(backends._CAPTURED_PAST) * seconds_of_a_block == engines.CAPTURED_SECONDS
    machine = engines.Machine("tensorrt_rtx", "1.7.1.116", L4)
    for asked, built in ((8, 4), (2, 2)):
        command = machine.command(ServerConfig(limits=LimitConfig(batch_streams=asked)))
        parsed = export_cli.parser().parse_args([*command, "--model", "m"])
        assert (parsed.max_streams, parsed.history_seconds) == (built, 64)


def test_gpu_that_the_installed_tensorrt_cannot_build_for(
    engines: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install tensorrt-rtx-cu13")
    package = engines.load_package("tensorrt_rtx")
    monkeypatch.setattr(engines, "own_target", lambda: H200)
    monkeypatch.setattr(engines, "load_package", lambda name: package)
    assert engines.folder(tmp_path, RuntimeConfig()) == tmp_path / "none"
    assert run(engines, tmp_path, "{backend: tensorrt}", monkeypatch) == 2
    message = capsys.readouterr().err
    assert "--compute-capability: 9.0 is not one of" in message
    assert "other GPUs need ordinary TensorRT" in message


def test_gpu_without_a_tensorrt_that_works(
    engines: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def missing(name: str) -> None:
        raise BackendUnavailableError("not there")

    monkeypatch.setattr(engines, "own_target", lambda: H200)
    monkeypatch.setattr(engines, "load_package", missing)
    assert run(engines, tmp_path, "{backend: tensorrt}", monkeypatch) == 2
    assert "TensorRT is not available for the build: not there" in capsys.readouterr().err
    assert run(engines, tmp_path, "{backend: tensorrt, device: cpu}", monkeypatch) == 2
    assert "tensorrt needs an NVIDIA GPU" in capsys.readouterr().err
    folder = engines.folder(tmp_path, RuntimeConfig(backend="onnx"))
    assert folder == tmp_path / f"nvidia-h200_9.0_onnx-{version('onnxruntime')}"


@pytest.mark.parametrize("runtime", ["{}", "{backend: torch}", "{backend: pause}"])
def test_settings_that_need_no_engines(
    engines: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    runtime: str,
) -> None:
    assert run(engines, tmp_path, runtime, monkeypatch) == 0
    assert (
        capsys.readouterr().out
        == "engines: no engine is built: the settings select a backend without engines\n"
    )
    assert not (tmp_path / "engines").exists()


def test_model_folder_that_is_none(
    engines: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(engines, "own_target", dict)
    assert run(engines, tmp_path, "{backend: onnx}", monkeypatch) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "model") in line


def run(engines: ModuleType, folder: Path, runtime: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Builds for a missing model folder with these settings."""
    settings = folder / "settings.yaml"
    settings.write_text(f"runtime: {runtime}")
    arguments = [
        "build",
        str(folder / "engines"),
        "--model",
        str(folder / "model"),
        "--config",
        str(settings),
    ]
    monkeypatch.setattr(sys, "argv", ["engines.py", *arguments])
    code: int = engines.main()
    return code


@pytest.mark.parametrize(("package", "loads"), [("tensorrt_rtx", 1), ("tensorrt", 0)])
def test_kernels_are_compiled_once_after_a_build(
    engines: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, loads: int
) -> None:
    """Only TensorRT-RTX compiles kernels on the GPU itself, and servers cannot store them."""
    random_model(tmp_path / "model", SIZES["tiny"] | {"depth": 1})
    loaded: list[RuntimeConfig] = []
    machine = engines.Machine(package, "1.7", L4)
    monkeypatch.setattr(engines.Machine, "own", lambda runtime: machine)
    monkeypatch.setattr(engines.cli, "main", lambda arguments: engines.cli.DONE)
    monkeypatch.setattr(
        engines.Token2Wav, "load", lambda model, *, stream, runtime: loaded.append(runtime)
    )
    assert run(engines, tmp_path, "{backend: tensorrt}", monkeypatch) == 0
    expected = RuntimeConfig(backend="tensorrt", engines=str(tmp_path / "engines" / machine.key))
    assert loaded == [expected] * loads


@pytest.mark.parametrize(("device", "gpu"), [("auto", {}), ("cpu", L4)])
def test_missing_engines_are_built_once(
    engines: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    device: str,
    gpu: dict[str, str],
) -> None:
    """An interrupted build has left the vocoder."""
    model = random_model(tmp_path / "model", SIZES["tiny"] | {"depth": 1})
    name = f"cpu-{platform.machine()}_onnx-{version('onnxruntime')}"
    folder = EngineFolder(model, tmp_path / "engines" / name)
    leave(folder, model, "vocoder")
    asked: list[list[str]] = []

    def export(arguments: list[str]) -> int:
        asked.append(arguments)
        leave(folder, model, "step")
        return export_cli.DONE

    monkeypatch.setattr(engines, "own_target", lambda: gpu)
    monkeypatch.setattr(engines.cli, "main", export)
    runtime = RuntimeConfig(backend="onnx", device=device)
    assert engines.folder(tmp_path / "engines", runtime) == folder.path
    for _ in range(2):
        assert run(engines, tmp_path, f"{{backend: onnx, device: {device}}}", monkeypatch) == 0
    [command] = asked
    assert command[0] == "onnx"
    assert command[-4:] == ["--graphs", "step", "--precision", "float32"]
    assert capsys.readouterr().out.splitlines() == [
        f"engines: building step in float32 for onnx in {folder.path}",
        f"engines: {folder.path} is complete",
        f"engines: no engine is built: {folder.path} is up to date",
    ]


def test_engines_are_built_again_for_other_chunks(
    engines: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT only pretends to build. The export stores the profiles that it asked for."""
    random_model(tmp_path / "model", SIZES["tiny"] | {"depth": 1})
    graph = tmp_path / "step.onnx"
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([], "step", [], [])), graph)
    built: list[Path] = []

    def build_engine(package: str, source: Path, engine: Path, **options: object) -> tuple[()]:
        built.append(engine)
        engine.touch()
        return ()

    machine = engines.Machine("tensorrt", "10", H200)
    monkeypatch.setattr(engines.Machine, "own", lambda runtime: machine)
    monkeypatch.setattr("token2wav_export.engines.load_package", str)
    monkeypatch.setattr(making, "version_of", lambda package: machine.version)
    monkeypatch.setattr(making, "build_target", lambda *_: {})
    monkeypatch.setattr(making, "build_engine", build_engine)
    monkeypatch.setattr(making.Maker, "onnx", lambda *_: graph)
    for settings, builds in (
        ("limits: {batch_streams: 1}", 1),
        ("limits: {batch_streams: 1}", 1),
        ("limits: {batch_streams: 4}", 2),
        ("limits: {batch_streams: 8}", 2),  # larger batches run in parts
        ("stream: {max_hop_tokens: 50}", 3),
    ):
        assert run(engines, tmp_path, f"{{backend: tensorrt}}\n{settings}", monkeypatch) == 0
        assert len(built) == builds, settings


def leave(engines: EngineFolder, model: Path, graph: GraphName) -> None:
    """Writes an empty engine, which no test runs."""
    file = f"{graph}.onnx"
    with engines.staging() as staged:
        (staged / file).touch()
        engines.add(
            staged,
            Artifact(
                file=file,
                graph=graph,
                precision="float32",
                backend="onnx",
                fingerprint=fingerprint(model, stage_of(graph)),
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
