"""Check of the model folder and the settings before a server starts.

It is `model_findings.examine_model`. Reading weights and choosing a backend import torch. The
launcher would keep torch in memory for as long as it serves, so the check runs in a process of its
own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from token2wav.config import load_server_config
from token2wav.errors import ConfigError
from token2wav.published.registry import read_config
from token2wav_server.findings import examine
from token2wav_server.launcher.engine_process import python_command
from token2wav_server.model_findings import examine_model


def check(model: Path, config: Path | None) -> list[str]:
    """Checks that a model folder can be served with the settings in a file, on this machine.
    Returns the warnings.

    Raises:
        ConfigError: the folder or a setting cannot be used. The message gives the reason.
    """
    # These two calls need no torch. They repeat a part of the check here, so that a wrong value is
    # reported at once.
    load_server_config(config)
    read_config(model)
    command = [
        *python_command("token2wav_server.check"),
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
    return process.stdout.splitlines()


def main() -> None:
    """Runs the check in the child process, and prints its warnings, or the first error alone.

    The command line holds the model folder, and optionally the settings file. The exit status is 1
    after an error.
    """
    model, *config = map(Path, sys.argv[1:])
    warnings = []
    for finding in examine({"model": lambda: examine_model(model, config[0] if config else None)}):
        if finding.state == "error":
            print(finding.message)
            sys.exit(1)
        if finding.state == "warning":
            warnings.append(finding.message)
    print(*warnings, sep="\n", end="\n" if warnings else "")


if __name__ == "__main__":
    main()
