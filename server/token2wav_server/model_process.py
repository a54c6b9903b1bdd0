"""Process of a model, from inside: it reads what it is to serve, and ends itself."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from token2wav.config import ServerConfig, load_server_config
from token2wav.errors import ConfigError

log = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 0.5
DEVICE_LOST_STATUS = 70
# before a line of a model's summary in Triton's log: the launcher shows it without its head
SUMMARY = "token2wav: "


def read_environment() -> tuple[Path, ServerConfig]:
    """Returns the model folder in TOKEN2WAV_MODEL, and the settings in the file TOKEN2WAV_CONFIG or
    the defaults.

    Raises:
        ConfigError: there is no folder, or the file cannot be used.
    """
    folder, file = os.environ.get("TOKEN2WAV_MODEL"), os.environ.get("TOKEN2WAV_CONFIG")
    if not folder:
        raise ConfigError("TOKEN2WAV_MODEL: not set; it names the model folder to serve")
    return Path(folder), load_server_config(Path(file) if file else None)


def end_process(reason: str = "has lost its GPU") -> None:
    """Ends this process, soon but not before answers that are on their way have left; `reason` goes
    to the log.

    A GPU that reports an illegal access refuses all further work of the process. The launcher
    starts the server anew as soon as a model process is gone; without this, it would take two
    failed canaries to notice.
    """
    log.error("this process %s; it ends with status %d", reason, DEVICE_LOST_STATUS)
    threading.Timer(_LAST_WORDS_SECONDS, os._exit, (DEVICE_LOST_STATUS,)).start()
