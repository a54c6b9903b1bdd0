"""Artifacts of a model: exported graphs and engines. `EngineFolder` stores them, and checks whether
an artifact may still be used.

Every artifact has a folder with its files and with `artifact.json`, which describes it. The folder
is written under a temporary name, and renamed when it is complete. An export that is interrupted
therefore changes nothing, and no lock is needed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from token2wav.config import config_hash
from token2wav.config.model_config import StageName
from token2wav.config.values import from_mapping
from token2wav.errors import ArtifactError, CheckpointError, ConfigError, one_line
from token2wav.published.checkpoint_files import weight_files, weights_file
from token2wav.published.registry import read_config, weight_prefixes

GraphName = Literal[
    "step", "estimator-streaming", "estimator-full", "vocoder", "vocoder-whole", "decoder"
]
Precision = Literal["float32", "float16"]
Backend = Literal["onnx", "tensorrt", "tensorrt_rtx"]

GRAPH_VERSION = 5  # raise it when inputs or outputs of a graph change
ENGINES = "engines"  # name of the default engine folder, below the model folder
DESCRIPTION = "artifact.json"
_STAGING = ".partial-"
# Age at which an unfinished folder is abandoned: one day, longer than any export.
_ABANDONED_NS = 24 * 3600 * 10**9
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Artifact:
    """Description of an artifact: one graph for one backend and precision, and everything that
    decides whether it may be used.

    Attributes:
        file: path of its main file below the engine folder. `artifact.json` has only the name of
            the file. Files of weights may lie beside it.
        opset: version of the ONNX operators in the graph; for an engine, in the graph that the
            engine was built from.
        schedule: `steps` and `guidance` of the ODE that the checkpoint is meant for.
        target: accepted values of properties of the machine that runs it, such as
            {"compute_capability": ["8.9"]}.
        profiles: optimization profiles of TensorRT: the smallest, best and largest shape of every
            input. Empty if every shape runs.
        sizes: bytes of every file, by path as in `file`. `EngineFolder.add` fills it in.
    """

    file: str
    graph: GraphName
    precision: Precision
    backend: Backend
    fingerprint: str  # result of `fingerprint()` for the checkpoint that it was made from
    opset: int
    schedule: dict[str, float]
    versions: dict[str, str]  # versions of the packages that made it, by name
    target: dict[str, tuple[str, ...]]
    flags: tuple[str, ...]  # options of the builder
    profiles: tuple[dict[str, tuple[tuple[int, ...], ...]], ...]
    created: str  # creation time, UTC, ISO 8601
    seconds: float  # duration of the export
    command: str  # command line that made it
    graph_version: int = GRAPH_VERSION  # value of `GRAPH_VERSION` when it was made
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files of the artifact."""
        return sum(self.sizes.values())

    @property
    def slot(self) -> tuple[Any, ...]:
        """Key of the artifact in a folder. A new artifact replaces the old artifact of its slot."""
        return self.graph, self.precision, self.backend, sorted(self.target.items())


def fingerprint(model_folder: Path, stage: StageName) -> str:
    """Computes the fingerprint of a stage: hashes of its weights and of its part of the
    configuration.

    Raises:
        ConfigError: the YAML of the folder cannot be used.
        CheckpointError: the weights are missing or cannot be read.
    """
    config = read_config(model_folder)
    path = weights_file(model_folder, config.weights_names(stage))
    digests = []
    for file in weight_files(path, weight_prefixes(config)):
        try:
            status = file.stat()
            digests.append(_digest(file.resolve(), status.st_size, status.st_mtime_ns))
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    if len(digests) > 1:
        digests = [hashlib.sha256(" ".join(digests).encode()).hexdigest()]
    return f"{config_hash(config.stage_config(stage))}-{digests[0]}"


def stage_of(graph: GraphName) -> StageName:
    if graph == "decoder":
        return "decoder"
    return "vocoder" if graph.startswith("vocoder") else "flow"


