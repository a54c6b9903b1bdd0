"""Server package, which starts and stops a real NVIDIA tritonserver without docker.

Stopping the server removes all its processes, shared memory and temporary files.
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
