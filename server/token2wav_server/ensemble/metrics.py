"""What the stages tell, on Triton's own metrics port. Runs inside Triton's Python backend only."""

from __future__ import annotations

from token2wav.errors import Token2WavError
from token2wav_server.metric_family import Family

_STREAMS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]


class OpenStreams:
    """The gauge of streams that a stage holds something for.

    Args:
        holder: `flow`, `vocoder`, or `scheduler` for the accumulator, which admits streams as the scheduler of the
            one-process model does.
    """

    def __init__(self, holder: str) -> None:
        self._family = Family("open_streams", "Utterances that are open, by who holds something for them", "GAUGE")
        self._holder = holder
        self.set(0)

    def set(self, count: int) -> None:
        self._family(holder=self._holder).set(count)


class BatchStreams:
    """The histogram of how many streams a stage computed together.

    Args:
        model: name of the stage.
    """

    def __init__(self, model: str) -> None:
        self._family = Family("batch_streams", "Chunks that were computed together", "HISTOGRAM", _STREAMS)
        self._model = model
        self._family(model=model)  # shows from the start

    def observe(self, count: int) -> None:
        self._family(model=self._model).observe(count)


class Refused:
    """The counter of requests that the accumulator answered with an error."""

    def __init__(self) -> None:
        self._family = Family("refused", "Requests that were refused, by what was wrong with them", "COUNTER")

    def count(self, error: Token2WavError) -> None:
        """Messages begin with the field or limit."""
        self._family(what=str(error).partition(":")[0][:40]).increment(1)
