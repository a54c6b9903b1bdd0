"""Engine folders: what exporters made of a model, and whether it may still be used.

Every artefact lies in a folder of its own, which is made beside its place and renamed into it. `manifest.json` says
which folders count: replacing it is what makes an artefact the current one, so an export that dies changes nothing.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from token2wav.config import config_hash
from token2wav.config_values import convert, from_mapping
from token2wav.errors import ArtifactError, CheckpointError, ConfigError
from token2wav.model_config import ModelConfig
from token2wav.model_folder import Stem

Graph = Literal["step", "estimator-streaming", "estimator-full", "vocoder", "vocoder-whole"]
Precision = Literal["float32", "float16"]
Backend = Literal["onnx", "tensorrt", "tensorrt_rtx"]

GRAPH_VERSION = 2  # to be raised when inputs or outputs of a graph change
ENGINES = "engines"  # the folder below a model folder, unless another is named
MANIFEST = "manifest.json"
_LOCK = ".lock"
_STAGING = ".partial-"
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Artifact:
    """One graph in one form, and all that decides whether it may be used.

    Attributes:
        file: its path in the engine folder, with `/`; weights may lie beside it.
        graph, precision, backend: what it is.
        fingerprint: of the checkpoint it was made from, see `fingerprint`.
        opset: of the ONNX graph that it is, or was built from.
        schedule: `steps` and `guidance` of the ODE that the checkpoint is meant for.
        versions: of the packages that made it.
        target: values that are accepted of the machine it runs on, such as `{"compute_capability": ["8.9"]}`.
        flags: of the builder.
        profiles: per profile and input the smallest, best and largest shape; none where every shape will do.
        created: UTC, ISO 8601.
        seconds: that making it took.
        command: that made it.
        graph_version: GRAPH_VERSION when it was made.
        sizes: bytes of every file by path; `EngineFolder.add` fills it in.
    """

    file: str
    graph: Graph
    precision: Precision
    backend: Backend
    fingerprint: str
    opset: int
    schedule: dict[str, float]
    versions: dict[str, str]
    target: dict[str, tuple[str, ...]]
    flags: tuple[str, ...]
    profiles: tuple[dict[str, tuple[tuple[int, ...], ...]], ...]
    created: str
    seconds: float
    command: str
    graph_version: int = GRAPH_VERSION
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    @property
    def slot(self) -> tuple[Any, ...]:
        """What there is one of in a folder: a later artefact with the same slot replaces an earlier one."""
        return self.graph, self.precision, self.backend, sorted(self.target.items())


def fingerprint(model_folder: Path, stem: Stem) -> str:
    """Hexadecimal digits that change with the weights of a stage or its part of the configuration.

    Raises:
        ConfigError: the folder's YAML cannot be used.
        CheckpointError: there are no weights, or they cannot be read.
    """
    config = ModelConfig.read(model_folder)
    path = config.weights_file(model_folder, stem)
    try:
        status = path.stat()
        digest = _digest(path.resolve(), status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return f"{config_hash(config.flow if stem == 'flow' else config.vocoder)}-{digest}"


def stem_of(graph: Graph) -> Stem:
    """The stage whose weights a graph holds."""
    return "hift" if graph.startswith("vocoder") else "flow"


@lru_cache
def _digest(path: Path, size: int, changed_ns: int) -> str:
    """SHA-256 of a file, once for each of its states: a full-size one has over a gigabyte."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


