"""Server package: it starts a real NVIDIA tritonserver, without docker, and stops it with nothing
left behind.
"""

from token2wav_server.launcher.errors import (
    PortInUseError,
    ServerError,
    ServerStartError,
    TritonNotFoundError,
)
from token2wav_server.launcher.ports import Ports
from token2wav_server.launcher.process import TritonServer

__all__ = [
    "PortInUseError",
    "Ports",
    "ServerError",
    "ServerStartError",
    "TritonNotFoundError",
    "TritonServer",
]
