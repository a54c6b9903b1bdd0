"""Maker of artefacts: makes an artefact in a staging folder, checks it, and then adds it to the
engine folder.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
from tqdm import tqdm

from token2wav.assembly import Exportable, exportable
from token2wav.config import config_hash
from token2wav.errors import ArtifactError
from token2wav.exported.run import Package
from token2wav.published.artifacts import (
    GRAPH_VERSION,
    Artifact,
    EngineFolder,
    GraphName,
    Precision,
    fingerprint,
    stage_of,
)
from token2wav_export import ExportError
from token2wav_export.engines import build_engine, build_target, version_of
from token2wav_export.modules import load_module
from token2wav_export.onnx_file import check_parity, write_onnx
from token2wav_export.profiles import ProfileLoad, profiles, shapes
from token2wav_export.signatures import signature

# ONNX opset of the graphs. It has the operators Gelu and Mish. Opset 23 adds Attention, which
# TensorRT cannot compute in float32.
OPSET = 20
_ONNX_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime")


class Maker:
    """Maker of the artefacts of one model. Raises ConfigError if the YAML of the model folder
    cannot be used.

    Args:
        command: command line, which the descriptions of the artefacts contain.
    """

    def __init__(self, engines: EngineFolder, command: Sequence[str]) -> None:
        self.model: Exportable = exportable(engines.model_folder)
        self._engines = engines
        self._command = shlex.join(command)
        self._schedule = {
            "steps": self.model.config.ode_steps,
            "guidance": self.model.guidance,
        }

    def onnx(self, graph: GraphName, precision: Precision, opset: int = OPSET) -> Path:
        """Exports a graph as ONNX, and adds it to the engine folder.

        Returns:
            Path of the ONNX file.

        Raises:
            CheckpointError: the weights cannot be used.
            ExportError: the graph cannot be made, is not valid, or disagrees with torch.
            ArtifactError: the engine folder cannot be used.
        """
        start = time.monotonic()
        tensors = signature(graph, precision, self.model)
        digest = fingerprint(self._engines.model_folder, stage_of(graph))
        metadata = {  # identifies the file if it is found without its description
            "graph": graph,
            "graph_version": str(GRAPH_VERSION),
            "precision": precision,
            "opset": str(opset),
            "fingerprint": digest,
            "config": config_hash(self.model.config),
            "token2wav": version("token2wav"),
            **{name: f"{value:g}" for name, value in self._schedule.items()},
        }
        with (
            self._engines.staging() as staging,
            tqdm(
                desc=f"{graph} {precision}", total=2, unit="stage", leave=False, disable=None
            ) as bar,
        ):
            path = staging / f"{graph}-{precision}.onnx"
            bar.set_postfix_str("tracing")
            module = load_module(graph, precision, self.model)
            write_onnx(module, tensors, path, opset=opset, metadata=metadata)
            bar.update()
            bar.set_postfix_str("comparing")
            reference = (
                module if precision == "float32" else load_module(graph, "float32", self.model)
            )
            difference = check_parity(path, graph, precision, tensors, reference)
            bar.update()
            return self._add(
                path,
                start,
                f"difference from torch {difference:.1e}",
                graph=graph,
                precision=precision,
                backend="onnx",
                opset=opset,
                fingerprint=digest,
                versions={name: version(name) for name in _ONNX_PACKAGES},
            )

    def tensorrt(
        self,
        graph: GraphName,
        precision: Precision,
        package: Package,
        load: ProfileLoad,
        compute_capabilities: list[str],
    ) -> Path:
        """Builds an engine, and adds it to the engine folder. First exports the ONNX graph if there
        is no usable graph.

        Returns:
            Path of the engine file.

        Raises:
            ConfigError: the profiles or capabilities are not supported.
            ExportError: the package rejects the graph, or servers do not run it on TensorRT.
            CheckpointError, ArtifactError: the weights or the engine folder cannot be used.
        """
        if graph == "decoder":
            raise ExportError("decoder: codec decoders run on torch or ONNX Runtime, not TensorRT")
        tensors = signature(graph, precision, self.model)
        profile_shapes = [shapes(profile, tensors) for profile in profiles(graph, load, self.model)]
        target = build_target(package, compute_capabilities)
        try:
            source = self._engines.find(graph, precision, "onnx")
        except ArtifactError as error:
            print(
                f"{graph} {precision}: exporting the graph first: "
                f"{str(error).partition('; run: ')[0]}"
            )
            source = self.onnx(graph, precision)
        start = time.monotonic()
        digest = fingerprint(self._engines.model_folder, stage_of(graph))
        with self._engines.staging() as staging:
            path = staging / f"{graph}-{precision}.engine"
            flags = build_engine(
                package,
                source,
                path,
                precision=precision,
                profiles=profile_shapes,
                compute_capabilities=target["compute_capability"]
                if package == "tensorrt_rtx"
                else (),
                timing_cache=self._engines.path / "timing.cache",
                capturable=graph == "step",  # the only engine that servers run
            )
            return self._add(
                path,
                start,
                f"{len(profile_shapes)} profiles",
                graph=graph,
                precision=precision,
                backend=package,
                opset=onnx.load(source, load_external_data=False).opset_import[0].version,
                fingerprint=digest,
                versions={package: version_of(package)},
                target=target,
                flags=flags,
                profiles=tuple(profile_shapes),
            )

    def _add(
        self, path: Path, start: float, remark: str, *, versions: dict[str, str], **fields: Any
    ) -> Path:
        """Adds a file to the engine folder, with a description.

        Args:
            start: time.monotonic() when the work on the file began.
            versions: versions of the packages that made the file.
            fields: fields of `Artifact` that differ between the artefacts of this maker.
        """
        seconds = time.monotonic() - start
        artifact = Artifact(
            file=path.name,
            schedule=self._schedule,
            versions={"token2wav": version("token2wav"), **versions},
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            seconds=round(seconds, 1),
            command=self._command,
            **{"target": {}, "flags": (), "profiles": (), **fields},
        )
        destination = self._engines.add(path.parent, artifact)
        print(f"{artifact.graph} {artifact.precision}: {destination} ({seconds:.0f} s, {remark})")
        return destination
