"""Entry point of a model of Triton's Python backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Model(Protocol):
    """Model that Triton calls with requests."""

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Takes requests. Returns their responses, unless the model sends responses later."""

    def close(self) -> None:
        """Ends the model."""


def entry_point(start: Callable[[dict[str, str]], Model]) -> type:
    """Returns the class that the file of a model offers to Triton under the name TritonPythonModel.

    Args:
        start: starts the model, with the arguments that Triton gives to `initialize`.
    """

    class TritonPythonModel:
        def initialize(self, args: dict[str, str]) -> None:
            self._model = start(args)

        def execute(self, requests: list[Any]) -> list[Any] | None:
            return self._model.execute(requests)

        def finalize(self) -> None:
            self._model.close()

    return TritonPythonModel
