"""Computes one first chunk between the marks of a profiler.

python3 -m benchmarks.gpu.first_chunk FOLDER DEVICE
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.chunk_batch import spoken
from benchmarks.gpu.settings import Settings
from token2wav import Token2Wav

_CACHE_MIB = 1024


def main(folder: Path, device: str) -> None:
    # Nsight Compute saves the memory of the GPU before each kernel, so the cache is small.
    runtime = Settings(device=device, cache_mib=_CACHE_MIB).runtime()
    model = Token2Wav.load(folder, runtime=runtime)
    for profiled in (False, True):  # the first run warms up
        with spoken(model, 1, 0, 25) as batch:
            if profiled:
                torch.cuda.profiler.start()
            batch.advance(25)
            if profiled:
                torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
