"""Step-Audio2 as stages."""

from __future__ import annotations

from token2wav.families.cosyvoice2.build import CosyVoice2Builder
from token2wav.families.stepaudio2.flow import stepaudio2_flow


class StepAudio2Builder(CosyVoice2Builder):
    """Builder of a Step-Audio2 model."""

    make_flow = staticmethod(stepaudio2_flow)


build, load = StepAudio2Builder.build, StepAudio2Builder.load
check, choose, networks = StepAudio2Builder.check, StepAudio2Builder.choose, StepAudio2Builder.networks
