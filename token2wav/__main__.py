"""Entry point of `python -m token2wav`: runs the command `token2wav`."""

from __future__ import annotations

import sys

from token2wav.commands import main

sys.exit(main())
