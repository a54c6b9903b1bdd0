"""A gateway in a thread, between a real server and an OpenAI-style language model."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from safetensors.numpy import save_file

from testkit.models.tiny_model import demo_tokens
from testkit.patience import PATIENCE_SECONDS, until
from token2wav_client import ClientVoice, TokenError
from token2wav_client.voice import FIELDS
from token2wav_gateway.app import create_app
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.server import BoundedConfig, DrainingServer
from token2wav_gateway.settings import Settings
from token2wav_server import Ports

TEMPLATE = "demo"
VOICE, PROMPT_TEXT = "anna", "words of the prompt"
TOKENS_OF_A_WORD = 6


def tokens_of(text: str) -> list[int]:
    """Returns the tokens that the language model says for a text: six for each word."""
    words = text.split()
    if words == ["nothing"]:
        raise TokenError("sentence: 0 words; at least 1 is needed")
    return demo_tokens(TOKENS_OF_A_WORD * len(words)).tolist()


def key_settings(name: str, secret: str, **limits: int) -> dict[str, Any]:
    """Settings of an access key."""
    return {"name": name, "sha256": hashlib.sha256(secret.encode()).hexdigest(), **limits}


@dataclass(frozen=True)
class GatewayRig:
    """A gateway under test.

    Attributes:
        voices: folder of its voices.
        riva: host:port of its gRPC interface; empty for none.
    """

    url: str
    registry: CollectorRegistry
    voices: Path
    riva: str = ""

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_SECONDS, **options)

    def value(self, name: str, **labels: str) -> float:
        """Returns the value of a metric."""
        return self.registry.get_sample_value(f"token2wav_gateway_{name}", labels) or 0.0

    @classmethod
    @contextmanager
    def start(
        cls,
        folder: Path,
        *,
        grpc_url: str,
        language_model_url: str,
        voice: ClientVoice,
        settings: dict[str, Any] | None = None,
        riva: bool = False,
    ) -> Iterator[GatewayRig]:
        """Starts a gateway with one voice, and further settings.

        Args:
            riva: whether it also has Riva's gRPC interface.
        """
        voices = folder / "voices"
        voices.mkdir()
        save_file({name: getattr(voice, name) for name in FIELDS}, voices / f"{VOICE}.safetensors")
        document: dict[str, Any] = {
            "language_model": {
                "url": language_model_url,
                "template": TEMPLATE,
                "connect_timeout_s": 60,  # the longest, because a busy machine is slow
                "token_timeout_s": PATIENCE_SECONDS,
            },
            "speech_server": {"url": grpc_url, "response_timeout_s": PATIENCE_SECONDS},
            "voices": {"folder": voices},
        }
        for section, values in (settings or {}).items():
            defaults = document.get(section)
            document[section] = {**defaults, **values} if isinstance(defaults, dict) else values
        metrics, riva_port = Metrics(), Ports.free().grpc if riva else 0
        with serving_gateway(Settings.model_validate(document), metrics, riva_port) as port:
            address = f"127.0.0.1:{riva_port}" if riva else ""
            if riva:  # this port opens after the other one
                until(lambda: _listens(riva_port))
            yield cls(f"http://127.0.0.1:{port}", metrics.registry, voices, address)

    @classmethod
    @contextmanager
    def between(cls, language_model: Any, folder: Path, **options: Any) -> Iterator[GatewayRig]:
        """Serves an ASGI application as the language model, and starts a gateway in front of it.

        Args:
            options: further arguments of `start`.
        """
        with (
            serving(language_model) as port,
            cls.start(folder, language_model_url=f"http://127.0.0.1:{port}/v1", **options) as rig,
        ):
            yield rig


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port)):
            return True
    except ConnectionError:
        return False


@contextmanager
def serving_gateway(
    settings: Settings, metrics: Metrics | None = None, riva_port: int = 0
) -> Iterator[int]:
    """Serves a gateway as its command does, but in a thread, and yields its port."""
    app = create_app(settings, metrics or Metrics())
    config = BoundedConfig(
        app,
        settings.limits,
        host="127.0.0.1",
        port=Ports.free().http,
        riva_port=riva_port,
    )
    with _running(DrainingServer(config, app, drain_s=1)) as port:
        yield port


@contextmanager
def serving(app: FastAPI | Any) -> Iterator[int]:
    """Serves another ASGI application in a thread, and yields its port."""
    config = uvicorn.Config(
        app, port=Ports.free().http, log_level="error", timeout_graceful_shutdown=1
    )
    with _running(uvicorn.Server(config)) as port:
        yield port


@contextmanager
def _running(server: uvicorn.Server) -> Iterator[int]:
    thread = threading.Thread(target=asyncio.run, args=[server.serve()], name="uvicorn")
    thread.start()
    try:
        until(lambda: server.started)
        yield server.config.port
    finally:
        server.should_exit = True
        thread.join()
