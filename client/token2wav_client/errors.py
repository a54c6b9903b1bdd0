"""Everything that can go wrong for a user of this package, each with a class, a sentence and an exit code.

Messages are one sentence: what is wrong, what was expected, and where it helps, what to do.
"""

from __future__ import annotations

OK = 0
UNEXPECTED = 1
BAD_INPUT = 2
UNAVAILABLE = 3
REFUSED = 4
TIMED_OUT = 5
NOT_READY = 6
DENIED = 7
INTERRUPTED = 130
TERMINATED = 143

EXIT_CODES: dict[int, str] = {
    OK: "the whole utterance was received (health: the server speaks, or says that it has no room now)",
    UNEXPECTED: "an error that this program does not know; please report it",
    BAD_INPUT: "wrong usage, or a token, voice or output file that cannot be used",
    UNAVAILABLE: "no server at the address, or it went away",
    REFUSED: "the server refused or failed the utterance, or sent a wrong answer",
    TIMED_OUT: "the server did not answer within --timeout",
    NOT_READY: "the server answers, but the model is missing, loading or failed to load (health: or shutting down)",
    DENIED: "no access: a certificate or a token was not accepted, by this side or the other",
    INTERRUPTED: "interrupted (Ctrl-C); audio received so far is kept",
    TERMINATED: "terminated (SIGTERM); audio received so far is kept",
}


class ClientError(Exception):
    """Base of all errors that this package raises on purpose.

    Attributes:
        exit_code: of the command.
        transient: whether the same utterance may succeed when it is sent again, as it is.
    """

    exit_code: int = UNEXPECTED
    transient: bool = False


class InputError(ClientError):
    """Something that the caller handed over cannot be used."""

    exit_code = BAD_INPUT


class TokenError(InputError):
    """Speech tokens that cannot be read: wrong text, type, shape or range."""


class VoiceError(InputError):
    """A voice that does not have the fields, shapes or numbers that the model needs."""


class OutputError(InputError):
    """The output file cannot be created or written."""


class ServerUnavailable(ClientError):  # noqa: N818 - a state of the server, named as users speak of it
    """Nobody answers at the address, or the server went away in the middle of a call."""

    exit_code = UNAVAILABLE
    transient = True


class ModelNotReadyError(ServerUnavailable):
    """The server answers, but the model is missing, still loading, or failed to load; or it is shutting down."""

    exit_code = NOT_READY


class AccessError(ClientError):
    """TLS failed, or the server, or a proxy before it, wants another token or certificate."""

    exit_code = DENIED


class ServerError(ClientError):
    """The server refused or failed the utterance; the message is the server's."""

    exit_code = REFUSED


class TransientServerError(ServerError):
    """The server could not do it now, with nothing wrong about the utterance: it is full, shuts down, or restarts."""

    transient = True


class ProtocolError(ServerError):
    """The server answered with something that the protocol does not allow."""


class ResponseTimeoutError(ClientError):
    """The server owed an answer and gave none within the time-out."""

    exit_code = TIMED_OUT
    transient = True


class UtteranceClosedError(ClientError):
    """Tokens were pushed into an utterance that is already finished, cancelled or closed."""
