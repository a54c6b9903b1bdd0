"""Lets `python -m token2wav_client` do what `token2wav-client` does."""

from __future__ import annotations

import sys

from token2wav_client.cli import main

sys.exit(main())
