"""Command that finds or builds the engines of this machine.

    engines.py folder ROOT --config FILE
    engines.py build ROOT --model FOLDER --config FILE

The settings `runtime.backend` and `runtime.device` choose between ONNX graphs and TensorRT engines.
An engine runs only on the GPU and with the TensorRT version for which it was built. A volume may be
shared by several machines, and outlives updates of GPU and TensorRT. Each combination therefore has
its own folder below ROOT.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from token2wav.assembly import Exportable, exportable
from token2wav.config import RuntimeConfig, ServerConfig, load_server_config
from token2wav.errors import ArtifactError, BackendUnavailableError, ConfigError, Token2WavError
from token2wav.hub import MODEL_HELP, model_folder
from token2wav.model import Token2Wav
from token2wav.published.artifacts import Backend, EngineFolder, GraphName, Precision
from token2wav_export import cli
from token2wav_export.engines import build_target, load_package, own_target, version_of
from token2wav_export.profiles import ProfileLoad, profiles, shapes
from token2wav_export.signatures import signature

UNUSABLE = 2
# Limits of the chunks that a server captures: streams in a batch (larger batches run in parts), and
# seconds of the past. An engine with higher limits costs memory without being used. With lower
# limits, torch computes the remaining chunks.
CAPTURED_STREAMS = 4
CAPTURED_SECONDS = 64


@dataclass(frozen=True)
class Machine:
    """Machine that engines are built for.

    Attributes:
        backend: library that runs the engines.
        version: version of the library.
        target: GPU and compute capability, as `EngineFolder.find` takes them; empty for the CPU.
    """

    backend: Backend
    version: str
    target: dict[str, str]

    @classmethod
    def own(cls, runtime: RuntimeConfig) -> Machine:
        """Describes this machine as a server with these settings uses it.

        Raises:
            ConfigError: the server needs TensorRT, but there is no GPU, or no installed TensorRT
                builds for it.
        """
        target = {} if runtime.device == "cpu" else own_target()
        if runtime.backend == "tensorrt" and not target:
            raise BackendUnavailableError(
                "runtime.backend: tensorrt needs an NVIDIA GPU, but the device is cpu"
            )
        if not target or runtime.backend == "onnx":
            return cls("onnx", version("onnxruntime"), target)
        try:
            package = load_package("auto")
        except BackendUnavailableError as error:
            raise BackendUnavailableError(
                f"TensorRT is not available for the build: {error}"
            ) from error
        build_target(package, [target["compute_capability"]] if package == "tensorrt_rtx" else [])
        return cls(package, version_of(package), target)

    @property
    def key(self) -> str:
        """Name of a folder, such as `nvidia-l4_8.9_tensorrt_rtx-1.7.1.116`."""
        gpu = self.target.get("gpu", f"cpu {platform.machine()}")
        parts = [gpu, self.target.get("compute_capability", ""), f"{self.backend}-{self.version}"]
        return "_".join(
            re.sub(r"[^a-z0-9._]+", "-", part.lower()).strip("-") for part in parts if part
        )

    def wanted(self, runtime: RuntimeConfig, model: Exportable) -> dict[GraphName, Precision]:
        """Returns a server's graphs with the precisions that it asks for.

        With TensorRT, torch is the vocoder.
        """
        auto: Precision = "float16" if self.target else "float32"
        step: Precision = auto if runtime.precision == "auto" else runtime.precision
        graphs = model.onnx_graphs if self.backend == "onnx" else ("step",)
        return {graph: step if graph == "step" else "float32" for graph in graphs}

    def command(self, config: ServerConfig) -> list[str]:
        """Returns the arguments of `token2wav export`, without folders and graphs."""
        if self.backend == "onnx":
            return ["onnx"]
        _, streams, seconds = captured_load(config)
        arguments = ["tensorrt", "--package", self.backend, "--max-streams", str(streams)]
        arguments += ["--history-seconds", str(seconds)]
        if self.backend == "tensorrt_rtx":
            arguments += ["--compute-capability", self.target["compute_capability"]]
        return arguments


def captured_load(config: ServerConfig) -> ProfileLoad:
    """Returns the load of the chunks that a server with these settings captures."""
    streams = min(config.limits.batch_streams, CAPTURED_STREAMS)
    return ProfileLoad(config.stream, streams, CAPTURED_SECONDS)


def main() -> int:
    """Runs the command and returns its exit code, one of `token2wav export`."""
    options = _parser().parse_args()
    try:
        if options.task == "folder":
            print(folder(options.root, load_server_config(options.config).runtime))
            return cli.DONE
        return build(options.root, model_folder(options.model), options.config)
    except Token2WavError as error:
        print(f"engines: error: {error}", file=sys.stderr)
        return UNUSABLE


def folder(root: Path, runtime: RuntimeConfig) -> Path:
    """Returns the folder for the engines of this machine, which need not exist."""
    try:
        return root / Machine.own(runtime).key
    except ConfigError:
        return root / "none"


def build(root: Path, model: Path, config_file: Path) -> int:
    """Builds the engines that this machine's server would use, if they are incomplete or stale.

    Raises:
        ConfigError: as `Machine.own`; or the model has no graphs.
    """
    config = load_server_config(config_file)
    if config.runtime.backend not in ("onnx", "tensorrt") or config.stream.reference:
        return _nothing("the settings select a backend without engines")
    machine = Machine.own(config.runtime)
    engine_folder = root / machine.key
    missing = [
        (graph, precision)
        for graph, precision in machine.wanted(config.runtime, exportable(model)).items()
        if not _usable(machine, EngineFolder(model, engine_folder), config, graph, precision)
    ]
    if not missing:
        return _nothing(f"{engine_folder} is up to date")
    for graph, precision in missing:
        print(
            f"engines: building {graph} in {precision} for {machine.backend} in {engine_folder}",
            flush=True,
        )
        words = [*machine.command(config), "--model", str(model), "--out", str(engine_folder)]
        words += ["--graphs", graph, "--precision", precision]
        if machine.backend != "onnx":
            words += ["--config", str(config_file)]
        if code := cli.main(words):
            return code
    if machine.backend == "tensorrt_rtx":
        compile_kernels(model, config, engine_folder)
    print(f"engines: {engine_folder} is complete")
    return cli.DONE


def compile_kernels(model: Path, config: ServerConfig, engine_folder: Path) -> None:
    """Loads the engines once, so that TensorRT-RTX stores its compiled kernels beside them. A
    server must not write to the folder of the engines.
    """
    print("engines: compiling the kernels of this GPU", flush=True)
    runtime = replace(config.runtime, engines=str(engine_folder))
    Token2Wav.load(model, stream=config.stream, runtime=runtime)


def _usable(
    machine: Machine,
    engines: EngineFolder,
    config: ServerConfig,
    graph: GraphName,
    precision: Precision,
) -> bool:
    versions: dict[str, str] = {}
    if machine.backend != "onnx":
        versions[machine.backend] = machine.version
    try:
        file = engines.find(
            graph,
            precision,
            machine.backend,
            versions=versions,
            target=machine.target,
        )
        built = {
            engines.path / artifact.file: artifact.profiles for artifact in engines.artifacts()
        }
    except ArtifactError:
        return False
    if machine.backend == "onnx":
        return True
    networks = exportable(engines.model_folder)
    inputs = signature(graph, precision, networks)
    ranges = profiles(graph, captured_load(config), networks)
    return built.get(file) == tuple(shapes(profile, inputs) for profile in ranges)


def _nothing(reason: str) -> int:
    print(f"engines: no engine is built: {reason}")
    return cli.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="engines.py", description="Find or build the engines of this machine."
    )
    tasks = parser.add_subparsers(dest="task", required=True)
    show = tasks.add_parser("folder", help="print the folder of this machine's engines")
    make = tasks.add_parser(
        "build", help="build the missing engines that this machine's server would use"
    )
    for task in (show, make):
        task.add_argument("root", type=Path, metavar="ROOT", help="folder of all engines")
        task.add_argument(
            "--config", type=Path, required=True, metavar="FILE", help="server configuration"
        )
    make.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    return parser


if __name__ == "__main__":
    sys.exit(main())
