"""Triton's entry point of the one-process model: hands requests to the service and returns at once."""

from __future__ import annotations

from typing import Any

from token2wav_server.gate import Gate
from token2wav_server.service import Service


class TritonPythonModel:
    """A decoupled Python-backend model; answers are sent by the service's scheduler."""

    def initialize(self, args: dict[str, str]) -> None:
        self._gate = Gate()
        self._service = Service.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            if self._gate.admits(request):
                self._service.handle(request)

    def finalize(self) -> None:
        self._service.close()
