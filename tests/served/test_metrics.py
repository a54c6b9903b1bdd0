"""Metrics of the server after a known load: names, labels and values, as Prometheus reads them."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pytest

from testkit.door import named
from testkit.models.golden import ROOT, TINY, GoldenSet
from testkit.patience import until
from testkit.rigs.metrics import labelled, page, values
from testkit.rigs.server_rig import Connection, Rig
from token2wav import Voice
from token2wav_client.audio import SAMPLES_PER_TOKEN

HELD_BACK = 4 * 480 + 4  # holdback of the vocoder in samples

# The player's buffer defines an underrun. The buffer is long, so that a busy machine alone causes
# no underrun.
SETTINGS = """
limits: {streams: 2, idle_seconds: 10, player_buffer_seconds: 2}
runtime: {cache_mib: 20}
"""
# float32, keys and values, layers, width, frames, steps, branches
PAGE_BYTES = 4 * 2 * 2 * 64 * 50 * 10 * 2
CAPACITY = 20 * 2**20 // PAGE_BYTES
# End and number of tokens of each stream, in the order of admission.
STREAMS = {
    1: ("finished", 150),
    2: ("finished", 150),
    3: ("finished", 60),
    4: ("finished", 60),
    5: ("finished", 28),
    6: ("InputError", 0),
    7: ("IdleError", 1),
    8: ("IdleError", 1),
    9: ("cancelled", 1),
}
LATE = 5
CHUNKS = 3 + 3 + 2 + 2 + 2
_LOG_LINE = re.compile(
    r' I?\S*\] "stream=(?P<stream>\d+) reason=(?P<reason>\w+) '
    r"tokens=(?P<tokens>\d+) audio_s=(?P<audio_s>\d+\.\d\d)"
    r" first_audio_s=(?P<first_audio_s>\d+\.\d+|None) "
    r"first_sound_s=(?P<first_sound_s>\d+\.\d+|None)"
    r" real_time_factor=(?P<real_time_factor>\d+\.\d{3})"
    r' underruns=(?P<underruns>\d+)"$'
)


@dataclass(frozen=True)
class Seen:
    """Metrics and log of the load.

    Attributes:
        text: text of the metrics port after the load.
        after: its values.
        during: values of the metrics port while one stream was open.
        ends: fields of each stream's line in the log.
    """

    text: str
    during: dict[str, float]
    ends: list[dict[str, str]]

    @cached_property
    def after(self) -> dict[str, float]:
        return values(self.text)

    def value(self, metric: str) -> float:
        """Returns the value of a metric; `metric` is its name followed by its labels."""
        return self.after[f"token2wav_{metric}"]

    def by_label(self, family: str) -> dict[str, float]:
        """Returns all values of a family with one label, by the value of the label."""
        return labelled(self.after, f"token2wav_{family}")

    def logged(self, field: str) -> dict[int, float]:
        """Returns a number from the log for each stream that has the number."""
        return {int(end["stream"]): float(end[field]) for end in self.ends if end[field] != "None"}


@pytest.fixture(scope="module")
def seen(golden: GoldenSet, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Runs the load on a separate server without other clients."""
    folder = tmp_path_factory.mktemp("metrics")
    with Rig.start(TINY, folder, SETTINGS) as rig:
        with rig.connect() as connection:
            speak(connection, golden)
            be_late(connection, golden)
            be_refused(connection, golden)
        with rig.connect() as connection:
            connection.send([1], golden.voice, "leaves", start=True, parameters={"keep_open": True})
            until(lambda: rig.open_streams() == {"scheduler": 1, "engine": 1})
            during = rig.metrics()
        rig.wait_until_empty()
        text = page(rig.server.metrics_url)
    lines = (folder / "triton.log").read_text().splitlines()
    return Seen(
        text, during, [match.groupdict() for line in lines if (match := _LOG_LINE.search(line))]
    )


def speak(connection: Connection, golden: GoldenSet) -> None:
    tokens, voice = golden.tokens, golden.voice
    for speaker in (voice, named(voice.content_hash)):  # chunks of 45, 50 and 55 tokens
        connection.send(tokens[:150], speaker, "whole", start=True, end=True)
        assert len(connection.answers().chunks) == 3
    for sequence in ("one", "other"):
        connection.send(tokens[:60], voice, sequence, start=True, end=True)  # 45 and 15
    assert len(connection.answers(requests=2).chunks) == 4


def be_late(connection: Connection, golden: GoldenSet) -> None:
    """Lets the player of a stream run dry.

    The player has 25 tokens of audio less the holdback, 0.92 s, and 2 s of buffer.
    """
    speaker = Voice([], np.zeros((0, 80)), golden.voice.speaker_embedding)
    connection.send(golden.tokens[:28], speaker, "late", start=True)
    assert len(connection.answers().chunks) == 1
    time.sleep(3.2)
    connection.send([], None, "late", end=True)
    assert len(connection.answers().audio) == 3 * SAMPLES_PER_TOKEN + HELD_BACK


