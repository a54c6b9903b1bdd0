"""How far from the public implementation a float32 result may be, and why.

The golden tensors are float32 themselves; another CPU sums in another order. The mel of one and the
same network differs by 2e-5 between float32 and float64, so that is the bound of everything up to
the mel; every error worth the name is far above it (rotary positions on all heads 0.8, a linear
time grid 1.1, no guidance 1.5). The vocoder is compared from the golden mel, because F0 integrates
into phase: a mel that is off by 2e-6 moves single samples by 0.06.
"""

from __future__ import annotations

ESTIMATOR = 4e-5  # one evaluation; measured 2.6e-5 on an H200, which sums in another order
MEL = 2e-5  # ten evaluations with guidance; the float32 noise floor
AUDIO = 1e-4  # from the golden mel; measured 3e-5 at most
SNR_DB = 40.0  # audio end to end
