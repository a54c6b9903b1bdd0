"""Entry point of a model of Triton's Python backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def entry_point(start: Callable[[dict[str, str]], Any]) -> type:
    """Returns the class that the file of a model offers to Triton under the name TritonPythonModel.

    Args:
        start: starts the model, with the arguments that Triton gives to `initialize`. The model has
            the methods `execute`, which takes requests, and `close`. A model that is not decoupled
            returns the responses.
    """

    class TritonPythonModel:
        def initialize(self, args: dict[str, str]) -> None:
            self._model = start(args)

        def execute(self, requests: list[Any]) -> list[Any] | None:
            return self._model.execute(requests)

        def finalize(self) -> None:
            self._model.close()

    return TritonPythonModel
