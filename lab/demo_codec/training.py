"""Trainings of the demo codec: first the encoder, and then the decoder on the encoder's codes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from examples.demo_codec.codes import FEATURES, SLOPE, WIDTH, Encoder, Unit, features
from lab.demo_voice.corpus import Utterances
from lab.demo_voice.spectral_losses import SpectralLosses
from lab.demo_voice.tokenizer_training import audible, distance
from lab.demo_voice.training import Training
from token2wav.families.nanocodec import NanoCodecSizes
from token2wav.families.nanocodec.network import HalfSnake, NanoCodec
from token2wav.published.codec_config import CodecConfig
from token2wav_server.demo.speaker import MEL_PER_TOKEN, RATE_HZ, TOKEN_SAMPLES
from token2wav_voice.features import PROMPT_BANDS

_UNITS = 3  # of the network that draws


class Autoencoder(nn.Module):
    """Encoder, and a network that draws mel and pitch of its codes.

    The drawing network is used only to train the encoder, which is much faster than training it
    through the decoder's audio.

    Args:
        config: groups and levels of the codes.
    """

    def __init__(self, config: NanoCodecSizes) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        values = config.num_groups * len(config.num_levels_per_group)
        self.draw = nn.Sequential(
            nn.Conv1d(values, WIDTH, 3, padding=1),
            *(Unit(WIDTH) for _ in range(_UNITS)),
            nn.LeakyReLU(SLOPE),
            nn.Conv1d(WIDTH, MEL_PER_TOKEN * FEATURES, 1),
        )

    def forward(self, heard: torch.Tensor) -> torch.Tensor:
        """Encodes features (B, 82, 2 * N) and draws them again, in the same shape.

        The gradient passes through the rounding unchanged.
        """
        exact = self.encoder(heard)
        values = (exact + (exact.round() - exact).detach()) / self.encoder.middle
        return self.draw(values).unflatten(1, (FEATURES, MEL_PER_TOKEN)).transpose(2, 3).flatten(2)


class EncoderTraining(Training):
    """Training of the encoder as an autoencoder of mel and pitch.

    Args:
        config: groups and levels of the codes.
        corpus: recordings with their features.
    """

    name = "encoder"
    learning_rate = 2e-3
    full_rate_steps = 1000

    _BATCH, _LENGTH = 16, 60  # crops of a batch, and frames of codes of a crop
    _PITCH_WEIGHT = 0.3

    def __init__(self, config: NanoCodecSizes, corpus: Utterances) -> None:
        torch.manual_seed(0)
        self._mel, self._f0 = torch.from_numpy(corpus.mel), torch.from_numpy(corpus.f0)
        self.network = Autoencoder(config)

    def losses(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        frames = MEL_PER_TOKEN * min(self._LENGTH, len(self._mel) // 4)
        # Crops start at any frame, although codes start at every second frame.
        last = len(self._mel) - frames + 1
        starts = torch.randint(last, (self._BATCH,), generator=generator).tolist()
        mel = torch.stack([self._mel[at : at + frames] for at in starts]).float()
        f0 = torch.stack([self._f0[at : at + frames] for at in starts]).float()
        heard = features(mel, f0)
        error = (self.network(heard) - heard).transpose(1, 2)
        drawn = distance(3.0 * error[:, :, None, :PROMPT_BANDS] * audible(mel)[:, :, None])
        pitch = error[:, :, PROMPT_BANDS:].abs().mean()
        return {"drawn": drawn, "pitch": pitch, "loss": drawn + self._PITCH_WEIGHT * pitch}


class DecoderTraining(Training):
    """Training of the decoder with spectral losses between its audio and the recording.

    Args:
        config: sizes of the codec.
        corpus: recordings with their features.
    """

    name = "decoder"
    learning_rate = 1e-3
    full_rate_steps = 4000

    _BATCH = 4
    _FRAMES = 20  # frames of codes of a crop that are compared
    _LEAD_FRAMES = 6  # frames before them, for layers that read to the left

    def __init__(self, config: CodecConfig, corpus: Utterances, encoder: Encoder) -> None:
        torch.manual_seed(0)
        self._audio = torch.from_numpy(corpus.audio)
        self._codes = encode_corpus(encoder, corpus)
        self._compare = SpectralLosses(RATE_HZ)
        self.network = trainable(NanoCodec(config.sizes))

    def losses(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        whole = self._LEAD_FRAMES + self._FRAMES
        last = self._codes.shape[1] - whole + 1
        starts = torch.randint(last, (self._BATCH,), generator=generator).tolist()
        codes = torch.stack([self._codes[:, at : at + whole] for at in starts]).float()
        lead = self._LEAD_FRAMES * TOKEN_SAMPLES
        target = torch.stack(
            [self._audio[at * TOKEN_SAMPLES + lead : (at + whole) * TOKEN_SAMPLES] for at in starts]
        )
        losses = self._compare(self.network(codes)[:, 0, lead:], target.float() / 32768)
        return {**losses, "loss": torch.stack([*losses.values()]).sum()}


def encode_corpus(encoder: Encoder, corpus: Utterances) -> torch.Tensor:
    """Computes the codes (groups, N) of all recordings of a corpus."""
    lengths = (MEL_PER_TOKEN * corpus.tokens).tolist()
    mels = torch.from_numpy(corpus.mel).float().split(lengths)
    pitches = torch.from_numpy(corpus.f0).float().split(lengths)
    codes = [
        encoder.codes(features(mel[None], f0[None]))[0]
        for mel, f0 in zip(mels, pitches, strict=True)
    ]
    return torch.cat(codes, dim=1)


class _TrainedSnake(HalfSnake):
    """Half snake with the same parameter, for training: torch computes its gradient."""

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        snaked, leaky = x.chunk(2, dim=1)
        sine = torch.sin(snaked * self.alpha)
        return torch.cat((snaked + sine.square() / (self.alpha + 1e-9), F.leaky_relu(leaky)), 1)


def trainable(network: NanoCodec) -> NanoCodec:
    """Replaces the activations of a decoder, which compute in place, and returns the decoder."""
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if type(child) is HalfSnake:
                setattr(module, name, _TrainedSnake(2 * child.alpha.shape[1]))
    return network