def be_refused(connection: Connection, golden: GoldenSet) -> None:
    """Sends requests that the server rejects for tokens, sequence, voice and number of streams.

    Two streams wait until the server drops them.
    """
    connection.send([], golden.voice, "out of vocabulary", start=True)
    # without this wait, the message could fail together with the next one
    assert not connection.answers().errors
    connection.send([-1], None, "out of vocabulary")
    connection.send([1], None, "nobody")
    connection.send([1], named("0" * 64), "unknown voice", start=True)
    assert len(connection.answers(requests=3).errors) == 3
    for sequence in ("first", "second", "third"):
        connection.send([1], golden.voice, sequence, start=True, parameters={"keep_open": True})
    errors = connection.answers(requests=3).errors
    assert sorted(error.partition(":")[0] for error in errors) == ["stream", "stream", "streams"]


def test_all_metric_families_are_exported_and_documented(seen: Seen) -> None:
    source = (ROOT / "server" / "token2wav_server" / "metrics.py").read_text()
    names = set(re.findall(r'"token2wav_(\w+)"', source))
    assert len(names) > 10
    for line in (r"TYPE token2wav_(\w+) \w", r"HELP token2wav_(\w+) [A-Z]"):
        assert set(re.findall(f"^# {line}", seen.text, re.MULTILINE)) == names
    assert names <= set(re.findall(r"`token2wav_(\w+)`", (ROOT / "docs/deployment.md").read_text()))


def test_values_while_a_stream_is_open(seen: Seen) -> None:
    """One block of the prompt of 30 tokens is shared; a stream reserves three pages to open."""
    open_streams = labelled(seen.during, "token2wav_open_streams")
    assert open_streams == {"scheduler": 1, "engine": 1}
    pages = {"capacity": CAPACITY, "used": 4, "shared": 1, "idle": 0}
    assert labelled(seen.during, "token2wav_cache_pages") == pages


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("open_streams", {"scheduler": 0, "engine": 0}),
        ("cache_pages", {"capacity": CAPACITY, "used": 1, "shared": 1, "idle": 1}),
        # New voices: two of the load, and one of the probe before the server is ready.
        ("voice_prompts_total", {"hit": len(STREAMS) - 2, "miss": 3}),
        ("streams_ended_total", Counter(reason for reason, _ in STREAMS.values())),
        ("refused_total", {"tokens": 1, "sequence_id": 1, "voice_id": 1, "streams": 1}),
    ],
)
def test_values_after_the_load(seen: Seen, family: str, values: dict[str, float]) -> None:
    assert seen.by_label(family) == values


def test_cached_bytes_and_audio_seconds_are_exact(seen: Seen) -> None:
    assert seen.value("cache_used_bytes") == PAGE_BYTES
    spoken = sum(tokens for reason, tokens in STREAMS.values() if reason == "finished")
    assert seen.value("audio_seconds_total") == pytest.approx(spoken / 25, abs=1e-9)


def test_batches_and_stages(seen: Seen) -> None:
    """Two streams may share a batch, but need not."""
    batches = seen.value("batch_streams_count")
    alone, at_most_two = (seen.value(f'batch_streams_bucket{{le="{most}.0"}}') for most in (1, 2))
    assert seen.value("batch_streams_sum") == CHUNKS
    assert CHUNKS - 2 <= alone + (batches - alone) <= CHUNKS
    assert alone + 2 * (batches - alone) == CHUNKS
    assert at_most_two == seen.value('batch_streams_bucket{le="+Inf"}') == batches
    assert seen.by_label("chunk_seconds_count") == {
        "wait": CHUNKS,
        "flow": batches,
        "vocoder": batches,
    }
    assert all(seconds > 0 for seconds in seen.by_label("chunk_seconds_sum").values())


def test_first_audio_and_real_time_factor(seen: Seen) -> None:
    """One value for each stream that sent audio, equal to the value in the log."""
    finished = {stream for stream, (reason, _) in STREAMS.items() if reason == "finished"}
    for family, field in (
        ("first_audio_seconds", "first_audio_s"),
        ("first_sound_seconds", "first_sound_s"),
        ("real_time_factor", "real_time_factor"),
    ):
        logged = {
            stream: number for stream, number in seen.logged(field).items() if stream in finished
        }
        assert logged.keys() == finished
        assert min(logged.values()) > 0
        assert seen.value(f"{family}_count") == len(finished)
        assert seen.value(f"{family}_sum") == pytest.approx(
            sum(logged.values()), abs=0.0005 * len(finished) + 1e-6
        )
    audio, sound = seen.logged("first_audio_s"), seen.logged("first_sound_s")
    # audio of the tiny model is loud from its first sample
    assert all(0 <= sound[stream] - audio[stream] < 0.1 for stream in audio)


def test_underruns(seen: Seen) -> None:
    logged = seen.logged("underruns")
    assert logged[LATE] == 1
    assert seen.value("underruns_total") == sum(logged.values())


def test_every_stream_has_a_line_in_the_log(seen: Seen) -> None:
    ends = {int(end["stream"]): end for end in seen.ends}
    assert len(seen.ends) == len(ends)
    assert {stream: (end["reason"], int(end["tokens"])) for stream, end in ends.items()} == STREAMS
    for stream, (reason, tokens) in STREAMS.items():
        heard = reason == "finished"
        assert float(ends[stream]["audio_s"]) == pytest.approx(
            tokens / 25 if heard else 0.0, abs=0.005
        )
        assert (ends[stream]["first_audio_s"] != "None") == heard
