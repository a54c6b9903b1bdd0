"""Types of numbers in model files. Their bounds are far above any published model, and low enough
that arithmetic with them is safe.
"""

from __future__ import annotations

from typing import Annotated

from token2wav.config.settings import MOST_STEPS
from token2wav.config.values import Bounds, Length
from token2wav.published.relations import Below, Even, Odd

PAIRS = "rotary positions need pairs"  # reason why the channels of a head are even
Width = Annotated[int, Bounds(1, 1 << 16)]  # channels, features, mel bands
HeadWidth = Annotated[Width, Even(PAIRS)]  # channels of a head with rotary positions
Layers = Annotated[int, Bounds(1, 256)]
Heads = Annotated[int, Bounds(1, 256)]
Vocabulary = Annotated[int, Bounds(1, 1 << 20)]
Tokens = Annotated[int, Bounds(1, 1000)]  # tokens of a block or of a look-ahead
Frames = Annotated[int, Bounds(1, 4000)]  # frames of a block
Ratio = Annotated[int, Bounds(1, 64)]  # mel frames per token
TokenRate = Annotated[float, Bounds(0.01, 1000)]  # tokens per second
CodeRate = Annotated[float, Bounds(0.01, 10_000)]  # frames of codes or latents per second
SampleRate = Annotated[int, Bounds(1, 768_000)]
Rate = Annotated[int, Bounds(1, 4096)]  # factor of upsampling
Kernel = Annotated[int, Bounds(1, 4096)]
CodebookCount = Annotated[int, Bounds(1, 64)]
CodebookSize = Annotated[int, Bounds(1, 1 << 20)]
LONGEST_DILATION = 64  # the memory of a stream grows with it, and the weights do not
Dilation = Annotated[int, Bounds(1, LONGEST_DILATION)]
Stages = Length(16)  # stages of a vocoder, or parts of a stage
Rates = Annotated[tuple[Rate, ...], Stages]
Kernels = Annotated[tuple[Kernel, ...], Stages]
Dilations = Annotated[tuple[Annotated[tuple[Dilation, ...], Stages], ...], Stages]
OptionalWidth = Annotated[int | None, Bounds(1, 1 << 16)]  # None: other sizes give it
SomeRates = Annotated[tuple[Rate, ...], Length(16, least=1)]
SomeKernels = Annotated[tuple[Kernel, ...], Length(16, least=1)]
OddKernel = Annotated[Kernel, Odd("only odd kernels keep the length")]
BlockDilations = Annotated[tuple[Dilation, ...], Length(16, least=1)]  # of a residual block
SomeDilations = Annotated[tuple[BlockDilations, ...], Stages]
Levels = Annotated[tuple[Annotated[int, Bounds(2, 4096)], ...], Length(16, least=1)]  # of codes
Window = Annotated[int, Bounds(2, 1 << 16)]  # positions that a position attends to
Epsilon = Annotated[float, Bounds(1e-12, 1)]  # added in a norm
RopeBase = Annotated[float, Bounds(1, 1e9)]  # of rotary positions
# samples of a window of an inverse STFT, and from a window to the next one
FftSize = Annotated[int, Bounds(4, 8192), Even("a window has halves")]
SmallFftSize = Annotated[FftSize, Bounds(4, 4096)]  # a transform has tables of its square
HopSize = Annotated[Rate, Even("a hop has halves"), Below("n_fft")]
FrameSamples = Annotated[int, Bounds(1, 1 << 20)]
Guidance = Annotated[float, Bounds(0, 100)]
Level = Annotated[float, Bounds(1e-9, 1e6)]  # level of a signal
Times = Annotated[tuple[Annotated[float, Bounds(0, 1)], ...], Length(MOST_STEPS + 1)]
