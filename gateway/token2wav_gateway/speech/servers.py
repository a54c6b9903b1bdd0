"""Servers behind the gateway: the language model, and the speech server; and the normaliser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from token2wav_client import AsyncClient, ClientError, ResponseTimeoutError, TransientServerError
from token2wav_gateway.errors import (
    BusyError,
    GatewayError,
    ModelBusyError,
    ModelError,
    ModelTimeoutError,
    RequestError,
)
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import Settings
from token2wav_gateway.speech.language_model import LanguageModel
from token2wav_gateway.speech.recent import Recent
from token2wav_gateway.speech.template import load_template
from token2wav_gateway.words.normaliser import Normaliser

# Seconds after which a server is asked again. It may then have another model.
_CHECK_S, _VOCABULARY_S = 1.0, 10.0


class Servers:
    """Connections to both servers, and the normaliser, which all turns share.

    Create it in the event loop that uses it.

    Attributes:
        limits: limits of every turn.
        normaliser: changes texts before they are spoken.
        works: raises ModelError if a server does not work.
        vocabulary: number of different tokens, or of the codes of each codebook, which bounds the
            tokens of the language model; () before the first answer of the speech server.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        server = settings.speech_server
        self.limits = settings.limits
        self.normaliser = Normaliser(settings.text, settings.limits.text_characters)
        self.metrics = metrics
        self.language_model = LanguageModel(
            settings.language_model,
            load_template(settings.language_model.template, settings.language_model.folder),
            settings.limits.speech_tokens,
        )
        self.client = AsyncClient(
            server.url,
            token=server.access_token(),
            tls=server.tls,
            response_timeout_s=server.response_timeout_s,
        )
        # A check synthesizes three tokens, and clients need no key for the readiness.
        self.works = Recent(self._check, _CHECK_S)
        self.vocabulary = Recent(self._ask_vocabulary, _VOCABULARY_S)
        self._known_vocabulary: tuple[int, ...] = ()
        self._speaking = 0

    async def close(self) -> None:
        await self.normaliser.close()
        await self.client.close()
        await self.language_model.close()

    async def _ask_vocabulary(self) -> tuple[int, ...]:
        """Returns the vocabulary of the speech server, or its last answer."""
        self._known_vocabulary = await self.client.vocabulary() or self._known_vocabulary
        return self._known_vocabulary

    async def _check(self) -> None:
        """Checks that both servers work."""
        await self.language_model.check()
        try:
            await self.client.health()
        except ClientError as error:
            raise speech_error(error) from None

    @property
    def full(self) -> bool:
        """Whether the next turn will be refused."""
        return self._speaking >= self.limits.streams

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Context manager in which a turn uses the servers.

        Raises:
            BusyError: too many turns use them.
        """
        if self.full:
            raise BusyError(
                f"gateway: {self.limits.streams} texts are being spoken; try again later"
            )
        self._speaking += 1
        self.metrics.speaking.set(self._speaking)
        try:
            yield
        finally:
            self._speaking -= 1
            self.metrics.speaking.set(self._speaking)


def speech_error(error: ClientError) -> GatewayError:
    """Converts an error of the speech server."""
    if error.field == "speed":  # of a codec
        return RequestError(str(error), param="speed")
    kind = ModelError
    if isinstance(error, ResponseTimeoutError):
        kind = ModelTimeoutError
    elif isinstance(error, TransientServerError):
        kind = ModelBusyError
    return kind(f"speech server: {error}")


def codes_error(error: ClientError) -> GatewayError:
    """Converts an error of the speech server, which may refuse the codes of a client."""
    if error.field == "tokens":
        return RequestError(f"codes: {error.problem}", param="codes")
    if error.field == "prompt_tokens" and error.problem.startswith("missing"):
        return RequestError("voice: missing; this model needs the name of a voice", param="voice")
    return speech_error(error)
