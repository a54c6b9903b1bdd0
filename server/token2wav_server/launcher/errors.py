"""Errors of the launcher. Every message is one sentence that names a remedy."""


class ServerError(RuntimeError):
    """The server cannot be started, or has ended by itself."""


class TritonNotFoundError(ServerError):
    """This machine has no tritonserver, or lacks a part that tritonserver needs."""


class PortInUseError(ServerError):
    """A port that the server should listen on is taken or cannot be bound."""


class ServerStartError(ServerError):
    """The server process ended during its start, or was not ready in time."""
