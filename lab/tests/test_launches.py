"""Launches of every family, which must not rise, and the counter itself on small functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from lab.launches.counted_chunks import ChunkWork, chunk_works
from lab.launches.counted_stages import CountedGraphs
from lab.launches.launch_counter import META, Counted, LaunchCounter
from lab.launches.table import counted_configs
from testkit.models.published_codecs import codec_configs
from testkit.models.sized import public_configs
from token2wav import StreamConfig
from token2wav.layers.streaming import StatesInPlace
from token2wav.layers.window_attention import ring_length

pytest.importorskip("triton")

# Launches of the first chunk of one stream, at the published sizes. A change that needs more
# launches raises its number here, with the reason in the message of its commit. A change that needs
# fewer lowers it, so that it cannot rise again unseen. Then run
# `.venv/bin/python -m lab.launches.table --save`, and write its times into lab/README.md and
# docs/gpu.md.
LAUNCHES: dict[str, dict[str, int]] = {
    "CosyVoice3": {"encoder": 34, "outside": 27, "flow": 1842, "vocoder": 61},
    "CosyVoice2": {"encoder": 274, "outside": 27, "flow": 4716, "vocoder": 61},
    "MOSS-Speech": {"encoder": 274, "outside": 27, "flow": 4716, "vocoder": 61},
    "Step-Audio2": {"encoder": 274, "outside": 27, "flow": 1798, "vocoder": 61},
    "Chatterbox": {"encoder": 274, "outside": 27, "flow": 4716, "vocoder": 61},
    "Chatterbox Turbo": {"encoder": 274, "outside": 27, "flow": 948, "vocoder": 61},
    "StreamFlow": {"encoder": 0, "outside": 10, "flow": 2283, "vocoder": 399},
    "Qwen2.5-Omni": {"encoder": 0, "outside": 10, "flow": 7667, "vocoder": 603},
    "BigVGAN": {"encoder": 34, "outside": 24, "flow": 1842, "vocoder": 595},
}
# Launches of a later chunk of a codec: outside and decoder, of one stream and of 64 streams.
CODECS: dict[str, list[tuple[int, int]]] = {
    "Qwen3-TTS": [(9, 222), (9, 222)],
    "Qwen3-Omni": [(9, 204), (9, 204)],
    "Mimi": [(9, 147), (9, 147)],
    "Pocket TTS": [(9, 62), (9, 62)],
    "NanoCodec": [(7, 269), (7, 269)],
    "DAC": [(7, 98), (7, 143)],
    "DAC 24 kHz": [(14, 196), (15, 219)],
    "Higgs Audio": [(14, 238), (15, 238)],
    "SNAC": [(14, 271), (15, 276)],
    "SNAC 44.1 kHz": [(7, 158), (7, 169)],
    "MOSS": [(7, 753), (7, 753)],
    "EAR-TTS": [(7, 85), (7, 85)],
    "LFM2-Audio": [(9, 146), (9, 146)],
    "Audex": [(9, 148), (9, 148)],
    "VibeVoice": [(7, 224), (7, 224)],
    "Audio8": [(9, 228), (9, 228)],
    "VoxCPM2": [(7, 95), (7, 95)],
}
# Stages with the same number of launches for any number of streams.
CONSTANT = [
    *((family, "encoder") for family in LAUNCHES),
    *((family, "flow") for family in LAUNCHES),
    ("CosyVoice3", "vocoder"),
    ("CosyVoice2", "vocoder"),
]
X = torch.empty(4, 6, 8, device=META)


@cache
def first_chunk(family: str) -> ChunkWork:
    """Returns the work of the first chunk of one stream."""
    [work] = chunk_works(family, public_configs()[family], (1,), (0.0,))
    return work


@cache
def one_step(family: str) -> tuple[ChunkWork, ChunkWork]:
    """Returns the work of the first chunks of one stream, and of two streams, with one ODE step."""
    one, two = chunk_works(family, public_configs()[family], (1, 2), (0.0,), steps=1)
    return one, two


@pytest.mark.parametrize("family", LAUNCHES)
def test_no_stage_needs_more_launches(family: str) -> None:
    stages, known = first_chunk(family).stages, LAUNCHES[family]
    check_launches(family, {name: stages[name].launches for name in known}, known)


@pytest.mark.parametrize("codec", CODECS)
def test_no_codec_needs_more_launches(codec: str) -> None:
    """The numbers of copies from the host do not depend on the number of streams of a batch."""
    one, many = chunk_works(codec, codec_configs()[codec], (1, 64), (2.0,))
    for work, known in zip((one, many), CODECS[codec], strict=True):
        names = "outside", "decoder"
        counts = {name: work.stages[name].launches for name in names}
        check_launches(
            f"{codec}, {work.streams} streams", counts, dict(zip(names, known, strict=True))
        )
        assert not work.incomplete
    # codes of all streams; slots and noise rows of the batch, and of a batch of early audio
    early_audio = codec_configs()[codec].withheld_frames(StreamConfig()) > 0
    assert [work.stages["sum"].from_host for work in (one, many)] == [2 + early_audio] * 2


def check_launches(title: str, counts: dict[str, int], known: dict[str, int]) -> None:
    more = {name: count for name, count in counts.items() if count > known[name]}
    assert not more, (
        f"launches of {title} rose to {more}, from {known}; if that is intended, write the new "
        f"numbers into {__file__}, as the comment there describes"
    )
    if counts != known:
        warnings.warn(f"launches of {title} fell: write {counts} into {__file__}", stacklevel=1)


@pytest.mark.parametrize(("family", "stage"), CONSTANT)
def test_launches_do_not_depend_on_the_number_of_streams(family: str, stage: str) -> None:
    one, two = (work.stages[stage].launches for work in one_step(family))
    assert one == two


def test_every_streaming_model_at_its_published_size_is_counted() -> None:
    assert LAUNCHES.keys() | CODECS.keys() == counted_configs().keys()


def test_a_step_and_a_layer_of_the_flow() -> None:
    """Ten steps of 22 layers make up the flow, except for the preparation of its conditions."""
    work = first_chunk("CosyVoice3")
    between_layers = work.step_launches - 22 * work.layer_launches
    assert 0 < between_layers < 3 * work.layer_launches
    assert 0 < work.stages["flow"].launches - 10 * work.step_launches < work.layer_launches + 10
    nine_steps = work.stages["flow"].launches - one_step("CosyVoice3")[0].stages["flow"].launches
    assert nine_steps == 9 * work.step_launches


def test_a_batch_does_the_work_of_its_streams() -> None:
    """Operations double with the streams. The weights are read once for both."""
    one, two = (work.stages["flow"] for work in one_step("CosyVoice3"))
    assert two.operations["float16"] == 2 * one.operations["float16"]
    assert one.bytes < two.bytes < 2 * one.bytes


def test_attention_reads_the_pages_of_its_blocks() -> None:
    """A longer history adds pages, but no launches."""
    config = public_configs()["CosyVoice3"]
    early, late = chunk_works("CosyVoice3", config, (1,), (2.0, 10.0), steps=1)
    assert not late.incomplete
    before, after = early.stages["flow"], late.stages["flow"]
    assert after.launches == before.launches
    # of one layer: keys and values of two branches, 50 frames and 16 heads of 64 in float16
    page = 2 * 2 * 50 * 16 * 64 * 2
    assert after.bytes - before.bytes == 22 * 8 * page


def launches(function: Callable[[], object]) -> list[Counted]:
    """Counts a function."""
    with (
        torch.inference_mode(),
        LaunchCounter() as counter,
        counter.count() as counted,
        counter.stage("work"),
    ):
        function()
    return counted


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda: X.transpose(0, 1)[:, 2:].unflatten(2, (2, 4)).expand(6, 2, 2, 4), []),
        (lambda: torch.empty_like(X), []),
        (lambda: torch.zeros(3, device=META), ["zeros"]),
        (lambda: F.linear(X, X.new_empty(5, 8), X.new_empty(5)), ["addmm"]),
        (lambda: F.conv1d(X, X.new_empty(3, 6, 2), X.new_empty(3)), ["convolution"] * 2),
        (lambda: F.pad(X, (1, 0)), ["constant_pad_nd"] * 2),
        (lambda: torch.cat([X] * 200), ["cat"] * 2),
        (lambda: F.scaled_dot_product_attention(X, X, X), ["scaled_dot_product_attention"]),
        (lambda: X.new_empty(9).copy_(torch.arange(9)), ["copy_"]),
        (lambda: torch.arange(9) + torch.ones(9), []),
    ],
)
def test_operators(function: Callable[[], object], names: list[str]) -> None:
    """Views and memory cost nothing; a bias after a convolution is a kernel of its own. Work on the
    CPU is not counted.
    """
    for _ in range(2):  # the second time from memory
        assert [entry.launch.name for entry in launches(function)] == names


def test_bytes_and_operations_of_a_product() -> None:
    x, weight = (torch.empty(*size, dtype=torch.float16, device=META) for size in ((4, 8), (8, 5)))
    [product] = launches(lambda: x @ weight)
    assert product.launch.bytes == 2 * (4 * 8 + 8 * 5 + 4 * 5)
    assert product.launch.operations == 2 * 4 * 8 * 5
    assert product.launch.kind == "float16"
    [copy] = launches(lambda: X.new_empty(9).copy_(torch.arange(9)))
    assert (copy.launch.from_host, copy.launch.bytes) == (True, 9 * (8 + 4))
    # 192 numbers, each read from one row of a tensor that is read once, not 4 times
    [copied] = launches(lambda: X[:1].expand(4, 6, 8).clone())
    assert copied.launch.bytes == 4 * (6 * 8 + 4 * 6 * 8)


def test_numbers_of_different_types_are_different_arguments() -> None:
    with LaunchCounter():
        assert [(X.long() + number).dtype for number in (1, 1.0, True)] == [
            torch.int64,
            torch.float32,
            torch.int64,
        ]


def test_float32_products_use_tf32_only_where_it_is_allowed() -> None:
    def product() -> None:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            X @ X.new_empty(8, 5)

    before = torch.backends.cuda.matmul.allow_tf32
    assert [entry.launch.kind for entry in launches(product)] == ["float32", "tf32"]
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_kernels_are_counted_and_not_run() -> None:
    from token2wav.kernels.norms import gated_norm, modulated_norm

    gate, shift, scale = (X.new_empty(8) for _ in range(3))
    counted = launches(
        lambda: gated_norm(X, modulated_norm(X, shift, scale, X.dtype), gate, shift, shift)
    )
    assert [entry.launch.name for entry in counted] == ["_modulated_norm", "_gated_norm"]
    sizes = [entry.launch.bytes for entry in counted]
    assert sizes == [4 * (2 * X.numel() + 2 * 8), 4 * (3 * X.numel() + 2 * 8)], "shift once"


def test_attention_over_rings_reads_the_windows_of_all_streams() -> None:
    """A step of 40 positions is two launches. The ring of the scratch slot stands for all rings."""
    from token2wav.kernels.window_attention import window_attention

    streams, times, heads, dim, window = 3, 40, 2, 64, 50
    q = X.new_empty(streams, times, 2 * heads, dim)
    k = X.new_empty(streams, times, heads, dim)
    positions, angles = X.new_empty(1, times, dtype=torch.int64), X.new_empty(1, times, dim)
    rings = X.new_empty(2, ring_length(window), heads, dim)
    states = StatesInPlace(rings, X.new_empty(streams, dtype=torch.int64))
    counted = launches(
        lambda: window_attention(q, k, k, positions, (angles, angles), states, window)
    )
    for (launch, *_), count in zip(counted, (32, 8), strict=True):
        part = 4 * (2 * q.numel() + k.numel() + angles.numel()) + 8 * (times + streams)
        windows = streams * (window - 1 + count) * 2 * heads * dim * 4
        assert launch.bytes == part * count / times + windows
        assert launch.operations == 3 * 4 * streams * 2 * heads * dim * count * window


def test_a_graph_is_recorded_once_and_counted_at_every_replay() -> None:
    ran = []

    def work() -> None:
        ran.append(X + X)

    with LaunchCounter() as counter, counter.count() as counted, counter.stage("flow"):
        graph = CountedGraphs(counter).capture(work)
        X.new_zeros(3)
        graph()
        graph()
    assert len(ran) == 2, "before the record, and for it"
    assert [(entry.launch.name, entry.stage, entry.captured) for entry in counted] == [
        ("add", "flow", True),
        ("add", "flow", True),
        ("new_zeros", "outside", False),
    ]
