"""Check of what a server is to be started with: model folder, settings and voices.

Who reads weights imports torch, which the launcher would hold as long as it serves. So they are read in a process of
its own, which is this module.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from token2wav.config import ServerConfig, load_server_config
from token2wav.errors import ConfigError, Token2WavError
from token2wav.families import check_folder, read_config
from token2wav_server.voices import voices_in


def check(model: Path, config: Path | None) -> None:
    """Raises ConfigError if a model folder cannot be served with the settings in a file."""
    command = [sys.executable, "-m", __name__, str(model), *([] if config is None else [str(config)])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, start_new_session=True)
    if done.returncode:
        raise ConfigError(done.stdout.strip() or f"{model}: its check ended with status {done.returncode}")


def check_voices(config: ServerConfig, folder: Path) -> None:
    """Raises ConfigError if a voice in the settings of a server cannot be used with the model in a folder."""
    if config.voices:
        voices_in(config, read_config(folder))


def _main(model: str, config: str | None = None) -> None:
    try:
        check_folder(Path(model))
        check_voices(load_server_config(Path(config) if config else None), Path(model))
    except Token2WavError as error:
        print(error)
        sys.exit(1)


if __name__ == "__main__":
    _main(*sys.argv[1:])
