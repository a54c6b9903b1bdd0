from __future__ import annotations

import sys

from token2wav_export.cli import main

sys.exit(main())
