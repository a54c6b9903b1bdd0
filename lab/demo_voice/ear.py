"""Ear of the trainings: a small recogniser of phones, whose features define a perceptual loss.

A mean square error counts every bin of a mel alike, although some small differences turn one phone
into another, such as the burst of a stop. The features of the ear react to these differences. The
trainings of tokenizer, flow and vocoder minimise the distance of the features between a made mel
and the mel of the recording (Johnson et al., 2016). The model folder does not contain the ear.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from examples.demo_codec.codes import SLOPE, Unit
from lab.demo_voice.corpus import Utterances
from lab.demo_voice.phones import PHONES
from lab.demo_voice.tokenizer import WIDTH
from lab.demo_voice.training import Training, averaged_weights
from token2wav_server.demo.speaker import MEL_PER_TOKEN
from token2wav_voice.features import PROMPT_BANDS

_DILATIONS = (1, 2, 4, 1, 2, 4)
_FLOOR = -7.0  # lowest log-mel; quieter bins are inaudible
_LEAST_DEVIATION = 0.1
_BATCH = 16  # recordings
# Standard deviation of the noise that training adds to the normalised mel. Without the noise, the
# features react to inaudible differences.
_NOISE = 0.3


class Ear(nn.Module):
    """Recogniser of phones: convolutions over a mel of 50 frames a second."""

    average: torch.Tensor
    deviation: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.listen = nn.Conv1d(PROMPT_BANDS, WIDTH, 5, padding=2)
        self.units = nn.ModuleList(Unit(WIDTH, dilation) for dilation in _DILATIONS)
        self.write = nn.Conv1d(WIDTH, 1 + len(PHONES), 1)
        self.register_buffer("average", torch.zeros(PROMPT_BANDS, 1))
        self.register_buffer("deviation", torch.ones(PROMPT_BANDS, 1))

    def normalise(self, mel: torch.Tensor) -> torch.Tensor:
        """Scales the bands of a log-mel (B, 80, T) to mean 0 and deviation 1."""
        return (mel.clamp(min=_FLOOR) - self.average) / self.deviation

    def features(self, normalised: torch.Tensor) -> list[torch.Tensor]:
        """Computes features (B, 192, T) after every unit."""
        x, features = self.listen(normalised), []
        for unit in self.units:
            x = unit(x)
            features.append(F.leaky_relu(x, SLOPE))
        return features

    def forward(self, normalised: torch.Tensor) -> torch.Tensor:
        """Computes log-probabilities (B, T, 1 + phones). Class 0 is the blank of CTC."""
        return F.log_softmax(
            self.write(self.features(normalised)[-1]).float().transpose(1, 2), dim=2
        )

    def feature_distance(self, made: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
        """Computes the mean difference of the features of two log-mels (B, 80, T), relative to the
        spread of the recording's features.

        Only the made mel receives a gradient.
        """
        with torch.no_grad():
            targets = self.features(self.normalise(recorded))
        features = self.features(self.normalise(made))
        layers = [
            (feature.float() - target.float()).abs().mean()
            / (target.float() - target.float().mean()).abs().mean()
            for feature, target in zip(features, targets, strict=True)
        ]
        return torch.stack(layers).mean()


class EarTraining(Training):
    """Training of the ear by connectionist temporal classification (Graves et al., 2006).

    Args:
        corpus: recordings with their features and phones.
    """

    name = "ear"
    learning_rate = 2e-3
    full_rate_steps = 1000
    bfloat16 = True

    def __init__(self, corpus: Utterances) -> None:
        torch.manual_seed(0)
        self._ear = self.network = Ear()
        frames = torch.from_numpy(corpus.mel).float().clamp(min=_FLOOR)
        self._ear.average.copy_(frames.mean(dim=0)[:, None])
        self._ear.deviation.copy_(frames.std(dim=0).clamp(min=_LEAST_DEVIATION)[:, None])
        self._mels = torch.from_numpy(corpus.mel).split((MEL_PER_TOKEN * corpus.tokens).tolist())
        self._phones = np.split(corpus.phones, np.cumsum(corpus.phone_counts)[:-1])

    def losses(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        chosen = torch.randint(len(self._mels), (_BATCH,), generator=generator).tolist()
        mels = [self._mels[index].float() for index in chosen]
        phones = [torch.from_numpy(self._phones[index]).long() for index in chosen]
        mel = nn.utils.rnn.pad_sequence(mels, batch_first=True, padding_value=_FLOOR)
        normalised = self._ear.normalise(mel.transpose(1, 2))
        noise = _NOISE * torch.randn(normalised.shape, generator=generator)
        loss = F.ctc_loss(
            self._ear(normalised + noise).transpose(0, 1),
            torch.cat(phones),
            torch.tensor([len(mel) for mel in mels]),
            torch.tensor([len(row) for row in phones]),
            zero_infinity=True,
        )
        return {"loss": loss}


def trained_ear(folder: Path) -> Ear:
    """Loads the ear from the newest checkpoint in a folder, with frozen weights."""
    ear = Ear()
    ear.load_state_dict(averaged_weights(folder, EarTraining.name)[0])
    return ear.requires_grad_(False)
