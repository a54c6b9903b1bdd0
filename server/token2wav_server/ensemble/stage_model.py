"""Adapter of the stages `flow` and `vocoder` to Triton: it reads requests and runs them in batches.

Runs inside Triton's Python backend only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic

from token2wav.config import LimitConfig
from token2wav.errors import EngineError, Token2WavError
from token2wav_server.ensemble.ordered_stage import Content, OrderedStage, Part, Result, Stage, State, Ticker
from token2wav_server.metrics import batch_streams, open_streams
from token2wav_server.protocol import TritonReply

log = logging.getLogger(__name__)


class StageModel(Generic[Content, State, Result]):
    """Model of Triton that runs what the dynamic batcher has put together.

    Args:
        name: name of the model.
        stage: computes the chunks.
        read: turns a request into a part.
        limits: bounds of the server.
    """

    def __init__(
        self,
        name: str,
        stage: Stage[Content, State, Result],
        read: Callable[[Any], Part[Content, Result]],
        limits: LimitConfig,
    ) -> None:
        self._read = read
        self._ordered: OrderedStage[Content, State, Result] = OrderedStage(
            stage,
            limits.idle_seconds,
            limits.batch_streams,
            changed=open_streams(name),
            computed=batch_streams(name),
        )
        self._ticker = Ticker(self._ordered.expire, limits.idle_seconds)

    def execute(self, requests: list[Any]) -> None:
        self._ordered.run([part for request in requests if (part := self._part(request)) is not None])

    def close(self) -> None:
        self._ticker.stop()

    def _part(self, request: Any) -> Part[Content, Result] | None:
        """Reads a request, or refuses it and returns None.

        Only somebody who calls a stage directly can send what cannot be read; it must not harm the batch.
        """
        try:
            return self._read(request)
        except Token2WavError as error:
            TritonReply(request).fail(error)
        except Exception as error:
            log.exception("a request could not be read")
            TritonReply(request).fail(EngineError(f"stage: {type(error).__name__}: {error}"))
        return None
