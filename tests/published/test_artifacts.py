"""Engine folders: artefacts that are refused and why, and protection from other writers. The tests
of `exporters` add artefacts, and find them.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testkit.models.golden import TINY
from testkit.models.tiny_model import tiny_copy
from testkit.patience import PATIENCE_SECONDS
from tests.exporters.rig import ARTIFACT, add, engine
from token2wav.errors import ArtifactError
from token2wav.published.artifacts import (
    DESCRIPTION,
    GRAPH_VERSION,
    EngineFolder,
    fingerprint,
)


@pytest.fixture
def engines(tmp_path: Path) -> EngineFolder:
    return EngineFolder(TINY, tmp_path / "engines")


def find(engines: EngineFolder, **machine: dict[str, str]) -> Path:
    return engines.find("step", "float32", "onnx", **machine)


def refusal(engines: EngineFolder, **machine: dict[str, str]) -> str:
    with pytest.raises(ArtifactError) as caught:
        find(engines, **machine)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_nothing_there(engines: EngineFolder) -> None:
    assert engines.artifacts() == []
    assert refusal(engines) == (
        f"{engines.path}: the graph step in float32 for onnx is missing; run: token2wav export "
        f"onnx --model {TINY} "
        f"--out {engines.path} --graphs step --precision float32"
    )
    assert not engines.path.exists()


def test_a_later_artefact_replaces_an_earlier_one(engines: EngineFolder) -> None:
    first = add(engines)
    second = add(engines, content=b"newer graph")
    assert find(engines) == second
    assert not first.parent.exists()
    assert len(engines.artifacts()) == 1


# Changes that make an artefact unusable.

NEXT = GRAPH_VERSION + 1
STALE: list[tuple[dict[str, Any], str]] = [
    (
        {"graph_version": NEXT},
        f"its inputs and outputs have version {NEXT}, expected {GRAPH_VERSION}",
    ),
    ({"fingerprint": "0"}, f"it was made from another checkpoint than {TINY}"),
]


@pytest.mark.parametrize(("changes", "reason"), STALE)
def test_an_artefact_of_something_else_is_refused(
    engines: EngineFolder, changes: dict[str, Any], reason: str
) -> None:
    path = add(engines, dataclasses.replace(ARTIFACT, **changes))
    command = f"token2wav export onnx --model {TINY} --out {engines.path} --graphs step"
    assert refusal(engines) == f"{path}: {reason}; run: {command} --precision float32"


@pytest.mark.parametrize("name", ["graph.onnx", "graph.onnx.data"])
def test_files_that_are_missing_or_truncated(engines: EngineFolder, name: str) -> None:
    path = add(engines).with_name(name)
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    assert (
        f"{name} has {len(whole) - 2} bytes instead of {len(whole)}; run: token2wav export onnx"
        in refusal(engines)
    )
    path.unlink()
    assert f"{name} is missing; run: token2wav export onnx" in refusal(engines)


def test_engines_are_for_the_package_that_made_them(engines: EngineFolder) -> None:
    path = add(engines, engine("8.9", "1.7.1"))

    def find(version: str) -> Path:
        return engines.find("step", "float32", "tensorrt_rtx", versions={"tensorrt_rtx": version})

    assert find("1.7.1") == path
    with pytest.raises(
        ArtifactError,
        match=r"it was made by tensorrt_rtx 1\.7\.1, but 1\.8\.0 is installed; run: .*",
    ):
        find("1.8.0")


def test_engines_are_for_the_gpu_they_were_built_for(engines: EngineFolder) -> None:
    paths = {capability: add(engines, engine(capability)) for capability in ("8.9", "12.0")}

    def find(capability: str) -> Path:
        target = {"compute_capability": capability}
        return engines.find("step", "float32", "tensorrt_rtx", target=target)

    assert {capability: find(capability) for capability in paths} == paths
    with pytest.raises(ArtifactError) as caught:
        find("8.6")
    assert (
        "it is for compute capability 12.0, but this machine has 8.6; run: token2wav export "
        "tensorrt" in str(caught.value)
    )
    assert str(caught.value).endswith("--package tensorrt_rtx --compute-capability 8.6")


def test_an_engine_for_no_gpu_in_particular_will_do_on_any(engines: EngineFolder) -> None:
    path = add(engines, dataclasses.replace(engine("8.9"), target={}))
    target = {"compute_capability": "8.6", "gpu": "any"}
    assert engines.find("step", "float32", "tensorrt_rtx", target=target) == path


# Fingerprints.


def test_a_fingerprint_depends_on_its_stage_only(tmp_path: Path) -> None:
    model = tiny_copy(tmp_path)
    flow, hift = fingerprint(model, "flow"), fingerprint(model, "vocoder")
    assert (flow, hift) == (fingerprint(TINY, "flow"), fingerprint(TINY, "vocoder"))
    weights = model / "flow.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    assert fingerprint(model, "flow") != flow
    assert fingerprint(model, "vocoder") == hift
    yaml = model / "cosyvoice3.yaml"
    yaml.write_text(yaml.read_text().replace("audio_limit: 0.99", "audio_limit: 0.9"))
    assert fingerprint(model, "vocoder") != hift


# Descriptions that were damaged.


def rewritten(**changes: Any) -> Callable[[str], str]:
    """Replaces entries of a description; None removes one."""

    def damage(text: str) -> str:
        document = json.loads(text) | changes
        return json.dumps({key: value for key, value in document.items() if value is not None})

    return damage


DAMAGES: list[tuple[Callable[[str], str], str]] = [
    (lambda text: "", "Expecting value"),
    (lambda text: text[: len(text) // 2], "line"),
    (lambda text: "[1]", "expected an object"),
    (lambda text: "[" * 100_000, "recursion"),
    (rewritten(opset=None), "opset: missing"),
    (rewritten(extra=1), "unknown key 'extra'"),
    (rewritten(sizes=[1]), "sizes: expected a mapping"),
    (rewritten(graph="other"), "'other' is not one of"),
    (rewritten(file="../graph.onnx"), "'../graph.onnx' is not a file in this folder"),
    (rewritten(file="/graph.onnx"), "'/graph.onnx' is not a file in this folder"),
    (rewritten(sizes={"graph.onnx": 5, "../x": 1}), "'../x' is not a file in this folder"),
    (rewritten(sizes={}), "' is missing"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_damaged_description_is_one_sentence(
    engines: EngineFolder, damage: Callable[[str], str], words: str
) -> None:
    description = add(engines).with_name(DESCRIPTION)
    description.write_text(damage(description.read_text()))
    message = refusal(engines)
    assert message.startswith(f"{description}: not a valid description of an artefact: ")
    assert words in message
    assert message.endswith(f"remove {description.parent} and run token2wav export again")


# Exports that die, and exports at the same time.


def test_a_failed_export_keeps_the_earlier_artefact(engines: EngineFolder) -> None:
    path = add(engines)

    def interrupted() -> None:
        with engines.staging() as staged:
            (staged / "graph.onnx").write_bytes(b"half of a gr")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(engines.path.glob(".partial-*")) == []
    assert find(engines) == path


def test_only_remains_of_killed_exports_are_removed(
    engines: EngineFolder,
) -> None:
    path = add(engines)
    abandoned = engines.path / ".partial-0123456789ab"
    abandoned.mkdir()
    (abandoned / "graph.onnx").write_bytes(b"half of a gr")
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(abandoned, (two_days_ago, two_days_ago))
    with engines.staging() as busy:
        (busy / "graph.onnx").write_bytes(b"graph")
        with engines.staging():
            assert not abandoned.exists()
            assert (busy / "graph.onnx").exists()
    assert find(engines) == path


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ArtifactError, match=r"cannot be written: .*; pass another folder with --out"
    ):
        add(EngineFolder(TINY, tmp_path / "file" / "engines"))


def add_many(path: Path, capabilities: list[str]) -> None:
    for capability in capabilities:
        add(EngineFolder(TINY, path), engine(capability))


def test_processes_add_at_the_same_time(engines: EngineFolder) -> None:
    context = multiprocessing.get_context("spawn")
    capabilities_of_workers = [
        [f"{worker}.{number}" for number in range(10)] + ["8.9"] for worker in range(2)
    ]
    workers = [
        context.Process(target=add_many, args=(engines.path, capabilities))
        for capabilities in capabilities_of_workers
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_SECONDS)
    assert [worker.exitcode for worker in workers] == [0, 0]
    artifacts = engines.artifacts()
    assert {artifact.target["compute_capability"][0] for artifact in artifacts} == {
        c for cs in capabilities_of_workers for c in cs
    }
    assert len(artifacts) == 21
    on_disk = {path.name for path in engines.path.iterdir()}
    assert on_disk == {Path(artifact.file).parts[0] for artifact in artifacts}
