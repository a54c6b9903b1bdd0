"""Entry point of the model `token2wav`, which Triton calls with requests.

It passes the requests to the engine, a process of its own with the model, and returns at once.
"""

from __future__ import annotations

from typing import Any

from token2wav_server.front.python_front import PythonFront


class TritonPythonModel:
    """Decoupled model of Triton's Python backend; threads of the front send the responses."""

    def initialize(self, args: dict[str, str]) -> None:
        self._front = PythonFront(args["model_instance_name"])

    def execute(self, requests: list[Any]) -> None:
        self._front.execute(requests)

    def finalize(self) -> None:
        self._front.close()
