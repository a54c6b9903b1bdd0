from __future__ import annotations

import subprocess
import sys

from token2wav_server.model_process import DEVICE_LOST_STATUS


def test_ends_itself_when_its_gpu_is_lost() -> None:
    code = "import time; from token2wav_server.model_process import end_process; end_process(); time.sleep(600)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == DEVICE_LOST_STATUS
