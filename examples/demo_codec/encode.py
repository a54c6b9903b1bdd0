"""Encoder of recordings: it writes the codes of a recording for the demo codec.

python -m examples.demo_codec.encode --wav recording.wav --out codes.npy
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from examples.demo_codec.codes import ENCODER_FILE, MODEL, Encoder, features
from examples.demo_voice.pitch import pitch
from token2wav.families.nanocodec import read
from token2wav_server.demo.speaker import HOP, RATE_HZ, TOKEN_SAMPLES
from token2wav_voice.features import prompt_mel
from token2wav_voice.recording import Recording


def main() -> None:
    parser = argparse.ArgumentParser(description="Turn a recording into codes of the demo codec.")
    parser.add_argument("--wav", type=Path, required=True, metavar="FILE", help="recording")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="file to write (.npy, int32 (frames, codebooks))",
    )
    options = parser.parse_args()
    codes = CodecEncoder(MODEL)(Recording.load(options.wav).at(RATE_HZ))
    np.save(options.out, codes)
    print(f"encode: {options.out}: {len(codes)} frames of {codes.shape[1]} codes")


class CodecEncoder:
    """Encoder of the demo codec, read from its model folder."""

    def __init__(self, folder: Path) -> None:
        self._encoder = Encoder(read(folder).sizes)
        weights = load_file(folder / ENCODER_FILE)
        self._encoder.load_state_dict({name: value.float() for name, value in weights.items()})

    def __call__(self, signal: NDArray[np.float32]) -> NDArray[np.int32]:
        """Computes the codes (N, codebooks) of a recording at 24 kHz; a rest of a frame is cut."""
        whole = signal[: len(signal) // TOKEN_SAMPLES * TOKEN_SAMPLES]
        mel = torch.from_numpy(prompt_mel(whole))
        f0 = torch.from_numpy(pitch(whole, RATE_HZ, HOP))
        codes = self._encoder.codes(features(mel[None], f0[None]))[0]
        return codes.T.contiguous().numpy().astype(np.int32)


if __name__ == "__main__":
    main()
