"""Entry point of `python -m token2wav_client`: runs the command `token2wav-client`."""

from __future__ import annotations

import sys

from token2wav_client.cli import main

sys.exit(main())
