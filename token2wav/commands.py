"""Entry points of all commands, which name the extra to install if a module is missing.

The wheel always installs every command, but the dependencies of a command only with its extra. So
an entry point imports the package of its command only when it runs.
"""

from __future__ import annotations

import sys
from importlib import import_module


def client() -> int:
    """Runs `token2wav-client`."""
    return _run("token2wav-client", "token2wav_client.cli", "client")


def export() -> int:
    """Runs `token2wav-export`."""
    return _run("token2wav-export", "token2wav_export.cli", "export")


def gateway() -> int:
    """Runs `token2wav-gateway`."""
    return _run("token2wav-gateway", "token2wav_gateway.cli", "gateway")


def plan() -> int:
    """Runs `token2wav-plan`."""
    return _run("token2wav-plan", "token2wav_server.plan", "server")


def serve() -> int:
    """Runs `token2wav-serve`."""
    return _run("token2wav-serve", "token2wav_server.cli", "server")


def tokenize() -> int:
    """Runs `token2wav-tokenize`."""
    return _run("token2wav-tokenize", "token2wav_voice.cli", "voice", "tokenize")


def voice() -> int:
    """Runs `token2wav-voice`."""
    return _run("token2wav-voice", "token2wav_voice.cli", "voice")


def _run(command: str, module: str, extra: str, function: str = "main") -> int:
    try:
        return int(getattr(import_module(module), function)())
    except ModuleNotFoundError as error:
        print(f"{command}: error: {missing(error, extra)}", file=sys.stderr)
        return 2


def missing(error: ModuleNotFoundError, extra: str) -> str:
    """Returns the message about a missing module, which names the extra to install.

    Raises:
        ModuleNotFoundError: the missing module is one of our own, which no extra installs.
    """
    name = (error.name or "").partition(".")[0]
    if name.startswith("token2wav"):
        raise error
    return f"the module {name} is missing; run: pip install 'token2wav[{extra}]'"
