"""Command `token2wav export`: reads arguments and turns errors into messages and exit codes."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from token2wav.commands import CommandParser
from token2wav.config import load_server_config
from token2wav.config.values import number
from token2wav.errors import ArtifactError, Token2WavError
from token2wav.hub import MODEL_HELP, model_folder
from token2wav.published.artifacts import EngineFolder, GraphName, Precision
from token2wav_export import ExportError

PROGRAM = "token2wav export"
DONE, DIFFERENT, UNUSABLE, FAILED, INTERRUPTED = 0, 1, 2, 3, 130
_BACKENDS = ("auto", "torch", "onnx", "tensorrt")
_EXIT_CODES = (
    "exit codes:\n"
    "  0    done\n"
    "  1    verify: the backend differs from torch by more than its bound\n"
    "  2    wrong usage, or an unusable model folder, engine folder or package\n"
    "  3    the export failed; earlier artefacts are still in place\n"
    "  130  interrupted (Ctrl-C)\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    options.command_line = [*PROGRAM.split(), *words]
    try:
        options.model = model_folder(options.model)
        return options.run(options) or DONE
    except ExportError as error:
        return _give_up(f"error: {error}", FAILED)
    except Token2WavError as error:
        return _give_up(f"error: {error}", UNUSABLE)
    except KeyboardInterrupt:
        return _give_up("interrupted", INTERRUPTED)
    # A reader such as `head` closed the pipe. Python would report the closed pipe again at exit.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return DONE


def _give_up(message: str, exit_code: int) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return exit_code


def parser() -> CommandParser:
    """Returns the parser of `token2wav export`."""
    program = CommandParser(
        prog=PROGRAM,
        description="Export ONNX graphs and TensorRT engines from a model folder.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = program.add_subparsers(metavar="COMMAND", required=True)

    onnx = commands.add_parser(
        "onnx",
        parents=[_folders(), _graphs("float32")],
        help="export graphs as ONNX",
        description="Export graphs as ONNX, compare each with torch, and add them to the "
        "engine folder.",
    )
    onnx.add_argument(
        "--opset",
        type=int,
        choices=range(18, 23),
        default=20,
        help="ONNX opset version (default: %(default)s)",
    )
    onnx.set_defaults(run=_run_onnx)

    tensorrt = commands.add_parser(
        "tensorrt",
        parents=[_folders(), _graphs("float16")],
        help="build TensorRT engines",
        description="Build TensorRT engines from ONNX graphs. Missing graphs are exported first.",
    )
    tensorrt.add_argument(
        "--package",
        choices=("auto", "tensorrt", "tensorrt_rtx"),
        default="auto",
        help="TensorRT package for the build; auto uses ordinary TensorRT if it is installed, "
        "else TensorRT-RTX (default: auto)",
    )
    tensorrt.add_argument(
        "--compute-capability",
        nargs="+",
        default=[],
        metavar="X.Y",
        help="compute capabilities of the GPUs to build for; TensorRT-RTX only (default: every "
        "supported GPU from Ampere on)",
    )
    tensorrt.add_argument(
        "--max-streams",
        type=number(int, 1),
        default=4,
        metavar="N",
        help="maximum number of streams in one batch (default: %(default)s)",
    )
    tensorrt.add_argument(
        "--history-seconds",
        type=number(float, 1, 3600),
        default=32.0,
        metavar="S",
        help="maximum length of prompt and past audio that a chunk can read, in seconds "
        "(default: %(default)g)",
    )
    tensorrt.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file with the settings of the server, which set the lengths of chunks",
    )
    tensorrt.set_defaults(run=_run_tensorrt)

    verify = commands.add_parser(
        "verify",
        parents=[_folders()],
        help="compare exported graphs with torch in float32",
        description="Stream audio with exported graphs, and report the difference from torch in "
        "float32. The exit code is 1 if the difference exceeds a bound.",
    )
    verify.add_argument(
        "--backend",
        choices=_BACKENDS,
        default="auto",
        help="backend to compare; auto uses TensorRT engines on a GPU, else ONNX graphs, else "
        "torch (default: auto)",
    )
    verify.add_argument(
        "--precision",
        choices=("auto", *get_args(Precision)),
        default="auto",
        help="precision of the graphs; auto uses float16 on a GPU and float32 on a CPU, or else "
        "the exported precision (default: auto)",
    )
    verify.add_argument(
        "--device",
        default="auto",
        help="device to run on: auto, cpu, cuda or cuda:N (default: auto)",
    )
    verify.add_argument(
        "--seconds",
        type=number(float, 1),
        default=10.0,
        help="length of the compared audio in seconds (default: %(default)g)",
    )
    verify.add_argument("--json", action="store_true", help="print JSON instead of a table")
    verify.set_defaults(run=_run_verify)

    inspect = commands.add_parser(
        "inspect",
        parents=[_folders()],
        help="list exported artefacts, and whether they can be used",
        description="List the artefacts of an engine folder: their content, their target machine, "
        "and whether they can be used with this model on this machine.",
    )
    inspect.add_argument("--json", action="store_true", help="print JSON instead of text")
    inspect.set_defaults(run=_run_inspect)
    return program


def _folders() -> CommandParser:
    parent = CommandParser(add_help=False)
    parent.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    parent.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="engine folder (default: the folder engines in the model folder)",
    )
    return parent


def _graphs(precision: Precision) -> CommandParser:
    parent = CommandParser(add_help=False)
    parent.add_argument(
        "--graphs",
        nargs="+",
        choices=get_args(GraphName),
        metavar="GRAPH",
        help=f"graphs to export, out of {', '.join(get_args(GraphName))} (default: step vocoder; "
        "decoder for a codec)",
    )
    parent.add_argument(
        "--precision",
        nargs="+",
        choices=get_args(Precision),
        default=[precision],
        help=f"precisions to export (default: {precision})",
    )
    return parent


def _engines(options: argparse.Namespace) -> EngineFolder:
    return EngineFolder(options.model, options.out)


# torch and onnx take seconds to import, so only the commands that need them import them.


def _run_onnx(options: argparse.Namespace) -> None:
    from token2wav_export.making import Maker

    maker = Maker(_engines(options), options.command_line)
    for precision in options.precision:
        for graph in options.graphs or maker.model.onnx_graphs:
            maker.onnx(graph, precision, options.opset)


def _run_tensorrt(options: argparse.Namespace) -> None:
    from token2wav_export.engines import load_package
    from token2wav_export.making import Maker
    from token2wav_export.profiles import ProfileLoad

    load = ProfileLoad(
        load_server_config(options.config).stream, options.max_streams, options.history_seconds
    )
    package = load_package(options.package)
    maker = Maker(_engines(options), options.command_line)
    for precision in options.precision:
        for graph in options.graphs or maker.model.onnx_graphs:
            maker.tensorrt(graph, precision, package, load, options.compute_capability)


def _run_verify(options: argparse.Namespace) -> int:
    from token2wav.config import RuntimeConfig
    from token2wav_export.verify import exported_runtime, verify

    if options.out is not None:
        _check_engines(options)
    runtime = RuntimeConfig(
        device=options.device,
        backend=options.backend,
        engines=str(options.out or ""),
        precision=options.precision,
    )
    if options.backend == "auto":
        runtime = exported_runtime(options.model, runtime)
        if runtime.backend == "torch":
            print(
                f"{PROGRAM}: {_engines(options).path} has no graph that can run on this "
                "device, so torch is compared with itself; to export graphs, run: "
                f"{_export_command(options)}",
                file=sys.stderr,
            )
    report = verify(options.model, runtime, options.seconds)
    print(report.as_json() if options.json else report.as_table())
    for failure in report.failures:
        print(f"{PROGRAM}: {failure}", file=sys.stderr)
    return DIFFERENT if report.failures else DONE


def _run_inspect(options: argparse.Namespace) -> None:
    from token2wav.published.registry import read_config
    from token2wav_export.inspection import as_json, as_text, inspect_folder

    # Reports a wrong model folder even if the engine folder has no artefact to compare with it.
    read_config(options.model)
    _check_engines(options)
    inspections = inspect_folder(_engines(options))
    if options.json or inspections:
        print(as_json(inspections) if options.json else as_text(inspections))
    else:
        print(
            f"{_engines(options).path}: no artefacts exported yet; run: {_export_command(options)}"
        )


def _check_engines(options: argparse.Namespace) -> None:
    """Raises ArtifactError if the engine folder does not exist."""
    path = _engines(options).path
    if not path.is_dir():
        if path.exists():
            raise ArtifactError(f"{path}: not a folder; pass the engine folder with --out")
        raise ArtifactError(
            f"{path}: no such engine folder; to export graphs, run: {_export_command(options)}"
        )


def _export_command(options: argparse.Namespace) -> str:
    out = [] if options.out is None else ["--out", str(options.out)]
    return shlex.join([*PROGRAM.split(), "onnx", "--model", str(options.model), *out])
