"""Stages of a model that a test puts together by hand."""

from __future__ import annotations

from typing import Any

from token2wav.stages.stage import Stages, StageSummary


def two_stages(flow: Any, vocoder: Any, summary: StageSummary | None = None) -> Stages:
    return Stages(
        {"flow": flow, "vocoder": vocoder}, summary or StageSummary("torch", "float32", "cpu")
    )
