"""Errors of the hub's client, each as one sentence."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from token2wav.errors import ConfigError, one_line

# Errors of the client for an answer of another form. RecursionError is a RuntimeError, which its
# library for storage also raises.
_NO_ANSWER = ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError
TRIES = 5  # connections without a new byte, before a file or a range is given up


class HubError(ConfigError):
    """A model cannot be pulled. The message names the model, the reason and a remedy."""


def is_unreachable(error: BaseException) -> bool:
    """Returns whether an error says that the connection failed, not that the hub refused."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return True
    transport = HfHubHTTPError.__bases__[0]  # the error of the HTTP library that the client uses
    return isinstance(error, transport) and not isinstance(error, HfHubHTTPError)


@contextmanager
def as_sentences(name: str) -> Iterator[None]:
    """Turns the errors of the client into a HubError of one sentence."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    transport: Any = HfHubHTTPError.__bases__[0]  # the error of the HTTP library
    try:
        yield
    except HubError:
        raise
    except GatedRepoError as error:
        raise HubError(
            f"{name}: gated; ask for access at {hub}/{name.partition('@')[0]}, then set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise HubError(f"{name}: the model has no such revision") from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"{name}: no such folder here, and no such model on {hub}, or a private one: then set "
            "HF_TOKEN"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        reasons = {
            401: "the token was refused; correct HF_TOKEN, or unset it for a public model",
            403: "the token gives no access to this model; use another in HF_TOKEN",
            429: "too many requests; wait some minutes, or set HF_TOKEN for a higher limit",
        }
        reason = reasons.get(status, f"the hub answered with status {status}; try again later")
        raise HubError(f"{name}: {hub}: {reason}") from error
    except HFValidationError as error:
        raise HubError(
            f"{name}: no such folder here, and no name of a model; expected org/name with at most "
            "96 letters, digits, '-', '_' and '.', none of the marks doubled, first or last"
        ) from error
    except (OSError, transport) as error:
        if is_unreachable(error):
            reason = (
                f"HF_HUB_OFFLINE forbids to ask {hub}; unset it"
                if constants.HF_HUB_OFFLINE
                else f"{hub} cannot be reached"
            )
            raise HubError(
                f"{name}: not pulled yet, and {reason}; pull the model where there is a network, "
                "or name a folder"
            ) from error
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(constants.HF_HOME).free
            raise HubError(
                f"{name}: the disk is full ({shown_size(free)} free); make room, or set HF_HOME to "
                "another disk"
            ) from error
        raise HubError(f"{name}: cannot be pulled: {one_line(error)[:200]}") from error


@contextmanager
def reading_answer(name: str) -> Iterator[None]:
    """Turns the errors of reading an answer of another form into a HubError.

    A hub can send any JSON. Only calls of its client belong in this context, because outside it the
    same errors are faults of this project.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except HFValidationError:  # a ValueError with a sentence of its own
        raise
    except _NO_ANSWER as error:
        raise HubError(
            f"{name}: the answer of {constants.ENDPOINT} cannot be used "
            f"({type(error).__name__}: {one_line(error)[:200]}); try again, or use another hub in "
            "HF_ENDPOINT"
        ) from error


def shown_size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
