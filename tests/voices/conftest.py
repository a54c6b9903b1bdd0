"""Fixtures that these tests share: files of samples, and a model folder with the public graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from tests.voices import graphs
from tests.voices.material import WriteWav


@pytest.fixture
def write_wav(tmp_path: Path) -> WriteWav:
    """Writes samples, (n,) or (n, channels), into a file."""

    def write(
        samples: NDArray[np.floating], rate: int, name: str = "ref.wav", subtype: str = "FLOAT"
    ) -> Path:
        path = tmp_path / name
        soundfile.write(path, samples, rate, subtype=subtype)
        return path

    return write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with nothing but the two ONNX files."""
    path = tmp_path / "model"
    path.mkdir()
    graphs.save(graphs.tokenizer(), path / graphs.TOKENIZER)
    graphs.save(graphs.speaker(), path / graphs.SPEAKER)
    return path
