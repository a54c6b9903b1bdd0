"""Check of the model folder and the settings before a server starts.

It covers the model folder, the settings, the device and the backend that the settings name, and
the voices. Reading weights and choosing a backend import torch. The launcher would keep torch in
memory for as long as it serves, so the check runs in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from token2wav.commands import missing
from token2wav.config import load_server_config
from token2wav.errors import ConfigError, Token2WavError
from token2wav.families.registry import read_config
from token2wav_server.voices import voices_in

# Removes the working directory from `sys.path`. It may be a model folder, and no file of a model
# folder is ever executed.
_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from token2wav_server.check import main; main()"
)


def check(model: Path, config: Path | None) -> None:
    """Checks that a model folder can be served with the settings in a file.

    Args:
        config: settings file of the server; None for the default settings.

    Raises:
        ConfigError: the folder or a setting cannot be used. The message gives the reason.
    """
    # These two calls need no torch. They repeat a part of the check here, so that a wrong value is
    # reported at once.
    load_server_config(config)
    read_config(model)
    command = [
        sys.executable,
        "-c",
        _PROGRAM,
        str(model),
        *([] if config is None else [str(config)]),
    ]
    process = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, start_new_session=True
    )
    if process.returncode:
        raise ConfigError(
            process.stdout.strip()
            or (
                f"{model}: the process that checks the model folder ended with status "
                f"{process.returncode}"
            )
        )


def main() -> None:
    """Runs the check in the child process, and prints the error if there is one.

    The command line holds the model folder, and optionally the settings file. The exit status is 1
    after an error.
    """
    model, *config = map(Path, sys.argv[1:])
    try:
        # These import torch.
        from token2wav.assembly import check_folder
        from token2wav.model import check_settings

        settings = load_server_config(config[0] if config else None)
        check_settings(model, settings.stream, settings.runtime)
        check_folder(model)
        voices_in(settings, read_config(model))
    except Token2WavError as error:
        print(error)
        sys.exit(1)
    except ModuleNotFoundError as error:
        print(missing(error, "server"))
        sys.exit(1)
