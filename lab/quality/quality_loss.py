"""Words that the demo voice and the demo codec lose, by part of the model and by class of sounds.

Every row replaces one more part of the way from a recording to streamed audio: the vocoder alone on
the mel of the recording, the flow on the tokens of the recording, more ODE steps, streams. Two
recognisers transcribe each row. A phone of the sentence is lost if an alignment with the phones of
the transcript replaces or omits it.

    pip install moonshine-voice==0.0.68
    .venv/bin/python -m lab.quality.quality_loss

That version has the weights of Moonshine's smallest English model in its wheel; later versions
download them. The recordings need `pip install -e '.[demo]'`. Prints a table for each list of
sentences and each recogniser; writes JSON. A run takes an hour.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
from tqdm import tqdm

from benchmarks.environment import describe, save
from examples.demo_codec.codes import MODEL as CODEC
from examples.demo_codec.encode import CodecEncoder
from examples.demo_voice.recordings import PROMPT
from examples.demo_voice.text import FURTHER, HELD_OUT, UNSEEN, held_out, normal
from lab.demo_voice.folder import MODEL
from lab.demo_voice.recordings import record
from lab.demo_voice.words import dictionary
from lab.quality.quality import (
    ORIGINAL,
    RECORDINGS,
    Sentence,
    Speak,
    codec_ways,
    provenance,
    ways,
)
from lab.quality.quality_scores import Listen, Moonshine, resampled
from lab.quality.recogniser import Recogniser, word_error_rate
from token2wav_voice import FrontEnd, Recording

_PARTS = 5  # first rows of `ways`: recording, vocoder, flow, flow with more steps, streams
CLASSES = {
    "vowels": "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW",
    "stops": "B D G K P T",
    "fricatives": "DH F HH S SH TH V Z ZH",
    "affricates": "CH JH",
    "nasals": "M N NG",
    "liquids and glides": "L R W Y",
}
_CLASS_OF = {phone: name for name, phones in CLASSES.items() for phone in phones.split()}

Pronunciations = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Transcripts:
    """Transcripts of a list of sentences by one recogniser.

    Attributes:
        texts: sentences.
        heard: transcripts of every row, by the name of the row.
    """

    texts: Sequence[str]
    heard: dict[str, list[str]]

    def rows(self, spoken: Pronunciations) -> dict[str, dict[str, Any]]:
        """Returns the scores of every row: word error rate, its ratio to that of the recordings
        with the interval of 95 %, and the share of lost phones of every class.
        """
        return {name: self._scores(name, spoken) for name in self.heard}

    def _scores(self, name: str, spoken: Pronunciations) -> dict[str, Any]:
        heard = self.heard[name]
        scores: dict[str, Any] = {
            "wer": round(word_error_rate(self.texts, heard), 4),
            "lost_phones": lost_phones(self.texts, heard, spoken),
        }
        if name != ORIGINAL:
            original = self.heard[ORIGINAL]
            least = word_error_rate(self.texts, original)
            scores["ratio"] = round(scores["wer"] / least, 3) if least else None
            scores["interval"] = resampled(self.texts, heard, original)["ratio"]
        return scores


def lost_phones(
    texts: Sequence[str], heard: Sequence[str], spoken: Pronunciations
) -> dict[str, float]:
    """Returns the share of the phones of each class that transcripts replace or omit.

    Words without a pronunciation have no phones.
    """
    phones, lost = Counter[str](), Counter[str]()
    for text, transcript in zip(texts, heard, strict=True):
        expected, received = (_phones(words, spoken) for words in (text, transcript))
        if not expected:
            continue
        kinds = [_CLASS_OF[phone] for phone in expected]
        phones.update(kinds)
        alignment = jiwer.process_words(" ".join(expected), " ".join(received))
        for part in alignment.alignments[0]:
            if part.type in ("substitute", "delete"):
                lost.update(kinds[part.ref_start_idx : part.ref_end_idx])
    return {name: round(lost[name] / count, 4) for name, count in sorted(phones.items())}


def _phones(words: str, spoken: Pronunciations) -> list[str]:
    return [phone for word in normal(words).split() for phone in spoken.get(word, ())]


def pronunciations(path: Path) -> dict[str, list[str]]:
    """Reads the first pronunciation of every word of a file of the CMU dictionary."""
    entries = (line.split() for line in path.read_text(encoding="utf-8").splitlines() if line)
    return {word: phones for word, *phones in entries}


def main() -> None:
    """Transcribes all rows of every list, prints the tables and writes the results."""
    parser = argparse.ArgumentParser(description="Measure where the demo loses words.")
    parser.add_argument("--model", type=Path, default=MODEL, help="model folder of a voice")
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[HELD_OUT, UNSEEN, FURTHER],
        help="text files with a sentence in each line (default: the three measured lists)",
    )
    parser.add_argument("--sentences", type=int, help="sentences of each list (default: all)")
    parser.add_argument("--name", default="quality_loss", help="name of the result file")
    options = parser.parse_args()

    front_end, encoder = FrontEnd(options.model), CodecEncoder(CODEC)
    prompt = front_end.voice(Recording.load(PROMPT))
    listeners: dict[str, Listen] = {"pocketsphinx": Recogniser(), "Moonshine tiny": Moonshine()}
    spoken = pronunciations(dictionary())
    lists: dict[str, Any] = {}
    for text in options.text:
        recordings = list(map(Recording.load, record(RECORDINGS, text)[: options.sentences]))
        texts = held_out(text)[: len(recordings)]
        heard = {name: Transcripts(texts, {}) for name in listeners}
        voice = _sentences(texts, recordings, front_end.tokens)
        codec = _sentences(texts, recordings, lambda recording: encoder(recording.samples))
        codec_rows = ((f"demo codec, {name}", way) for name, way in codec_ways(CODEC))
        for sentences, rows in (
            (voice, islice(ways(options.model, prompt), _PARTS)),
            (codec, islice(codec_rows, 2, None)),  # streams alone
        ):
            for name, speak in rows:
                transcripts = _transcribed(name, sentences, speak, listeners)
                for listener, words in transcripts.items():
                    heard[listener].heard[name] = words
        lists[text.name] = {name: row.rows(spoken) for name, row in heard.items()}
        save(
            options.name,
            {
                "environment": describe("jiwer", "pocketsphinx", "moonshine-voice"),
                "model": provenance(options.model),
                "lists": lists,
            },
        )
        for name, scores in lists[text.name].items():
            print(f"\n{text.name}, {len(texts)} sentences, {name}\n{as_table(scores)}", flush=True)


def _sentences(
    texts: Sequence[str], recordings: Sequence[Recording], encode: Callable[[Recording], Any]
) -> list[Sentence]:
    return [
        Sentence(text, recording.samples, encode(recording))
        for text, recording in zip(texts, recordings, strict=True)
    ]


def _transcribed(
    name: str, sentences: Sequence[Sentence], speak: Speak, listeners: Mapping[str, Listen]
) -> dict[str, list[str]]:
    """Returns the transcripts of a row by every recogniser."""
    transcripts: dict[str, list[str]] = {listener: [] for listener in listeners}
    for sentence in tqdm(sentences, desc=name, leave=False):
        audio = np.concatenate(speak(sentence))
        for listener, listen in listeners.items():
            transcripts[listener].append(listen(audio))
    return transcripts


def as_table(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the scores of a list as a Markdown table."""
    head = ["", "word error rate", "ratio to the recordings, 95 %", *CLASSES]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, row in scores.items():
        ratio = ""
        if row.get("ratio") is not None:
            low, high = row["interval"]
            ratio = f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"
        shares = [f"{row['lost_phones'].get(kind, 0):.1%}" for kind in CLASSES]
        lines.append(f"| {' | '.join([name, format(row['wer'], '.3f'), ratio, *shares])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
