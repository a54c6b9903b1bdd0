"""Tokens of several codes: embedding tables, and the hash of a flow without them.
`tests/families/test_streams.py` tests their streams.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from testkit.models.codebook_model import (
    CODEBOOKS,
    VOCABULARY,
    some_codes,
    write_model,
)
from testkit.models.golden import TINY
from token2wav import StreamConfig
from token2wav.assembly import check_folder, load_network
from token2wav.config import config_hash
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.published.artifacts import fingerprint

CODES = some_codes(75)


@pytest.fixture(scope="module", params=["sum", "concat"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / request.param, request.param)


def test_the_embedding_is_that_of_separate_tables(folder: Path) -> None:
    config = CosyVoice3Config.read(folder)
    assert config.hops(StreamConfig()) == (12, 48)
    check_folder(folder)
    flow = load_network(folder, config, "flow")
    tables = flow.input_embedding.weight.split(VOCABULARY)
    assert len(tables) == CODEBOOKS
    codes = torch.from_numpy(CODES).long()
    embeddings = [F.embedding(codes[:, book], table) for book, table in enumerate(tables)]
    expected = (
        torch.cat(embeddings, dim=1)
        if folder.name == "concat"
        else torch.stack(embeddings).sum(dim=0)
    )
    assert expected.shape == (len(CODES), 80)
    assert float((flow.input_embedding(torch.from_numpy(CODES)) - expected).abs().max()) <= 1e-6
    # The layers after the embedding are the same as for tokens with one code.
    assert flow.pre_lookahead_layer is not None
    hidden = flow.pre_lookahead_layer(expected[None])[0]
    mu = flow.mu(torch.from_numpy(CODES)[None])[0]
    assert float((mu - hidden.repeat_interleave(4, dim=0).T).abs().max()) <= 1e-6


def test_exports_without_codebooks_stay_usable() -> None:
    """Configurations without codebooks keep the hash that they had before the feature existed."""
    flow = CosyVoice3Config.read(TINY).flow
    assert flow.codebooks is None
    assert fingerprint(TINY, "flow").startswith(config_hash(flow))
    assert config_hash(flow) == "d01a060dbc11"
