"""Errors of the launcher; every message is one sentence with a remedy."""


class ServerError(RuntimeError):
    """The server cannot be started, or has ended by itself."""


class TritonNotFoundError(ServerError):
    """There is no tritonserver on this machine, or not all of what it needs."""


class PortInUseError(ServerError):
    """A port that the server should listen on is taken or cannot be bound."""


class AccessError(ServerError):
    """A certificate, a key or the authority of clients cannot be used."""


class ServerStartError(ServerError):
    """The server process ended, or was not ready in time."""


class ServerCrashedError(ServerStartError):
    """The server process was ended by a signal that no one sends."""


class ServerGaveUpError(ServerError):
    """The server ended by itself more often in a row than it is started again."""
