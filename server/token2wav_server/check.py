"""Check of a server before its start: model folder, settings, the device and engine that they name,
and voices.

Reading weights and choosing an engine import torch, which the launcher would hold as long as it
serves. So the check runs in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from token2wav.config import load_server_config
from token2wav.errors import ConfigError, Token2WavError
from token2wav.families import read_config
from token2wav_server.voices import voices_in

# Without the working directory, which may be a model folder: nothing in there is ever executed.
_PROGRAM = "import sys; sys.path[:] = filter(None, sys.path); from token2wav_server.check import main; main()"


def check(model: Path, config: Path | None) -> None:
    """Raises ConfigError if a model folder cannot be served with the settings in a file."""
    # here too: this and the next need no torch, so that a wrong value is reported at once
    load_server_config(config)
    read_config(model)
    command = [
        sys.executable,
        "-c",
        _PROGRAM,
        str(model),
        *([] if config is None else [str(config)]),
    ]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, start_new_session=True
    )
    if done.returncode:
        raise ConfigError(
            done.stdout.strip() or f"{model}: its check ended with status {done.returncode}"
        )


def main() -> None:
    """Checks, in that process, what its arguments name, and prints what is wrong."""
    # These import torch.
    from token2wav.execution.assemble import check_folder
    from token2wav.model import check_settings

    model, *config = map(Path, sys.argv[1:])
    try:
        settings = load_server_config(config[0] if config else None)
        check_settings(model, settings.stream, settings.runtime)
        check_folder(model)
        voices_in(settings, read_config(model))
    except Token2WavError as error:
        print(error)
        sys.exit(1)
