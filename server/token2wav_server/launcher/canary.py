"""Canary of a server: it notices a model process that hangs, which lives on while Triton says that it is ready."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from token2wav_server.launcher.access import Certificates

MODELS = ("token2wav", "token2wav_ensemble")
_TRIES = 2


class Canary:
    """Canary that speaks three tokens when it is asked to, to any of ``MODELS`` in a repository, and counts failures.

    It needs the client library, which is imported here and not above, so that the launcher starts without it and fast.

    Attributes:
        interval_s: seconds between utterances, and the time that one may take.
        why_none: reason why nothing can be tried; empty if it can.
        failures: number of tries in a row that failed.
    """

    def __init__(self, interval_s: float, model_repository: Path, certificates: Certificates | None = None) -> None:
        self.interval_s = interval_s
        self.failures = 0
        found = [model for model in MODELS if (model_repository / model).is_dir()]
        self._model = (found or MODELS)[0]
        self.why_none = "" if found else f"there is no model {' or '.join(MODELS)}"
        try:
            import token2wav_client  # noqa: F401

            self._tls = certificates.for_canary() if certificates else None
        except ImportError as error:
            self.why_none = f"the client library is not installed ({error})"

    def failure(self, grpc_url: str) -> str:
        """Tries once, and returns the problem if this was the second failure in a row or a later one, else ''."""
        from token2wav_client import Client, ClientError

        patience_s = self.interval_s
        try:
            with Client(
                grpc_url, model=self._model, connect_timeout_s=patience_s, response_timeout_s=patience_s, tls=self._tls
            ) as client:
                client.health(timeout_s=patience_s)
        except ClientError as error:
            self.failures += 1
            return str(error) if self.failures >= _TRIES else ""
        self.failures = 0
        return ""
