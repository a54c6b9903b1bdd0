"""Settings of the servers under test, and the front that TEST_FRONT chooses for all of them."""

from __future__ import annotations

import os

FRONT = os.environ.get("TEST_FRONT", "auto")


def comparable(settings: str) -> str:
    """Returns settings with the chosen front, and with whole blocks unless they describe streams.

    With early audio, samples depend on how the tokens arrive, so they could not be compared.
    """
    whole_blocks = "" if "stream:" in settings else "stream: {first_tokens: 0}\n"
    front = "" if "server:" in settings else f"server: {{front: {FRONT}}}\n"
    return f"{whole_blocks}{front}{settings}"
