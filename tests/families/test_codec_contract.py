"""Contract of codecs: the properties that every codec of `testkit/models/codec_models.py` has.

The files of each codec test what is special to it. `lab/tests/test_launches.py` bounds the
launches of all codecs.

Each model runs on two engines. "Own lengths" is the engine of a CPU, which runs each chunk in one
piece, and changes states in place. "Prepared lengths" runs as a GPU does: chunks are made up of
pieces of prepared shapes, the states of up to 4 streams are copied into the rows of a batch, and
all convolutions that a GPU computes as products are products.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike

from testkit.batches import spoken_together
from testkit.models.codec_models import CODECS, drawn_tokens
from testkit.models.family_golden import FamilyGolden
from testkit.models.folders import golden_of, write_folder
from testkit.models.tiny_model import one_line
from testkit.utterances import Audio, Tokens, a_voice, chunks_of, joined, off, portions
from tests.families.tolerances import PARITY
from token2wav import InputError, RuntimeConfig, StreamConfig, Token2Wav
from token2wav.config.model_config import ModelConfig
from token2wav.layers import convolutions
from token2wav.layers.streaming import state_specs
from token2wav.published.registry import read_config
from token2wav.stages.stage import FrameChunk, as_frames
from token2wav.stages.waveform import PieceInput, WaveformStage, likely_pieces
from token2wav.voice import voice_for

MOST_TOKENS_OF_A_HOP = 20
EXACT = StreamConfig(lookahead_frames=0)  # early audio depends on how tokens are portioned
Shapes = set[tuple[bool, bool, int]]  # first, inside and frames of pieces


@dataclass(frozen=True, eq=False)
class Subject:
    """Codec under test.

    Attributes:
        golden: inputs and outputs of the public code.
        model: the codec in the library.
        prepared: shapes of the pieces that the engine has prepared; empty for its own lengths.
        ran: shapes of the pieces that have run.
    """

    golden: FamilyGolden
    model: Token2Wav
    prepared: Shapes
    ran: Shapes

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def decoder(self) -> Any:
        [decoder] = self.model.pipeline.stages.values()
        return decoder

    @property
    def sends_at_once(self) -> bool:
        """Whether the audio of a token needs no later token."""
        return not (self.decoder._net.lookahead_frames or self.config.lookahead_tokens)

    @property
    def field(self) -> str:
        """Name of the tokens in messages."""
        return self.config.tokens.field

    def whole(self, tokens: Tokens) -> Audio:
        """Returns the audio of an utterance that is computed in one call, without any state."""
        audio: Audio = self.decoder.whole(as_frames(self.config.tokens.checked(tokens))).numpy()
        channels = self.config.channels
        return audio.reshape(-1, channels) if channels > 1 else audio

    def assert_equal(self, audio: Audio, tokens: Tokens) -> None:
        """Asserts that audio equals that of the whole utterance."""
        whole = self.whole(tokens)
        assert off(audio, whole) <= PARITY * whole.std(), len(tokens)

    def together(self, utterances: list[Tokens], stagger: int = 0) -> list[Audio]:
        """Returns the audio of utterances that share their batches."""
        nobody = voice_for(self.config, None)
        checked = [(nobody, self.config.tokens.checked(tokens), 0) for tokens in utterances]
        return spoken_together(self.model.pipeline, checked, stagger)


def watch(model: Token2Wav, settings: StreamConfig, streams: int) -> tuple[Shapes, Shapes]:
    """Replaces the engine of a model by one of prepared shapes.

    Returns:
        The prepared shapes, and a set to which the shapes of all pieces are added that run.
    """
    config: Any = model.config
    [decoder] = model.pipeline.stages.values()
    network = decoder._net  # type: ignore[attr-defined]
    shapes = likely_pieces(network, config, config.hops(settings), streams)
    held = config.withheld_frames(settings)
    engine = WaveformStage(network, shapes=shapes, lookahead_frames=held)
    assert not engine.store._in_place
    model.pipeline.stages = {"decoder": engine}
    buckets = set(engine._pieces._buckets)
    run, ran = engine._pieces.run, Shapes()

    def recorded(items: list[PieceInput]) -> list[torch.Tensor]:
        ran.update((item.shape.first, item.shape.inside, item.shape.frames) for item in items)
        return run(items)

    engine._pieces.run = recorded  # type: ignore[method-assign,assignment]
    return {(shape.first, shape.inside, shape.frames) for shape in buckets}, ran


@pytest.fixture(
    scope="module",
    params=[
        (name, size, engine)
        for name, codec in CODECS.items()
        for size in codec.sizes
        for engine in ("own lengths", "prepared lengths")
        if (size, engine) == ("tiny", "own lengths")
        or engine == ("own lengths" if codec.windows else "prepared lengths")
    ],
    ids="-".join,
)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    name, size, engine = request.param
    folder, golden = write_folder(name, tmp_path_factory.mktemp(name), size), golden_of(name, size)
    model = Token2Wav.load(folder, stream=EXACT, runtime=RuntimeConfig(device="cpu"))
    shapes = watch(model, EXACT, 4) if engine == "prepared lengths" else (Shapes(), Shapes())
    return Subject(golden, model, *shapes)


@pytest.fixture
def codec(loaded: Subject, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    """The codec. After each test, no stream is open, and all pieces had prepared shapes."""
    if loaded.prepared:
        monkeypatch.setattr(convolutions, "_always_multiplies", lambda *_: True)
    yield loaded
    assert loaded.model.pipeline.open_streams == 0
    if not CODECS[loaded.golden.family].windows:  # which keep no states
        assert loaded.decoder.store.used == 0
    # A stream that ends with its first piece may have any length.
    assert {shape for shape in loaded.ran if shape[:2] != (True, False)} <= loaded.prepared


def test_the_public_audio(codec: Subject) -> None:
    golden, config = codec.golden, codec.config
    assert config.tokens.are_latents == ("latents" in golden.tensors)
    assert config.tokens.fewer_codebooks == ("audio_of_fewer" in golden.tensors)
    tokens = golden["latents" if config.tokens.are_latents else "codes"].numpy()
    names = {"audio": tokens}
    if config.tokens.fewer_codebooks:
        # Some of the golden audio ends earlier. It may lack samples at its start.
        count = -(-len(golden["audio_of_fewer"]) // config.samples_per_token)
        names["audio_of_fewer"] = tokens[:count, :-1]
    for name, used in names.items():
        expected = golden[name].numpy()
        assert expected.std() > 0.05, "too quiet to show a fault: change the random weights"
        for audio in (codec.model.synthesize(used), codec.whole(used)):
            assert audio.shape == expected.shape
            assert off(audio, expected) <= PARITY * expected.std(), name
    names_of_outputs = ("out_sample_rate", "output_sample_rate", "output_sampling_rate")
    keys = (*names_of_outputs, "sampling_rate", "sample_rate")
    rates = [golden.sizes[key] for key in keys if key in golden.sizes]
    assert config.sample_rate == (rates or [24000])[0]


RANDOM = np.random.default_rng(0).integers(0, 30, 20).tolist()


@pytest.mark.parametrize("sizes", [[1], [2, 3, 1], [41, 30], RANDOM], ids=str)
def test_a_stream_is_the_whole_in_any_portions(codec: Subject, sizes: list[int]) -> None:
    """The counts leave all blocks and an incomplete one. Random portions may be empty."""
    config, tokens = codec.config, drawn_tokens(codec.config, 71)
    chunks = chunks_of(codec.model, portions(tokens, sizes))
    assert len(chunks) > 1 or codec.config.block_tokens > len(tokens)
    codec.assert_equal(joined(chunks), tokens)
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].samples_trimmed == config.missing_samples
    samples = config.samples_per_token * len(tokens) - config.missing_samples
    assert len(joined(chunks)) == samples
    heard = [chunk for chunk in chunks if len(chunk.audio)]
    assert heard[0].first_token == 0
    if sizes == [1] and codec.sends_at_once:
        assert heard[0].token_count == 1
    assert heard[-1].first_token + heard[-1].token_count == len(tokens)


@pytest.mark.parametrize(
    ("counts", "stagger"),
    [
        ((71, 40, 9, 1, 50), 0),
        ((71, 40, 9, 1, 50), 1),
        ((*range(1, 13), *range(25, 29)), 0),
    ],
    ids=["at once", "one after the other", "any length"],
)
def test_a_batch_equals_each_stream_alone(
    codec: Subject, counts: tuple[int, ...], stagger: int
) -> None:
    """The streams end at different times, in all places of a window of attention, and before and
    after the look-ahead of the decoder. With stagger, they are at different positions, and take the
    memory of streams that have ended.
    """
    utterances = [drawn_tokens(codec.config, count) for count in counts]
    for tokens, audio in zip(utterances, codec.together(utterances, stagger), strict=True):
        codec.assert_equal(audio, tokens)


def test_streams_of_fewer_codebooks_share_a_batch(codec: Subject) -> None:
    if not codec.config.tokens.fewer_codebooks:
        pytest.skip("a stream of this codec has all codebooks")
    [most] = codec.config.tokens.shape
    utterances = [
        drawn_tokens(codec.config, count)[:, :books]
        for books, count in zip(range(1, most + 1), (40, 22, 9, 1, 30, 5), strict=False)
    ]
    for tokens, audio in zip(utterances, codec.together(utterances), strict=True):
        codec.assert_equal(audio, tokens)


def test_the_first_tokens_decide_the_number_of_codebooks(codec: Subject) -> None:
    tokens = drawn_tokens(codec.config, 9)
    if not codec.config.tokens.fewer_codebooks:
        wrong = f"shape \\(9, .*, expected \\({codec.field}, {tokens.shape[1]}\\)"
        with pytest.raises(InputError, match=wrong):
            codec.model.synthesize(tokens[:, :-1])
        return
    fewer, message = tokens[:, :2], "tokens: 1 codebooks, but the stream began with 2"
    with codec.model.stream() as stream:
        chunks = stream.push(fewer[:2])
        for call in (stream.push, stream.finish):
            with pytest.raises(InputError, match=message):
                call(tokens[2:, :1])
        chunks += stream.push(fewer[2:]) + stream.finish()
    codec.assert_equal(joined(chunks), fewer)


def early_frames(config: Any) -> int:
    """Returns the most frames whose audio a codec can send early; 0 for SNAC with attention."""
    windowed = getattr(config.sizes, "attn_window_size", None)
    return 0 if windowed else getattr(config, "reach_frames", 0)


@pytest.mark.parametrize("held", [0, 1, 3])
def test_early_audio_leaves_no_trace(codec: Subject, held: int) -> None:
    """A stage may hold back any number of frames. Two streams run side by side. Their first chunks
    are shorter than the reach of the decoder.

    With the whole reach held back, a stream equals the whole. Early audio differs, but not the
    audio after it.
    """
    network, config = codec.decoder._net, codec.config
    if not (reach := early_frames(config)):
        pytest.skip("this codec cannot send audio early")
    samples = network.frame_samples
    shapes = likely_pieces(network, config, (4, 16), 2) if codec.prepared else []
    stage = WaveformStage(network, None, shapes=shapes, lookahead_frames=held)
    stops = [(2, 5, 6, reach + 6, reach + 22, reach + 30), (1, 3, 8, 9, reach + 9, reach + 15)]
    codes = [torch.from_numpy(drawn_tokens(config, row[-1])).T for row in stops]
    handles = [stage.open() for _ in codes]
    audio: list[list[torch.Tensor]] = [[] for _ in codes]
    for turn, ends in enumerate(zip(*stops, strict=True)):
        starts = [row[turn - 1] if turn else 0 for row in stops]
        batch = [
            (handle, FrameChunk(frames[:, start:stop], stop == frames.shape[1]))
            for handle, frames, start, stop in zip(handles, codes, starts, ends, strict=True)
        ]
        for parts, stop, new in zip(audio, ends, stage.advance(batch), strict=True):
            parts.append(new)
            if held and turn < len(stops[0]) - 1:
                assert sum(map(len, parts)) == max(0, stop - held) * samples
    for handle in handles:
        stage.close(handle)
    assert stage.open_streams == stage.store.used == 0
    for frames, row, parts in zip(codes, stops, audio, strict=True):
        whole, sent = stage.whole(frames), torch.cat(parts)
        assert sent.shape == whole.shape
        exact = (row[-2] - held) * samples if held else 0  # since the last extrapolated sample
        assert off(sent[exact:], whole[exact:]) <= PARITY * float(whole.std())
        assert not held or off(sent, whole) > PARITY * float(whole.std())


@pytest.mark.parametrize("family", CODECS)
def test_early_audio_is_exact_if_later_tokens_have_arrived(family: str, tmp_path: Path) -> None:
    """So an utterance that is known as a whole is exact, with any number of frames held back."""
    settings = StreamConfig(lookahead_frames=2)
    config: Any = read_config(write_folder(family, tmp_path))
    if not early_frames(config):
        pytest.skip("this codec cannot send audio early")
    model = Token2Wav.load(tmp_path, stream=settings, runtime=RuntimeConfig(device="cpu"))
    [decoder] = model.pipeline.stages.values()
    first, longest = config.hops(settings)
    for count in (first + 1, 3 * first + 2, 7 * first, first + longest):
        tokens = drawn_tokens(config, count)
        whole = decoder.whole(as_frames(tokens)).numpy()  # type: ignore[attr-defined]
        assert off(model.synthesize(tokens), whole) <= PARITY * whole.std()
    slow = joined(chunks_of(model, portions(tokens, [1])))
    assert off(slow, whole) > PARITY * whole.std()


def test_a_cpu_packs_weights_and_changes_states_in_place(codec: Subject) -> None:
    stage = codec.decoder
    if not CODECS[codec.golden.family].windows:  # which keep no states
        kept_in_place = any(layer.state_in_place for layer in state_specs(stage._net))
        assert bool(stage.store._in_place) == (kept_in_place and not codec.prepared)
    assert torch.nn.Linear not in {type(module) for module in stage._net.modules()}


@pytest.mark.parametrize("hops", [0, 1, 3, 7])
def test_an_end_with_and_without_tokens(codec: Subject, hops: int) -> None:
    """The utterances have one token, or whole hops, whose chunks leave no token for the end. If
    nothing is held back, the end then comes after all audio.
    """
    config: Any = codec.config
    first_hop, _ = config.hops(EXACT)
    first_hop = min(first_hop, MOST_TOKENS_OF_A_HOP)  # that of NeuCodec is a whole utterance
    tokens = drawn_tokens(config, max(1, hops * first_hop))
    samples = len(tokens) * config.samples_per_token - config.missing_samples
    for parts, last in (
        ([tokens], tokens[:0]),
        ([], tokens),
        ([tokens[:-1]], tokens[-1:]),
        (portions(tokens, [1]), tokens[:0]),
    ):
        with codec.model.stream() as stream:
            assert codec.decoder.open_streams == 1
            sent = [chunk for part in parts for chunk in stream.push(part)]
            if codec.sends_at_once and not len(last):
                assert sum(len(chunk.audio) for chunk in sent) == samples
            sent += stream.finish(last)
        assert sent[-1].final
        codec.assert_equal(joined(sent), tokens)


def test_an_utterance_without_tokens_is_refused(codec: Subject) -> None:
    shaped = codec.config.tokens.zeros(0)
    empty: tuple[ArrayLike, ...] = (shaped, [])
    message = f"^{codec.field}: 0 sent; .* at least 1$"
    for tokens in empty:
        with codec.model.stream() as stream:
            assert not stream.push(tokens)
            with pytest.raises(InputError, match=message):
                stream.finish(tokens)
        with pytest.raises(InputError, match=message):
            codec.model.synthesize(tokens)


def test_a_stream_that_is_cancelled_leaves_no_trace(codec: Subject) -> None:
    """Its memory goes to the next stream, while another stream continues."""
    tokens = [drawn_tokens(codec.config, count) for count in (30, 31, 32)]
    chunks = []
    with codec.model.stream() as first:
        chunks += first.push(tokens[0][:20])
        with codec.model.stream() as cancelled:
            cancelled.push(tokens[1][:25])
        with codec.model.stream() as later:
            new = later.push(tokens[2][:9])
            chunks += first.push(tokens[0][20:])
            new += later.finish(tokens[2][9:])
        chunks += first.finish()
    codec.assert_equal(joined(chunks), tokens[0])
    codec.assert_equal(joined(new), tokens[2])


def with_last(config: ModelConfig, value: Any, dtype: Any = np.int64) -> ArrayLike:
    """Returns two tokens of zeros, with this value at the end."""
    tokens = np.zeros((2, *config.tokens.shape), dtype)
    tokens[-1, -1] = value
    return tokens


def last_size(config: ModelConfig) -> int:
    """Returns the number of different codes in the last codebook; 0 for latents."""
    return (0, *config.tokens.codebook_sizes)[-1]


# Tokens that are refused, and a regular expression for the message.
Wrong = list[tuple[Callable[[ModelConfig], ArrayLike], str]]
WRONG_SHAPES: Wrong = [
    (lambda config: np.zeros(3, int), r"shape \(3,\), expected {shape}"),
    (lambda config: np.zeros((2, 0), int), r"shape \(., 0\), expected {shape}"),
    (
        lambda config: np.zeros((2, config.tokens.shape[0] + 1), int),
        r"shape \(2, {above_size}\), expected {shape}",
    ),
    (
        lambda config: np.zeros((2, *config.tokens.shape, 1), int),
        r"shape \(2, {size}, 1\), expected ",
    ),
    (lambda config: [[0], [0, 1]], "rows of different lengths"),
]
WRONG_CODES: Wrong = [
    (
        lambda config: with_last(config, last_size(config)),
        "{above} at index 1, codebook {last}, is outside the vocabulary 0 to {largest}",
    ),
    (
        lambda config: np.full((2, *config.tokens.shape), config.tokens.codebook_sizes[0]),
        "{first} at index 0, codebook 0, is outside the vocabulary 0 to ",
    ),
    (lambda config: with_last(config, -1), "-1 at index 1, .* is outside .* 0 to {largest}"),
    (lambda config: with_last(config, 1 << 40), "values do not fit 32 bits; found 0 to 10995116"),
    (lambda config: with_last(config, 1, np.float32), "type float32, expected integers"),
    (lambda config: with_last(config, "a", "U1"), "type <U1, expected integers"),
]
WRONG_LATENTS: Wrong = [
    (lambda config: with_last(config, np.nan, float), "holds NaN or infinite values"),
    (
        lambda config: with_last(config, -2e4, float),
        "-20000 at index 1, {last} is .* -10000 to 10000",
    ),
    (lambda config: with_last(config, "1", "U1"), "type <U1, expected real numbers"),
    (lambda config: with_last(config, 1j, complex), "type complex128, expected real numbers"),
    (lambda config: with_last(config, True, bool), "type bool, expected real numbers"),
    (lambda config: with_last(config, None, object), "type object, expected real numbers"),
]


def test_tokens_that_are_refused(codec: Subject) -> None:
    """One sentence names the field and the bound. The stream goes on to which they are sent."""
    config, good = codec.config, drawn_tokens(codec.config, 4)
    [size] = config.tokens.shape
    shape = f"({codec.field}, {size})"
    if config.tokens.fewer_codebooks:
        shape = f"(tokens, codebooks) with 1 to {size} codebooks"
    bounds = {
        "shape": re.escape(shape),
        "above_size": size + 1,
        "size": size,
        "last": size - 1,
        "above": last_size(config),
        "first": config.tokens.codebook_sizes[0] if config.tokens.codebook_sizes else 0,
        "largest": last_size(config) - 1,
    }
    values = WRONG_LATENTS if config.tokens.are_latents else WRONG_CODES
    with codec.model.stream() as stream:
        chunks = stream.push(good[:2])
        for wrong, message in WRONG_SHAPES + values:
            for call in (codec.model.synthesize, stream.push, stream.finish):
                with pytest.raises(InputError) as refused:
                    call(wrong(config))
                sentence = one_line(refused.value)
                assert re.match(f"{codec.field}: {message.format(**bounds)}", sentence), sentence
                assert not re.search(r"\. [A-Z]", sentence)
        with pytest.raises(InputError, match=r"^voice: given, but this model takes no voice"):
            codec.model.synthesize(good, a_voice(3))
        chunks += stream.finish(good[2:])
    codec.assert_equal(joined(chunks), good)


def test_latents_of_bfloat16_are_read(codec: Subject) -> None:
    if not codec.config.tokens.are_latents:
        pytest.skip("tokens of this codec are integers")
    tokens = torch.from_numpy(drawn_tokens(codec.config, 4)).bfloat16()
    audio = codec.model.synthesize(tokens)
    codec.assert_equal(audio, tokens.float().numpy())


def test_the_smallest_and_the_largest_values_are_taken(codec: Subject) -> None:
    config = codec.config
    shape, ends = (2, *config.tokens.shape), (0, np.subtract(config.tokens.codebook_sizes, 1))
    for value in (-1e4, 1e4) if config.tokens.are_latents else ends:
        tokens = np.full(shape, value, config.tokens.dtype)
        whole = codec.whole(tokens)
        assert off(codec.model.synthesize(tokens), whole) <= PARITY * abs(whole).max()


@pytest.mark.parametrize("lookahead_frames", [None, 0], ids=["default", "exact"])
@pytest.mark.parametrize("family", [name for name, codec in CODECS.items() if not codec.windows])
def test_every_chunk_is_made_up_of_prepared_shapes(
    family: str, lookahead_frames: int | None, tmp_path: Path
) -> None:
    """Also the audio of a chunk that is sent early. So a GPU has a graph for every hop."""
    settings = StreamConfig(lookahead_frames=lookahead_frames)
    folder = write_folder(family, tmp_path)
    model = Token2Wav.load(folder, stream=settings, runtime=RuntimeConfig(device="cpu"))
    prepared, ran = watch(model, settings, 1)
    for sizes in ([1], [7], [3, 40, 1], [200]):
        chunks_of(model, portions(drawn_tokens(model.config, 130), sizes))
    assert ran
    assert ran <= prepared
