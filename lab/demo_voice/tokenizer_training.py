"""Training of the tokenizer as an autoencoder: a decoder computes mels from its tokens.

The decoder begins with the layers that precede the estimator of the flow: an embedding and the
look-ahead. The flow therefore starts with an embedding that carries the content of the tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from examples.demo_codec.codes import SLOPE, Unit
from lab.demo_voice.corpus import LISTENED_PER_TOKEN, Utterances
from lab.demo_voice.ear import Ear
from lab.demo_voice.tokenizer import DIGITS, HIGHEST, WIDTH, Tokenizer, all_digits
from lab.demo_voice.training import Training, crops
from token2wav.families.cosyvoice3 import FlowConfig
from token2wav.layers.lookahead import PreLookahead
from token2wav_server.demo.speaker import MEL_PER_TOKEN

_BATCH, _LENGTH = 16, 100  # crops of a batch, and tokens of a crop
_UNITS = 3
# Smallest deviation of a mel band. The highest bands are silent in speech made at 22.05 kHz.
_LEAST_DEVIATION = 0.1
_MEAN_WEIGHT = 0.5
# Vowels and consonants differ in the envelope of the spectrum, a mean over neighbouring bands.
_ENVELOPE_BANDS, _ENVELOPE_WEIGHT = 5, 2.0
_EAR_WEIGHT = 2.0
_QUIET = -6.5  # log-mel with half of the weight; no digits are spent on noise between words


class Autoencoder(nn.Module):
    """Autoencoder of a tokenizer and a decoder, which computes mels from tokens.

    Args:
        config: configuration of the flow. The decoder has the same sizes.
    """

    average: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        bands = config.input_size
        self.tokenizer = Tokenizer()
        self.embed = nn.Sequential(
            nn.Linear(DIGITS, WIDTH), nn.LeakyReLU(SLOPE), nn.Linear(WIDTH, bands)
        )
        self.pre_lookahead = PreLookahead(
            bands, config.pre_lookahead_channels, config.pre_lookahead_len, config.lookbehind_len
        )
        self.draw = nn.Sequential(
            nn.Conv1d(bands, WIDTH, 3, padding=1),
            *(Unit(WIDTH) for _ in range(_UNITS)),
            nn.LeakyReLU(SLOPE),
            nn.Conv1d(WIDTH, MEL_PER_TOKEN * bands, 1),
        )
        self.register_buffer("average", torch.zeros(bands))
        self.register_buffer("deviation", torch.ones(bands))

    def decode(self, digits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Decodes rounded digits (B, 4, n).

        Returns:
            mu (B, n, 80), which is the input of the estimator, and the mel (B, n, 2, 80).
        """
        mu = self.pre_lookahead(self.embed(digits.transpose(1, 2) / HIGHEST))
        frames = self.draw(mu.transpose(1, 2)).transpose(1, 2).unflatten(2, (MEL_PER_TOKEN, -1))
        return mu, self.mel(frames)

    def mel(self, normal: torch.Tensor) -> torch.Tensor:
        """Scales normalised bands (mean 0, deviation 1) back to log-mel (..., 80)."""
        return normal * self.deviation + self.average

    @torch.no_grad()
    def expected(self, tokens: torch.Tensor) -> torch.Tensor:
        """Computes the mel (N, 80) of tokens (N,) from embedding and look-ahead alone."""
        return self.mel(self.pre_lookahead(self.embedding()[tokens][None])[0])

    @torch.no_grad()
    def drawn(self, tokens: torch.Tensor) -> torch.Tensor:
        """Computes the mel (2 * N, 80) of tokens (N,) with the whole decoder."""
        _, mel = self.decode(all_digits()[:, tokens][None])
        return mel[0].flatten(0, 1)

    @torch.no_grad()
    def embedding(self) -> torch.Tensor:
        """Computes the embeddings (6561, 80) of all tokens."""
        return self.embed(all_digits().T / HIGHEST)


class TokenizerTraining(Training):
    """Training of the autoencoder on crops of a corpus.

    Args:
        config: sizes of the flow.
        corpus: recordings with their features.
        ear: trained ear.
    """

    name = "tokenizer"
    learning_rate = 2e-3
    full_rate_steps = 1000
    bfloat16 = True

    def __init__(self, config: FlowConfig, corpus: Utterances, ear: Ear) -> None:
        torch.manual_seed(0)
        self._ear = ear
        self._mel = torch.from_numpy(corpus.mel)
        self._heard = torch.from_numpy(corpus.heard).unflatten(
            0, (-1, LISTENED_PER_TOKEN // MEL_PER_TOKEN)
        )
        self._network = self.network = Autoencoder(config)
        frames = self._mel.float()
        self._network.average.copy_(frames.mean(dim=0))
        self._network.deviation.copy_(frames.std(dim=0).clamp(min=_LEAST_DEVIATION))

    def losses(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        network, frames = self._network, MEL_PER_TOKEN * min(_LENGTH, len(self._mel) // 4)
        # Crops start at any frame, although tokens start at every second frame. This doubles the
        # number of alignments to learn from.
        starts = torch.randint(len(self._mel) - frames + 1, (_BATCH,), generator=generator)
        heard = crops(self._heard, starts, frames)
        mel = crops(self._mel, starts, frames).unflatten(1, (-1, MEL_PER_TOKEN))
        exact = network.tokenizer(heard.flatten(1, 2).transpose(1, 2))
        # The gradient passes through the rounding unchanged.
        mu, decoded_mel = network.decode(exact + (exact.round() - exact).detach())
        drawn = distance((decoded_mel - mel) * audible(mel))
        pairs = mel.mean(dim=2)
        mean = distance((network.mel(mu) - pairs) * audible(pairs))
        ear_loss = self._ear.feature_distance(bands_first(decoded_mel), bands_first(mel))
        return {
            "drawn": drawn,
            "mean": mean,
            "ear": ear_loss,
            "loss": drawn + _MEAN_WEIGHT * mean + _EAR_WEIGHT * ear_loss,
        }


def bands_first(mel: torch.Tensor) -> torch.Tensor:
    """Turns a mel in pairs of frames (B, n, 2, 80) into one of bands (B, 80, 2 * n)."""
    return mel.flatten(1, 2).transpose(1, 2)


def audible(mel: torch.Tensor) -> torch.Tensor:
    """Returns the audibility of each bin of a log-mel, from 0 to 1."""
    return torch.sigmoid(mel - _QUIET)


def distance(error: torch.Tensor) -> torch.Tensor:
    """Returns the mean square of an error (..., 80), plus a weighted one of its envelope."""
    envelope = F.avg_pool1d(error.flatten(1, -2), _ENVELOPE_BANDS, stride=1)
    return error.square().mean() + _ENVELOPE_WEIGHT * envelope.square().mean()
