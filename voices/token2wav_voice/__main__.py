"""Entry point of `python -m token2wav_voice`, which does what `token2wav-voice` does."""

from __future__ import annotations

import sys

from token2wav_voice.cli import main

sys.exit(main())