@lru_cache
def _digest(path: Path, size: int, changed_ns: int) -> str:
    """Computes the SHA-256 of a file. The result is cached by path, size and time of change,
    because the file of a full-size model has over a gigabyte.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


class EngineFolder:
    """Folder of all artifacts of a model. It is created with the first artifact.

    Several processes may add artifacts at the same time. The methods raise ArtifactError if the
    folder cannot be written, or a description in it cannot be read.

    Args:
        path: another folder than the default one in the model folder.
    """

    def __init__(self, model_folder: Path, path: Path | None = None) -> None:
        self.model_folder = model_folder
        self.path = path or model_folder / ENGINES

    def artifacts(self) -> list[Artifact]:
        """Reads the latest artifact of every slot, usable or not; none if there is no folder."""
        return list({repr(artifact.slot): artifact for artifact in self._all()}.values())

    def _all(self) -> list[Artifact]:
        """Reads all artifacts, oldest first, including artifacts that were just replaced."""
        paths = sorted(
            self.path.glob(f"[!.]*/{DESCRIPTION}"), key=lambda path: (_written(path), path)
        )
        return [artifact for path in paths if (artifact := _read_description(path)) is not None]

    def find(
        self,
        graph: GraphName,
        precision: Precision,
        backend: Backend,
        *,
        versions: Mapping[str, str] | None = None,
        target: Mapping[str, str] | None = None,
    ) -> Path:
        """Finds the file of a usable artifact.

        Args:
            versions: installed versions of packages; the artifact must have been made by them.
            target: properties of the machine that is to run it, such as `{"compute_capability":
                "8.9"}`.

        Raises:
            ArtifactError: no artifact is usable. The message gives the reason, and the command that
                makes one.
            ConfigError, CheckpointError: the model folder cannot be used.
        """
        key = (graph, precision, backend)
        problem = f"{self.path}: the graph {graph} in {precision} for {backend} is missing"
        for artifact in self.artifacts():
            if (artifact.graph, artifact.precision, artifact.backend) != key:
                continue
            reason = self.problem(artifact, versions=versions, target=target)
            if reason is None:
                return self.path / artifact.file
            problem = f"{self.path / artifact.file}: {reason}"
        command = self.command(graph, precision, backend, target=target)
        raise ArtifactError(f"{problem}; run: {command}")

    def problem(
        self,
        artifact: Artifact,
        *,
        versions: Mapping[str, str] | None = None,
        target: Mapping[str, str] | None = None,
    ) -> str | None:
        """Returns the reason why an artifact cannot be used, or None if it can be used. `find`
        describes the arguments.
        """
        for name, size in artifact.sizes.items():
            path = self.path / name
            if not path.is_file():
                return f"{name} is missing"
            if (file_size := path.stat().st_size) != size:
                return f"{name} has {file_size} bytes instead of {size}"
        if artifact.graph_version != GRAPH_VERSION:
            return (
                f"its inputs and outputs have version {artifact.graph_version}, expected "
                f"{GRAPH_VERSION}"
            )
        if artifact.fingerprint != fingerprint(self.model_folder, stage_of(artifact.graph)):
            return f"it was made from another checkpoint than {self.model_folder}"
        for package, version in (versions or {}).items():
            if (made_by := artifact.versions.get(package)) != version:
                return f"it was made by {package} {made_by}, but {version} is installed"
        for key, value in (target or {}).items():
            if value not in (accepted := artifact.target.get(key, (value,))):
                return (
                    f"it is for {key.replace('_', ' ')} {', '.join(accepted)}, "
                    f"but this machine has {value}"
                )
        return None

    def command(
        self,
        graph: GraphName,
        precision: Precision,
        backend: Backend,
        *,
        target: Mapping[str, str] | None = None,
    ) -> str:
        """Returns the command line that makes an artifact. `find` describes the arguments."""
        words = [
            "token2wav",
            "export",
            "onnx" if backend == "onnx" else "tensorrt",
            "--model",
            str(self.model_folder),
        ]
        if self.path != self.model_folder / ENGINES:
            words += ["--out", str(self.path)]
        words += ["--graphs", graph, "--precision", precision]
        if backend != "onnx":
            words += ["--package", backend]
        if backend == "tensorrt_rtx" and target and "compute_capability" in target:
            words += ["--compute-capability", target["compute_capability"]]
        return shlex.join(words)

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Makes an empty folder for an artifact, and removes it afterwards unless `add` has moved
        it. Also removes abandoned folders of earlier exports.
        """
        folder = self.path / f"{_STAGING}{uuid.uuid4().hex[:12]}"
        with self._writing():
            folder.mkdir(parents=True)
            for other in self.path.glob(f"{_STAGING}*"):
                if time.time_ns() - _written(other) > _ABANDONED_NS:
                    shutil.rmtree(other, ignore_errors=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def add(self, staged: Path, artifact: Artifact) -> Path:
        """Moves a finished artifact from its `staging` folder to its place, and removes the
        artifact that it replaces. Returns the path of its main file at the new place.
        """
        sizes = {path.name: path.stat().st_size for path in sorted(staged.iterdir())}
        document = dataclasses.asdict(dataclasses.replace(artifact, sizes=sizes))
        folder = (
            self.path
            / f"{artifact.graph}.{artifact.precision}.{artifact.backend}.{uuid.uuid4().hex[:8]}"
        )
        with self._writing():
            with (staged / DESCRIPTION).open("w", encoding="utf-8") as file:
                file.write(json.dumps(document, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            staged.rename(folder)
            same_slot = [
                (self.path / other.file).parent
                for other in self._all()
                if other.slot == artifact.slot
            ]
            for replaced in same_slot[:-1]:
                shutil.rmtree(replaced, ignore_errors=True)
        return folder / artifact.file

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ArtifactError(
                f"{self.path}: cannot be written: {error.strerror}; pass another folder with --out"
            ) from error


def _written(path: Path) -> int:
    """Returns the time when a file was written, in nanoseconds; 0 if the file is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _read_description(path: Path) -> Artifact | None:
    """Reads the description of an artifact, and completes its paths to paths below the engine
    folder. Returns None if the file is gone because the artifact was just replaced.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise ConfigError("expected an object")
        if missing := [
            field.name for field in dataclasses.fields(Artifact) if field.name not in document
        ]:
            raise ConfigError(f"{missing[0]}: missing")
        artifact: Artifact = from_mapping(Artifact, document, "")
        for name in (artifact.file, *artifact.sizes):
            if Path(name).name != name:
                raise ConfigError(f"file: '{name}' is not a file in this folder")
        if artifact.file not in artifact.sizes:
            raise ConfigError(f"sizes: '{artifact.file}' is missing")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, ConfigError) as error:
        reason = one_line(error)
        raise ArtifactError(
            f"{path}: not a valid description of an artefact: {reason}; remove "
            f"{path.parent} and run token2wav export again"
        ) from error
    folder = path.parent.name
    sizes = {f"{folder}/{name}": size for name, size in artifact.sizes.items()}
    return dataclasses.replace(artifact, file=f"{folder}/{artifact.file}", sizes=sizes)
