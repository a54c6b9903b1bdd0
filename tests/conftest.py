from __future__ import annotations

import os

# Before torch is imported, and inherited by servers that tests start: threads of several processes on few cores wait
# for one another far longer than the small models of these tests take, and sums are only equal with equal threads.
os.environ["OMP_NUM_THREADS"] = "1"
