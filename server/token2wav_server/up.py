"""Command `token2wav up`: text to speech with one command.

It starts a server and a gateway, connects them with a language model server, and runs until Ctrl-C
or until one of them ends. Without a model, the demo voice speaks, and a stand-in takes the place of
the language model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from token2wav.commands import CommandParser
from token2wav.errors import Token2WavError
from token2wav.hub import MODEL_HELP, model_folder
from token2wav_gateway.errors import GatewayError
from token2wav_gateway.settings import Settings, read_yaml, validated
from token2wav_gateway.voices.voice_folder import VoiceFolder
from token2wav_server import Ports, ServerError, demo
from token2wav_server.launcher.ports import LOOPBACK, listening

PROGRAM = "token2wav up"
_NEEDED_FOR_VOICES = "campplus.onnx"  # file of a flow's folder
_POLL_S = 0.2
_ANSWER_S = 5.0
_END_S = 40.0  # longer than the gateway and the server drain


@dataclass(frozen=True, eq=False)
class Part:
    """Process that the command has started, with a noun for messages."""

    noun: str
    process: asyncio.subprocess.Process

    async def ended(self) -> str:
        """Waits for the end of the process, and returns a sentence about it."""
        status = await self.process.wait()
        return f"{self.noun} has ended with status {status}; everything else is stopped"

    async def stop(self) -> None:
        """Ends the process, which may drain."""
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), _END_S)
            except asyncio.TimeoutError:
                self.process.kill()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs until Ctrl-C. Returns the exit code: 2 for wrong options, 3 if a part ends, else 0."""
    options = parser().parse_args(arguments)
    try:
        asyncio.run(_run_until_stopped(options))
    except (Token2WavError, GatewayError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except ServerError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 3
    return 0


async def _run_until_stopped(options: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as with `nohup`
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    running = asyncio.create_task(_run(options))
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if running.done():
        running.result()
    running.cancel()
    await asyncio.wait({running})


async def _run(options: argparse.Namespace) -> None:
    listening(options.host, options.port, "").close()  # before a server starts
    model = demo.MODEL if options.model is None else model_folder(options.model)
    ports, stand_in_port = Ports.free(), Ports.free().http
    settings = await _settings(options, model, ports.grpc, stand_in_port)
    async with AsyncExitStack() as stack:
        parts: list[Part] = []

        async def start(noun: object, *words: object) -> None:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *map(str, words)),
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends the others
            )
            parts.append(Part(str(noun), process))
            stack.push_async_callback(parts[-1].stop)

        folder = Path(stack.enter_context(TemporaryDirectory(prefix="token2wav-up-")))
        config = folder / "gateway.yaml"
        config.write_text(json.dumps(settings), encoding="utf-8")  # YAML contains JSON
        checked = validated(Settings, settings, config)
        if options.model is None:
            await _make_demo_voice(checked)
        if _has_stand_in(options):
            stand_in = "token2wav_server.demo.language_model"
            await start("the stand-in for a language model", stand_in, "--port", stand_in_port)
        await start(
            *("the speech server", "token2wav.commands", "serve", model),
            *("--http-port", ports.http, "--grpc-port", ports.grpc),
            *("--metrics-port", ports.metrics),
        )
        await start(
            *("the gateway", "token2wav.commands", "gateway", "--config", config),
            *("--host", options.host, "--port", options.port),
            *("--riva-port", options.riva_port),
        )
        host = LOOPBACK if options.host == "0.0.0.0" else options.host
        await _while_all_run(_works(f"http://{host}:{options.port}"), parts)
        print(f"{PROGRAM}: ready; open http://{host}:{options.port}/ in a browser", flush=True)
        await _while_all_run(asyncio.Event().wait(), parts)


async def _while_all_run(work: Coroutine[Any, Any, object], parts: Sequence[Part]) -> None:
    """Waits for work.

    Raises:
        ServerError: a part has ended before.
    """
    working = asyncio.create_task(work)
    ends = [asyncio.create_task(part.ended()) for part in parts]
    try:
        await asyncio.wait({working, *ends}, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            if end.done():
                raise ServerError(end.result())
    finally:
        for task in (working, *ends):
            task.cancel()


async def _works(url: str) -> None:
    """Waits until the gateway and both servers behind it work."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as http:
        while True:
            with suppress(aiohttp.ClientError, asyncio.TimeoutError):
                async with http.get(f"{url}/health/ready") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(_POLL_S)


def _has_stand_in(options: argparse.Namespace) -> bool:
    return options.model is None and options.language_model is None


async def _settings(
    options: argparse.Namespace, model: Path, grpc_port: int, stand_in_port: int
) -> dict[str, Any]:
    """Returns the settings of the gateway.

    Raises:
        GatewayError: the file of settings cannot be read, or the name of the language model is
            unknown.
    """
    settings: dict[str, Any] = {} if options.config is None else read_yaml(options.config)
    language_model = {**settings.get("language_model", {})}
    if _has_stand_in(options):
        url = f"http://{LOOPBACK}:{stand_in_port}/v1"
        language_model = {"url": url, "template": demo.TEMPLATE}
    elif options.language_model is not None:
        language_model["url"] = options.language_model
        if "model" not in language_model:
            language_model["model"] = await _name_of(options.language_model)
    settings = {"log_level": "warning", **settings, "language_model": language_model}
    settings["speech_server"] = {"url": f"{LOOPBACK}:{grpc_port}"}
    if (model / _NEEDED_FOR_VOICES).is_file():
        voices = {"folder": str(options.voices), "model": str(model)}
        if options.model is None:
            voices["default"] = demo.VOICE
        settings["voices"] = {**voices, **settings.get("voices", {})}
    return settings


async def _name_of(url: str) -> str:
    """Asks a language model server for the name of its only model."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S)) as http,
            http.get(f"{url.rstrip('/')}/models") as answer,
        ):
            names = [model["id"] for model in (await answer.json())["data"]]
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, LookupError, TypeError) as error:
        raise GatewayError(f"--language-model: {url}/models has no answer: {error}") from None
    if len(names) != 1:
        raise GatewayError(
            f"--language-model: the server has {len(names)} models; name one in a file, as "
            "`language_model: {model: NAME}`, and pass it with --config"
        )
    return str(names[0])


async def _make_demo_voice(settings: Settings) -> None:
    """Makes the demo voice in the folder of the gateway, unless it is there."""
    voices = VoiceFolder(settings.voices)
    if demo.VOICE not in voices.names():
        await voices.create(demo.VOICE, demo.PROMPT_TEXT, demo.PROMPT.read_bytes())


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
        "--language-model",
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
        "--voices",
        type=Path,
        default=Path("voices"),
        metavar="FOLDER",
        help="folder of voices (default: %(default)s)",
    )
    parser.add_argument("--host", default=LOOPBACK, help="of the gateway (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="default: %(default)s")
    parser.add_argument(
        "--riva-port", type=int, default=0, help="port for clients of Riva (default: 0, none)"
    )
    return parser