class EngineFolder:
    """A folder with artefacts and their manifest. Processes may add to one at the same time.

    Args:
        path: of the folder; it is made when something is added.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, model_folder: Path) -> EngineFolder:
        """The default folder of a model."""
        return cls(model_folder / ENGINES)

    def artifacts(self) -> list[Artifact]:
        """All that the manifest names, usable or not; none if there is no manifest.

        Raises:
            ArtifactError: the manifest cannot be read or is damaged.
        """
        path = self.path / MANIFEST
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(document, dict) or not isinstance(document.get("artifacts"), list):
                raise ConfigError("expected an object with a list 'artifacts'")
            return [_artifact(item, f"artifacts[{i}]") for i, item in enumerate(document["artifacts"])]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError, ConfigError) as error:
            reason = " ".join(str(error).split())
            raise ArtifactError(
                f"{path}: not a manifest of engines: {reason}; remove {self.path} and run token2wav-export again"
            ) from error

    def find(
        self,
        graph: Graph,
        precision: Precision,
        backend: Backend,
        *,
        model_folder: Path,
        versions: Mapping[str, str] | None = None,
        target: Mapping[str, str] | None = None,
    ) -> Path:
        """The file of a usable artefact.

        Args:
            graph, precision, backend: what is wanted.
            model_folder: the checkpoint that it must have been made from.
            versions: of packages that must be those that made it.
            target: the machine that is to run it, such as `{"compute_capability": "8.9"}`.

        Raises:
            ArtifactError: there is none; says why, and which command makes one.
            ConfigError, CheckpointError: the model folder cannot be used.
        """
        what = (graph, precision, backend)
        found = [a for a in self.artifacts() if (a.graph, a.precision, a.backend) == what]
        problem = f"{self.path}: the {graph} graph is not there in {precision} for {backend}"
        for artifact in found:
            reason = self.problem(artifact, model_folder=model_folder, versions=versions, target=target)
            if reason is None:
                return self.path / artifact.file
            problem = f"{self.path / artifact.file}: {reason}"
        command = self.command(graph, precision, backend, model_folder=model_folder, target=target)
        raise ArtifactError(f"{problem}; run: {command}")

    def problem(
        self,
        artifact: Artifact,
        *,
        model_folder: Path,
        versions: Mapping[str, str] | None = None,
        target: Mapping[str, str] | None = None,
    ) -> str | None:
        """Why an artefact cannot be used, or None if it can. Arguments are those of `find`.

        Raises:
            ConfigError, CheckpointError: the model folder cannot be used.
        """
        for name, size in artifact.sizes.items():
            path = self.path / name
            if not path.is_file():
                return f"{name} is missing"
            if (found := path.stat().st_size) != size:
                return f"{name} has {found} bytes instead of {size}"
        if artifact.graph_version != GRAPH_VERSION:
            return f"its inputs and outputs are of version {artifact.graph_version}, not {GRAPH_VERSION}"
        if artifact.fingerprint != fingerprint(model_folder, stem_of(artifact.graph)):
            return f"it was made from another checkpoint than the one in {model_folder}"
        for package, version in (versions or {}).items():
            if (made_by := artifact.versions.get(package)) != version:
                return f"it was made by {package} {made_by}, but {version} is installed"
        for key, value in (target or {}).items():
            if value not in (accepted := artifact.target.get(key, (value,))):
                return f"it is for {key.replace('_', ' ')} {', '.join(accepted)}, but this machine has {value}"
        return None

    def command(
        self,
        graph: Graph,
        precision: Precision,
        backend: Backend,
        *,
        model_folder: Path,
        target: Mapping[str, str] | None = None,
    ) -> str:
        """The command line that makes an artefact. Arguments are those of `find`."""
        words = ["token2wav-export", "onnx" if backend == "onnx" else "tensorrt", "--model", str(model_folder)]
        if self.path != EngineFolder.of(model_folder).path:
            words += ["--out", str(self.path)]
        words += ["--graphs", graph, "--precision", precision]
        if backend != "onnx":
            words += ["--package", backend]
        if backend == "tensorrt_rtx" and target and "compute_capability" in target:
            words += ["--compute-capability", target["compute_capability"]]
        return shlex.join(words)

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """An empty folder to make an artefact in; it vanishes afterwards unless it was added.

        Raises:
            ArtifactError: the engine folder cannot be written.
        """
        with self._lock():
            for abandoned in self.path.glob(f"{_STAGING}*"):
                _remove_if_abandoned(abandoned)
            folder = self.path / f"{_STAGING}{uuid.uuid4().hex[:12]}"
            folder.mkdir()
            descriptor = os.open(folder, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # says that somebody is at work here, until this process ends
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)

    def add(self, staged: Path, artifact: Artifact) -> Path:
        """Puts a finished artefact in place, where it replaces the one before it.

        Args:
            staged: the folder from `staging` with its files.
            artifact: with `file` as a name in that folder.

        Returns:
            The file in its place.

        Raises:
            ArtifactError: the engine folder cannot be written, or its manifest is damaged.
        """
        name = f"{artifact.graph}.{artifact.precision}.{artifact.backend}.{uuid.uuid4().hex[:8]}"
        sizes = {f"{name}/{path.name}": path.stat().st_size for path in sorted(staged.iterdir())}
        placed = dataclasses.replace(artifact, file=f"{name}/{artifact.file}", sizes=sizes)
        with self._lock():
            before = self.artifacts()
            replaced = [old for old in before if old.slot == placed.slot]
            staged.rename(self.path / name)
            self._write([*(old for old in before if old not in replaced), placed])
            for old in replaced:
                shutil.rmtree((self.path / old.file).parent, ignore_errors=True)
        return self.path / placed.file

    def _write(self, artifacts: list[Artifact]) -> None:
        document = {"artifacts": [dataclasses.asdict(artifact) for artifact in artifacts]}
        unfinished = self.path / f".{MANIFEST}"
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(json.dumps(document, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.path / MANIFEST)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Only one process at a time may be in here."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / _LOCK).open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise ArtifactError(f"{self.path}: cannot be written: {error.strerror}; name another --out") from error


def _artifact(data: Any, name: str) -> Artifact:
    if isinstance(data, dict) and (missing := [f.name for f in dataclasses.fields(Artifact) if f.name not in data]):
        raise ConfigError(f"{name}.{missing[0]}: missing")
    artifact: Artifact = from_mapping(Artifact, data, name)
    for path in (artifact.file, *artifact.sizes):
        parts = PurePosixPath(convert(path, str, name)).parts
        if len(parts) != 2 or parts[0] == "/" or ".." in parts:
            raise ConfigError(f"{name}.file: '{path}' is not a file in a folder of this one")
    if artifact.file not in artifact.sizes:
        raise ConfigError(f"{name}.sizes: '{artifact.file}' is not among them")
    return artifact


def _remove_if_abandoned(folder: Path) -> None:
    """A staging folder that nobody holds is what a process left that was killed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)
