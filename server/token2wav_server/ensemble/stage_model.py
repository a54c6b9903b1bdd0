"""Triton's side of the stages `flow` and `vocoder`. Runs inside Triton's Python backend only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic

from token2wav.config import LimitConfig
from token2wav.errors import EngineError, Token2WavError
from token2wav_server.ensemble.metrics import BatchStreams, OpenStreams
from token2wav_server.ensemble.ordered_stage import (
    Content,
    OrderedStage,
    Part,
    Result,
    State,
    Work,
)
from token2wav_server.ensemble.ticker import Ticker
from token2wav_server.protocol import TritonReply

log = logging.getLogger(__name__)


class StageModel(Generic[Content, State, Result]):
    """Runs what Triton's dynamic batcher has put together.

    Args:
        name: of the model.
        work: what it computes.
        read: makes a part of a request.
        limits: of the server.
    """

    def __init__(
        self,
        name: str,
        work: Work[Content, State, Result],
        read: Callable[[Any], Part[Content, Result]],
        limits: LimitConfig,
    ) -> None:
        self._read = read
        self._stage: OrderedStage[Content, State, Result] = OrderedStage(
            work,
            limits.idle_seconds,
            limits.batch_streams,
            changed=OpenStreams(name).set,
            computed=BatchStreams(name).observe,
        )
        self._ticker = Ticker(self._stage.expire, limits.idle_seconds)

    def execute(self, requests: list[Any]) -> None:
        self._stage.run([part for request in requests if (part := self._part(request)) is not None])

    def close(self) -> None:
        self._ticker.stop()

    def _part(self, request: Any) -> Part[Content, Result] | None:
        """Only somebody who calls a stage directly can send what cannot be read; it must not harm the batch."""
        try:
            return self._read(request)
        except Token2WavError as error:
            TritonReply(request).fail(error)
        except Exception as error:
            log.exception("a request could not be read")
            TritonReply(request).fail(EngineError(f"stage: {type(error).__name__}: {error}"))
        return None
