"""Call of an utterance, over all attempts at it: makes requests, reads responses; no connection, clock or lock."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import numpy.typing as npt

from token2wav_client.audio import AudioChunk
from token2wav_client.errors import InputError, TokenError, UtteranceClosedError
from token2wav_client.protocol_state import Delivered, ProtocolState
from token2wav_client.tokens import TokenArray, as_tokens
from token2wav_client.wire import Opening, build_request, read_response


class Call:
    """Call of one utterance: makes its requests, reads the responses, and repeats both for another attempt.

    A further attempt sends the same tokens in the same portions, under an id of its own: the server may still hold
    the utterance of the earlier one.

    Args:
        model: name of the model.
        opening: content of the first request alone.
        repeatable: whether to keep tokens for further attempts.

    Attributes:
        id: sequence id of the utterance on the server; every attempt has another one.
        opening: as given.
        state: protocol state of the attempt that runs.
    """

    def __init__(self, model: str, opening: Opening, *, repeatable: bool) -> None:
        self.id = str(uuid4())
        self.opening = opening
        self._model = model
        self._repeatable = repeatable
        # Of one token: what a voice's prompt shows, else what comes first. Messages without tokens need it too.
        self._token_shape = () if isinstance(opening.voice, str) else opening.voice.prompt_tokens.shape[1:]
        self._said: list[tuple[TokenArray, bool]] = []
        self._delivered = Delivered()
        self.state = ProtocolState(opening.keep_open, self._delivered)
        self._interrupted = False

    @property
    def owed_since(self) -> float | None:
        """Time since which the server owes an answer and was silent; None while it owes none, or no attempt runs."""
        return None if self._interrupted else self.state.owed_since

    def request(self, values: npt.ArrayLike, now: float, *, end: bool) -> Any:
        """Make the next request.

        Args:
            values: tokens, integers, shape (tokens,).
            now: seconds on a clock that only runs forward.
            end: whether there are no more.

        Raises:
            TokenError: these are no tokens.
            UtteranceClosedError: the last request was made.
            InputError: the utterance would have no tokens at all.
        """
        tokens = as_tokens(values)
        if not len(tokens) and tokens.ndim == 1:
            tokens = tokens.reshape(0, *self._token_shape)
        elif self.state.tokens and len(tokens) and tokens.shape[1:] != self._token_shape:
            raise TokenError(f"tokens: shape {tokens.shape} after others of {self._token_shape} each")
        self._token_shape = tokens.shape[1:]
        if self.state.ended:
            raise UtteranceClosedError("the utterance is finished or cancelled and takes no more tokens")
        if end and not self.state.tokens + len(tokens):
            raise InputError("tokens: none, an utterance needs at least 1")
        if self._repeatable:
            self._said.append((tokens, end))
        return self._next(tokens, now, end)

    def accept(self, message: Any, now: float) -> AudioChunk | None:
        """Read a response; return the part of its audio that was not delivered before.

        Raises:
            ServerError, ProtocolError: as `read_response` and `ProtocolState.received` do.
        """
        return self.state.received(read_response(message, self.opening.audio_format), now)

    def interrupt(self) -> None:
        """Note that the attempt is over without its audio: the server owes nothing until `again`."""
        self._interrupted = True

    def again(self, now: float) -> list[Any]:
        """Begin another attempt; return all requests made so far, to be sent first."""
        self.id = str(uuid4())
        self.state = ProtocolState(self.opening.keep_open, self._delivered)
        self._interrupted = False
        return [self._next(tokens, now, end) for tokens, end in self._said]

    def _next(self, tokens: TokenArray, now: float, end: bool) -> Any:
        number = self.state.requests
        opening = self.opening if number == 0 else None
        request = build_request(self._model, self.id, str(number), tokens, opening=opening, end=end)
        self.state.sent(len(tokens), now, end=end)
        return request
