"""Training of the vocoder with spectral losses between its audio and the recording."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from lab.demo_voice.corpus import Utterances
from lab.demo_voice.ear import Ear
from lab.demo_voice.spectral_losses import SpectralLosses
from lab.demo_voice.training import Training, crops
from lab.demo_voice.vocoder_start import start_as_vocoder
from token2wav.networks.hift import HiFT
from token2wav.published.sizes import HiFTConfig

_BATCH = 4
_FRAMES = 32  # frames of a crop that are compared
_LEAD_FRAMES = 10  # frames before them, for layers that read to the left
_F0_SCALE_HZ = 100.0
_EAR_WEIGHT = 2.0


class VocoderTraining(Training):
    """Training of the vocoder on crops of recordings, each followed by its look-ahead frames.

    Args:
        config: sizes of the vocoder.
        corpus: recordings with their features.
        ear: trained ear.
        flow_mels: mels (frames, 80) that a flow made of the first recordings. Half of the crops are
            from these mels, so that the vocoder learns to correct errors of the flow.
    """

    name = "hift"
    learning_rate = 1e-3

    def __init__(
        self,
        config: HiFTConfig,
        corpus: Utterances,
        ear: Ear,
        flow_mels: NDArray[np.float16] | None = None,
    ) -> None:
        torch.manual_seed(0)
        self._ear = ear
        self._config = config
        self._mel = torch.from_numpy(corpus.mel)
        self._f0 = torch.from_numpy(corpus.f0)
        self._audio = torch.from_numpy(corpus.audio)
        self._flow_mels = None if flow_mels is None else torch.from_numpy(flow_mels)
        self._compare = SpectralLosses(config.sampling_rate)
        self._hift = self.network = HiFT(config)
        start_as_vocoder(self._hift, self._mel.float().mean(dim=0))
        self._match_level()

    def losses(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        audio, target, f0_loss = self._batch(generator)
        losses = self._compare(audio, target)
        # `log_mel` has twice the frames of the model; the odd ones have the same middles
        made, recorded = (self._compare.log_mel(signal)[..., 1::2] for signal in (audio, target))
        losses["ear"] = _EAR_WEIGHT * self._ear.feature_distance(made, recorded)
        losses["f0"] = f0_loss
        return {**losses, "loss": torch.stack([*losses.values()]).sum()}

    def _batch(self, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Runs the vocoder on random crops.

        Returns:
            Audio of the vocoder (B, N), audio of the recordings (B, N), and the loss of F0.
        """
        hift, hop = self._hift, self._config.samples_per_frame
        made = _LEAD_FRAMES + _FRAMES
        whole = made + hift.lookahead_frames
        mels = [self._mel] * _BATCH
        if self._flow_mels is not None:
            mels[: _BATCH // 2] = [self._flow_mels] * (_BATCH // 2)
        starts = torch.cat(
            [torch.randint(len(source) - whole, (1,), generator=rng) for source in mels]
        )
        mel = torch.cat(
            [crops(source, at, whole) for source, at in zip(mels, starts.split(1), strict=True)]
        )
        mel = mel.transpose(1, 2)
        f0 = crops(self._f0, starts, whole)
        first, last = _LEAD_FRAMES * hop, made * hop
        target = crops(self._audio, starts * hop + first, last - first) / 32768

        f0_loss = F.smooth_l1_loss(
            hift.f0_predictor(mel)[:, :made] / _F0_SCALE_HZ, f0[:, :made] / _F0_SCALE_HZ
        )
        uniform = torch.rand(f0.shape[1] * hop, self._config.nb_harmonics + 1, generator=rng)
        source = hift.m_source(f0, hift.m_source.merged(uniform))
        audio = hift.decode(mel, source)[:, first:last]
        return audio, target, f0_loss

    @torch.no_grad()
    def _match_level(self) -> None:
        """Sets the level of the first output to the level of the recordings."""
        audio, target, _ = self._batch(torch.Generator().manual_seed(0))
        louder = (self._compare.log_mel(target) - self._compare.log_mel(audio)).mean()
        dict(self._hift.named_parameters())["conv_post.bias"][: self._config.n_fft // 2 + 1] += (
            louder
        )
