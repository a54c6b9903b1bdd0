"""Lost phones: those of the sentence that a transcript replaces or omits, by class."""

from __future__ import annotations

import pytest

from lab.quality.quality_loss import Transcripts, as_table, lost_phones

SPOKEN = {
    "three": ["TH", "R", "IY"],
    "free": ["F", "R", "IY"],
    "mice": ["M", "AY", "S"],
    "my": ["M", "AY"],
}


@pytest.mark.parametrize(
    ("heard", "lost"),
    [
        ("three mice", {}),
        ("free mice", {"fricatives": 0.5}),
        ("three my", {"fricatives": 0.5}),
        ("mice", {"fricatives": 0.5, "liquids and glides": 1.0, "vowels": 0.5}),
        ("", {"fricatives": 1.0, "liquids and glides": 1.0, "nasals": 1.0, "vowels": 1.0}),
        ("three three mice", {}),  # nothing of the sentence is lost
    ],
)
def test_phones_that_a_transcript_replaces_or_omits(heard: str, lost: dict[str, float]) -> None:
    none = dict.fromkeys(("fricatives", "liquids and glides", "nasals", "vowels"), 0.0)
    assert lost_phones(["Three mice."], [heard], SPOKEN) == none | lost


def test_words_without_a_pronunciation_have_no_phones() -> None:
    assert lost_phones(["Xyzzy!"], ["three"], SPOKEN) == {}


def test_ratios_are_those_to_the_recordings() -> None:
    heard = {"recording": ["three my"] * 2, "streaming": ["free my"] * 2}
    scores = Transcripts(["Three mice."] * 2, heard).rows(SPOKEN)
    assert [row["wer"] for row in scores.values()] == [0.5, 1.0]
    assert scores["streaming"]["ratio"] == 2.0
    assert "| streaming | 1.000 | 2.00 (2.00 to 2.00) |" in as_table(scores)
