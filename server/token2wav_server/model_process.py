"""Environment, drain and end of a model process: the engine, or a stage of the ensemble."""

from __future__ import annotations

import hmac
import logging
import os
import threading
from pathlib import Path

from token2wav.config import ServerConfig, load_server_config
from token2wav.errors import ConfigError, LimitError

log = logging.getLogger(__name__)

_FLUSH_SECONDS = 0.5
DEVICE_LOST_STATUS = 70
# Prefix of the summary lines of a model in Triton's log. The launcher finds these lines by it, and
# shows them without the header that Triton adds.
SUMMARY = "token2wav: "
# Environment variable with the path of a file. The models refuse new utterances once the file
# exists.
DRAIN_VARIABLE = "TOKEN2WAV_DRAIN_FILE"
# Environment variable with the path of the Unix socket on which the engine listens.
ENGINE_VARIABLE = "TOKEN2WAV_ENGINE"
# Environment variable with the client name of the launcher's canary. The name is a secret, because
# no limit refuses the canary, and the workers serve it first. It is also the key with which the
# ensemble calls its stages.
CANARY_VARIABLE = "TOKEN2WAV_CANARY"


def read_environment() -> tuple[Path, ServerConfig]:
    """Reads the model folder and the settings of the server from environment variables.

    Raises:
        ConfigError: TOKEN2WAV_MODEL is not set, or the settings file cannot be used.
    """
    folder, file = os.environ.get("TOKEN2WAV_MODEL"), os.environ.get("TOKEN2WAV_CONFIG")
    if not folder:
        raise ConfigError("TOKEN2WAV_MODEL: not set; set it to the model folder")
    return Path(folder), load_server_config(Path(file) if file else None)


def check_not_draining() -> None:
    """Raises LimitError while the server drains, when it refuses requests that start utterances."""
    # The launcher sets the variable. A server that was started in another way never drains.
    file = os.environ.get(DRAIN_VARIABLE)
    if file and Path(file).exists():
        raise LimitError("server: it is shutting down; try another one")


def is_canary(client: str) -> bool:
    """Returns whether a client has the name of the canary, which only the launcher knows."""
    name = os.environ.get(CANARY_VARIABLE, "")
    return bool(name) and hmac.compare_digest(name.encode(), client.encode())


def end_process() -> None:
    """Ends this process after half a second, in which pending responses are sent.

    A GPU that reports an illegal access refuses all further work of the process. The launcher
    restarts the engine, or a server with an ensemble, as soon as the process has ended. If the
    process went on, the launcher would notice only after two failed canary syntheses.
    """
    log.error("the model process has lost its GPU and ends with status %d", DEVICE_LOST_STATUS)
    threading.Timer(_FLUSH_SECONDS, os._exit, (DEVICE_LOST_STATUS,)).start()
