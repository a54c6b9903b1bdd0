"""Front end of the demo voice: it is trained once, and then computes the tokens of the corpus.

The trainings of the flow and the vocoder use these tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soxr
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from lab.demo_voice import speaker
from lab.demo_voice.corpus import Utterances
from lab.demo_voice.tokenizer_training import Autoencoder
from token2wav.families.cosyvoice3 import FlowConfig
from token2wav_server.demo.speaker import RATE_HZ, TOKEN_SAMPLES
from token2wav_voice.features import SPEAKER_RATE_HZ, speaker_features
from token2wav_voice.onnx_models import SPEAKER_FILE, TOKENIZER_FILE, SpeakerEncoder

_STATE = "tokenizer.safetensors"
_SPEAKERS = 64  # recordings whose speaker embeddings are used in training
_SHORTEST_S = 1.0


@dataclass(frozen=True, eq=False)
class Heard:
    """Tokens and speaker embeddings of a corpus, for training.

    Attributes:
        tokens: tokens (N,) of all recordings.
        speakers: speaker embeddings (n, 192) of some recordings.
        network: autoencoder that made the tokens, and that computes mels from tokens.
    """

    tokens: NDArray[np.int32]
    speakers: NDArray[np.float32]
    network: Autoencoder


def exists(folder: Path) -> bool:
    """Returns whether a folder has a front end.

    A front end is never made twice, because a flow works only with the tokenizer that it was
    trained with.
    """
    return (folder / _STATE).exists()


def save(folder: Path, config: FlowConfig, weights: dict[str, torch.Tensor]) -> None:
    """Writes both ONNX files, and the weights of the autoencoder.

    Weights of the tokenizer are rounded to float16, the precision of its ONNX file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    network = Autoencoder(config)
    network.load_state_dict(weights)
    network.tokenizer.half().float()  # so that training uses the same tokens as the graph
    network.tokenizer.save(folder / TOKENIZER_FILE)
    speaker.save(folder / SPEAKER_FILE)
    save_file(network.state_dict(), folder / _STATE)


def hear(folder: Path, config: FlowConfig, corpus: Utterances) -> Heard:
    """Computes tokens and embeddings of a corpus."""
    network = Autoencoder(config)
    network.load_state_dict(load_file(folder / _STATE))
    return Heard(network.tokenizer.tokens(corpus), _speakers(folder, corpus), network)


def _speakers(folder: Path, corpus: Utterances) -> NDArray[np.float32]:
    encoder = SpeakerEncoder(folder)
    long = np.flatnonzero(corpus.tokens * TOKEN_SAMPLES >= _SHORTEST_S * RATE_HZ)
    embeddings = []
    for index in long[:: max(1, len(long) // _SPEAKERS)]:
        start = corpus.starts[index] * TOKEN_SAMPLES
        recording = corpus.audio[start : start + corpus.tokens[index] * TOKEN_SAMPLES] / 32768
        signal = np.asarray(
            soxr.resample(recording, RATE_HZ, SPEAKER_RATE_HZ, quality="VHQ"), np.float32
        )
        embeddings.append(encoder(speaker_features(signal)))
    return np.stack(embeddings)
