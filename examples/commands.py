"""Commands of token2wav as the demos run them: each is printed as a user would type it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from token2wav_server import Ports, ServerError

ROOT = Path(__file__).resolve().parents[1]
_READY = "token2wav: ready"


def environment_command(words: Sequence[object]) -> list[str]:
    """Returns a command with the program of this environment, which need not be on PATH."""
    program, *arguments = map(str, words)
    return [str(Path(sys.executable).with_name(program)), *arguments]


def environment() -> dict[str, str]:
    """Returns the variables of this process, with the modules of `examples` on Python's path."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def shown(words: Sequence[object]) -> str:
    """Returns a command as a user would type it in the working directory."""
    return "$ " + shlex.join(
        os.path.relpath(word) if isinstance(word, Path) else str(word) for word in words
    )


@contextmanager
def serving(model: Path) -> Iterator[str]:
    """Runs `token2wav serve` on free ports, and stops it as Ctrl-C does. Raises ServerError if the
    server could not start. It has printed the reason.

    Yields:
        The gRPC address of the server, once it is ready.
    """
    ports = Ports.free()
    words = ["token2wav", "serve", model, "--http-port", ports.http, "--grpc-port", ports.grpc]
    words += ["--metrics-port", ports.metrics]
    with running(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not any(line.startswith(_READY) for line in process.stdout):
            raise ServerError("the server did not start, see above")
        yield f"127.0.0.1:{ports.grpc}"


@contextmanager
def running(words: Sequence[object], stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Runs a command beside this process, and terminates it at the end."""
    print(shown(words), flush=True)
    with subprocess.Popen(
        environment_command(words), stdout=stdout, text=True, env=environment()
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
