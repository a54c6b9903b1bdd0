"""Engines: real builds with TensorRT-RTX, which needs no GPU for that, and the profiles they are
built with.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exporters.rig import Export
from token2wav.assembly import Exportable
from token2wav.config import StreamConfig
from token2wav.errors import ConfigError
from token2wav.exported.run import Package
from token2wav.published.artifacts import EngineFolder, GraphName, Precision
from token2wav_export import ExportError
from token2wav_export.engines import build_engine, build_target, load_package, version_of
from token2wav_export.making import Maker
from token2wav_export.profiles import ProfileLoad, Span, chunk_frames, profiles, shapes
from token2wav_export.signatures import signature

LOAD = ProfileLoad(StreamConfig(), max_streams=4, history_seconds=30.0)


@pytest.fixture(scope="module")
def rtx() -> Package:
    pytest.importorskip(
        "tensorrt_rtx", reason="TensorRT-RTX is not installed (pip install tensorrt-rtx-cu13)"
    )
    return load_package("tensorrt_rtx")


@pytest.mark.parametrize(
    ("model", "graph", "precision", "count", "capabilities"),
    [
        ("tiny", "step", "float32", 3, ["8.9", "12.0"]),
        ("tiny", "step", "float16", 3, []),
        pytest.param(
            "tiny", "estimator-streaming", "float32", 1, ["8.9", "12.0"], marks=pytest.mark.slow
        ),
        ("tiny", "vocoder", "float32", 1, ["8.9", "12.0"]),
        pytest.param("wide", "step", "float32", 3, ["8.9", "12.0"], marks=pytest.mark.slow),
    ],
)
def test_graphs_build_with_dynamic_profiles(
    rtx: Package,
    export: Export,
    models: dict[str, Path],
    engine_folders: dict[str, EngineFolder],
    model: str,
    graph: GraphName,
    precision: Precision,
    count: int,
    capabilities: list[str],
) -> None:
    source, engines = export(model, graph, precision), engine_folders[model]
    maker = Maker(engines, ["pytest"])
    path = maker.tensorrt(graph, precision, rtx, LOAD, capabilities)
    assert path.stat().st_size > 100_000
    machine = {
        "versions": {"tensorrt_rtx": version_of(rtx)},
        "target": {"compute_capability": "12.0"},
    }
    assert engines.find(graph, precision, "tensorrt_rtx", **machine) == path
    made = next(a for a in engines.artifacts() if engines.path / a.file == path)
    assert len(made.profiles) == count
    flags = ["TF32 off"] if precision == "float32" else []
    # CUDA graphs capture only the step, and other users of engines need not provide memory.
    flags += ["REQUIRE_USER_ALLOCATION"] if graph == "step" else []
    assert made.flags == tuple(flags)
    assert made.opset == 20
    assert (
        made.target["compute_capability"] == build_target(rtx, capabilities)["compute_capability"]
    )
    assert source.exists()


def test_an_engine_without_its_graph_exports_that_first(
    rtx: Package, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[GraphName, Precision]] = []

    def onnx(self: Maker, graph: GraphName, precision: Precision) -> Path:
        asked.append((graph, precision))
        raise ExportError("not now")

    monkeypatch.setattr(Maker, "onnx", onnx)
    maker = Maker(EngineFolder(models["tiny"], tmp_path), ["pytest"])
    with pytest.raises(ExportError, match="not now"):
        maker.tensorrt("step", "float16", rtx, LOAD, [])
    assert asked == [("step", "float16")]


def test_messages_of_the_package_reach_the_user(
    rtx: Package, export: Export, networks: Exportable, tmp_path: Path
) -> None:
    (allowed, *_) = profiles("step", LOAD, networks)
    incomplete = shapes(allowed, signature("step", "float32", networks))
    del incomplete["bias"]
    with pytest.raises(
        ExportError, match=r"tensorrt_rtx .* cannot build step-float32.onnx: .*bias"
    ):
        build_engine(
            rtx,
            export("tiny", "step", "float32"),
            tmp_path / "engine",
            precision="float32",
            profiles=[incomplete],
            compute_capabilities=[],
            timing_cache=tmp_path / "timing.cache",
        )
    assert not (tmp_path / "engine").exists()


def test_a_file_that_is_no_graph(rtx: Package, tmp_path: Path) -> None:
    (tmp_path / "graph.onnx").write_bytes(b"no graph")
    with pytest.raises(ExportError, match=r"tensorrt_rtx .* cannot build graph.onnx: "):
        build_engine(
            rtx,
            tmp_path / "graph.onnx",
            tmp_path / "engine",
            precision="float32",
            profiles=[],
            compute_capabilities=[],
            timing_cache=tmp_path / "timing.cache",
        )


@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_a_gpu_that_the_package_does_not_support(rtx: Package, capability: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"--compute-capability: {capability} is not one of .*8.9.* ordinary"
    ):
        build_target(rtx, [capability])


def test_engines_are_for_every_gpu_from_ampere_on_by_default(rtx: Package) -> None:
    accepted = build_target(rtx, [])["compute_capability"]
    assert {"8.6", "8.9", "12.0"} <= set(accepted)
    assert not {"7.5", "8.0", "9.0"} & set(accepted)


# Profiles.


@pytest.mark.parametrize(
    ("stream", "frames"),
    [
        (StreamConfig(), [50, 100, 200]),
        (StreamConfig(max_hop_tokens=25), [50]),
        (StreamConfig(max_hop_tokens=75), [50, 100, 150]),
    ],
)
def test_chunks_of_a_schedule(
    networks: Exportable, stream: StreamConfig, frames: list[int]
) -> None:
    assert chunk_frames(stream, networks.config) == frames


def test_profiles_of_the_step_cover_every_length_once(networks: Exportable) -> None:
    step_profiles = profiles("step", LOAD, networks)
    covered = [
        n
        for profile in step_profiles
        for n in range(profile["frames"].smallest, profile["frames"].largest + 1)
    ]
    assert covered == list(range(1, 201))
    assert [profile["frames"].best for profile in step_profiles] == [50, 100, 200]
    assert {profile["rows"] for profile in step_profiles} == {Span(2, 2, 8)}
    assert {profile["past"] for profile in step_profiles} == {Span(0, 750, 1500)}


def test_shapes_of_a_profile_fit_one_another(networks: Exportable) -> None:
    profile = {"rows": Span(2, 2, 8), "frames": Span(1, 50, 50), "past": Span(0, 750, 1500)}
    input_shapes = shapes(profile, signature("step", "float16", networks))
    assert input_shapes["bias"] == ((2, 1, 1, 1), (2, 1, 50, 800), (8, 1, 50, 1550))
    assert input_shapes["past_key_0"] == ((2, 0, 64), (2, 750, 64), (8, 1500, 64))
    assert "modulation" not in input_shapes
