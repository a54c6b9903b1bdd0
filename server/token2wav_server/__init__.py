"""Starts a real NVIDIA tritonserver, without docker, and stops it without leaving anything behind."""

from token2wav_server.errors import PortInUseError, ServerError, ServerStartError, TritonNotFoundError
from token2wav_server.ports import Ports
from token2wav_server.server import TritonServer

__all__ = [
    "PortInUseError",
    "Ports",
    "ServerError",
    "ServerStartError",
    "TritonNotFoundError",
    "TritonServer",
]
