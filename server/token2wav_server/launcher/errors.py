"""Errors of the launcher; every message is one sentence with a remedy."""


class ServerError(RuntimeError):
    """The server cannot be started, or has ended by itself."""


class TritonNotFoundError(ServerError):
    """There is no tritonserver on this machine, or not all of what it needs."""


class PortInUseError(ServerError):
    """A port that the server should listen on is taken or cannot be bound."""


class ServerStartError(ServerError):
    """The server process ended, or was not ready in time."""
