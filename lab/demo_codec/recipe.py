"""Recipe of the demo codec, which runs all stages.

    python -m lab.demo_codec.recipe --data DIR --budget 120

DIR is the data folder of the demo voice's recipe, or a new folder. If you stop the command, run it
again: it continues from the last checkpoints.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from examples.demo_codec.codes import MODEL, Encoder
from lab.demo_codec.export import TEMPLATE, export
from lab.demo_codec.training import Autoencoder, DecoderTraining, EncoderTraining
from lab.demo_voice import corpus
from lab.demo_voice.folder import CORPUS, TRAINING
from lab.demo_voice.loss_plot import plot_losses
from lab.demo_voice.recipe import positive_minutes
from lab.demo_voice.training import averaged_weights, train, trained_steps
from token2wav.families.nanocodec import NanoCodecSizes, read

_SENTENCES, _ENCODER_STEPS = 2400, 2000
_SMALL_SENTENCES, _SMALL_STEPS = 8, 20
_FOLDER = "codec"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Create the demo codec, from synthetic recordings to a model folder."
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="folder for intermediate results"
    )
    parser.add_argument(
        "--budget",
        type=_budget,
        required=True,
        help="training time of the decoder in minutes, or 'small' for a try of a minute",
    )
    parser.add_argument(
        "--out", type=Path, default=MODEL, metavar="DIR", help="model folder (default: the demo's)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    options = parser.parse_args()
    minutes: float | None = options.budget
    os.nice(19)
    torch.set_num_threads(options.threads)
    sentences = _SMALL_SENTENCES if minutes is None else _SENTENCES
    corpus.grow(options.data / CORPUS, sentences, options.threads)
    recordings = corpus.read(options.data / CORPUS)
    config, folder = read(TEMPLATE), options.data / TRAINING / _FOLDER
    encoder = _trained_encoder(
        config.sizes,
        recordings,
        folder,
        _SMALL_STEPS if minutes is None else _ENCODER_STEPS,
    )
    train(
        DecoderTraining(config, recordings, encoder),
        folder,
        minutes=float("inf") if minutes is None else minutes,
        steps=_SMALL_STEPS if minutes is None else None,
    )
    plot_losses(folder)
    export(folder, options.out)
    print(f"recipe: {options.out}")


def _budget(text: str) -> float | None:
    return None if text == "small" else positive_minutes(text)


def _trained_encoder(
    config: NanoCodecSizes, recordings: corpus.Utterances, folder: Path, steps: int
) -> Encoder:
    """Trains the encoder, unless the folder has one that was trained long enough.

    The encoder is never trained on, because the decoder works only with the codes that it was
    trained with.
    """
    missing = steps - trained_steps(folder, EncoderTraining.name)
    if missing > 0:
        train(EncoderTraining(config, recordings), folder, minutes=float("inf"), steps=missing)
    weights, _ = averaged_weights(folder, EncoderTraining.name)
    autoencoder = Autoencoder(config)
    autoencoder.load_state_dict(weights)
    return autoencoder.encoder


if __name__ == "__main__":
    main()
