"""Features of a recording: three kinds of log-mel, each computed as in the training of its model.

The filters come from kaldi-native-fbank. Spectra are computed in float64; the features are float32.
"""

from __future__ import annotations

from functools import cache

import kaldi_native_fbank as knf
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

TOKENIZER_RATE_HZ, TOKENIZER_BANDS = 16_000, 128
SPEAKER_RATE_HZ, SPEAKER_BANDS = 16_000, 80
PROMPT_RATE_HZ, PROMPT_BANDS = 24_000, 80

Features = NDArray[np.float32]


def tokenizer_features(signal: NDArray[np.float32]) -> Features:
    """Computes Whisper's log-mel (128, n // 160) at 100 frames a second.

    Args:
        signal: (n,) at 16 kHz, more than 200 samples.
    """
    n_fft, hop = 400, 160
    padded = np.pad(signal, n_fft // 2, mode="reflect")
    power = _power(padded, n_fft, hop)[:-1]  # Whisper drops the frame centred on the end
    mel = slaney_filters(TOKENIZER_RATE_HZ, n_fft, TOKENIZER_BANDS) @ power.T
    log_mel = np.log10(np.maximum(mel, 1e-10))
    log_mel = np.maximum(log_mel, log_mel.max() - 8.0)
    return ((log_mel + 4.0) / 4.0).astype(np.float32)


def prompt_mel(signal: NDArray[np.float32], top_hz: int = PROMPT_RATE_HZ // 2) -> Features:
    """Computes the prompt mel (n // 480, 80) in natural logarithms, 50 frames a second.

    The flow continues this mel.

    Args:
        signal: (n,) at 24 kHz, more than 720 samples.
        top_hz: upper end of the highest band.
    """
    n_fft, hop = 1920, 480
    padded = np.pad(signal, (n_fft - hop) // 2, mode="reflect")
    magnitude = np.sqrt(_power(padded, n_fft, hop) + 1e-9)
    mel = magnitude @ slaney_filters(PROMPT_RATE_HZ, n_fft, PROMPT_BANDS, top_hz).T
    return np.log(np.maximum(mel, 1e-5)).astype(np.float32)


def speaker_features(signal: NDArray[np.float32]) -> Features:
    """Computes Kaldi's filter bank (1 + (n - 400) // 160, 80) without dither and with zero mean.

    The mean over time is subtracted.

    Args:
        signal: (n,) at 16 kHz within -1 to 1, at least 400 samples. As in the public code, it is
            not scaled to 16 bits.
    """
    options = knf.FbankOptions()
    options.frame_opts.samp_freq = SPEAKER_RATE_HZ
    options.frame_opts.dither = 0.0
    options.mel_opts.num_bins = SPEAKER_BANDS
    bank = knf.OnlineFbank(options)
    bank.accept_waveform(SPEAKER_RATE_HZ, signal.tolist())
    bank.input_finished()
    frames = np.stack([bank.get_frame(index) for index in range(bank.num_frames_ready)])
    return np.asarray(frames - frames.mean(axis=0), np.float32)


def _power(padded: NDArray[np.float32], n_fft: int, hop: int) -> NDArray[np.float64]:
    """Computes the power spectrum (frames, n_fft // 2 + 1) under periodic Hann windows."""
    frames = sliding_window_view(padded.astype(np.float64), n_fft)[::hop]
    window = np.hanning(n_fft + 1)[:-1]
    return np.square(np.abs(np.fft.rfft(frames * window)))


@cache
def slaney_filters(rate_hz: int, n_fft: int, bands: int, top_hz: int = 0) -> NDArray[np.float64]:
    """Returns mel filters (bands, n_fft // 2 + 1) of equal area, as librosa does.

    Args:
        n_fft: length of the Fourier transform in samples.
        top_hz: upper end of the highest band; 0 is half the sample rate.
    """
    frame = knf.FrameExtractionOptions()
    frame.samp_freq = rate_hz
    frame.frame_length_ms = 1000 * n_fft / rate_hz
    frame.round_to_power_of_two = False
    mel = knf.MelBanksOptions()
    mel.num_bins = bands
    mel.low_freq, mel.high_freq = 0.0, float(top_hz)
    mel.is_librosa = True
    return np.asarray(knf.MelBanks(mel, frame).get_matrix(), np.float64)
