"""Entry point of text to speech with the interface of CosyVoice's Triton recipe, which Triton calls
with requests.
"""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils  # noqa: F401 - before NumPy, because it selects the version

from token2wav_gateway.doors.recipe import RecipeService


class TritonPythonModel:
    """Model of Triton's Python backend."""

    def initialize(self, args: dict[str, str]) -> None:
        self._service = RecipeService.start(args["model_config"])

    def execute(self, requests: list[Any]) -> list[Any] | None:
        return self._service.handle(requests)

    def finalize(self) -> None:
        self._service.close()
