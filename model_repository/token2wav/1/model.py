"""Entry point of the one-process model, which Triton calls with requests.

It passes the requests to the service and returns at once.
"""

from __future__ import annotations

from typing import Any

from token2wav_server.triton_service import TritonService


class TritonPythonModel:
    """Decoupled model of Triton's Python backend; the workers of the service send the responses."""

    def initialize(self, args: dict[str, str]) -> None:
        self._service = TritonService.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._service.handle(request)

    def finalize(self) -> None:
        self._service.close()
