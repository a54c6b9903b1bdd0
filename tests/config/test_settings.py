"""Configuration file of a server: every key is optional, and unknown keys are errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import pytest

from testkit.models.tiny_model import TINY, one_line
from testkit.tables import table
from token2wav import ConfigError, RuntimeConfig, StreamConfig, Token2Wav
from token2wav.config import LimitConfig, ServerConfig, config_hash, load_server_config
from token2wav.config.settings import FrontConfig
from token2wav.config.strict_yaml import MAX_FILE_BYTES, read_bounded, read_yaml
from token2wav.config.values import Bounds, kinds, prefixed
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.model import check_settings
from token2wav.serving.hops import HopSchedule


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "server.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_defaults_equal_the_public_streaming_loop() -> None:
    defaults = ServerConfig()
    assert defaults.stream == StreamConfig(
        first_tokens=6,
        provisional_lookahead_tokens=2,
        provisional_steps=0,
        max_hop_tokens=0,
        left_blocks=None,
        steps=(),
    )
    assert HopSchedule.of(defaults.stream, CosyVoice3Config.read(TINY)) == HopSchedule(
        25, 100, 25, first_tokens=6, provisional_lookahead=2, least_tokens=3
    )
    assert defaults.runtime == RuntimeConfig("auto", "auto", "", "auto", 0)
    assert defaults.limits.streams > 1


FULL = """
stream: {first_tokens: 12, provisional_lookahead_tokens: 3, provisional_steps: 3, \
max_hop_tokens: 200, left_blocks: 8, block_tokens: 50, overlap_tokens: 4, steps: [10, 4], \
lookahead_frames: 8, decoder_noise: false, trim_silence_ms: 200, end_after_repeats: 50, \
end_after_silence_s: 3, mark: mine,
         reference: true}
runtime: {device: "cuda:1", backend: torch, engines: made, precision: float16, workers: 3, \
cache_mib: 512,
          cache_storage: int8, pause_batch_ms: 20, pause_token_ms: 0.5, \
decoder_precision: float16x3}
limits:
    streams: 3
    stream_tokens: 20
    idle_seconds: 2.5
    streams_per_client: 2
    batch_streams: 5
    player_buffer_seconds: 0.1
server: {front: native}
voices: [anna.safetensors, /voices/bob.safetensors]
"""


def test_a_full_file_sets_everything(tmp_path: Path) -> None:
    config = load_server_config(written(tmp_path, FULL))
    assert config == ServerConfig(
        StreamConfig(
            *(12, 3, 3, 200, 8, 50, 4),
            steps=(10, 4),
            lookahead_frames=8,
            decoder_noise=False,
            trim_silence_ms=200,
            end_after_repeats=50,
            end_after_silence_s=3.0,
            mark="mine",
            reference=True,
        ),
        RuntimeConfig("cuda:1", "torch", "made", "float16", 3, 512, "int8", 20, 0.5, "float16x3"),
        LimitConfig(3, 20, 2.5, 2, batch_streams=5, player_buffer_seconds=0.1),
        FrontConfig("native"),
        voices=(str(tmp_path / "anna.safetensors"), "/voices/bob.safetensors"),
    )
    for part in dataclasses.fields(ServerConfig):  # no setting is missing in the file above
        section, default = getattr(config, part.name), getattr(ServerConfig(), part.name)
        assert section != default, part.name
        for item in dataclasses.fields(section) if dataclasses.is_dataclass(section) else ():
            assert getattr(section, item.name) != getattr(default, item.name), item.name


# text of a file, and part of the message
BAD = table(
    r"""
streams: {} | unknown key 'streams'; expected one of stream, runtime, limits
stream: {hops: fixed} | stream: unknown key 'hops'; expected one of first_tokens,
1: 2 | unknown key
- stream | expected a mapping, got list
stream | expected a mapping, got str
stream: fixed | stream: expected a mapping, got str
limits: | limits: expected a mapping, got NoneType
runtime: {backend: random} | runtime.backend: 'random' is not one of auto, torch, onnx
runtime: {backend: 25} | runtime.backend: 25 is not one of auto, torch, onnx, tensorrt, pause
runtime: {backend: [torch]} | is not one of auto, torch, onnx, tensorrt
stream: {first_tokens: 4} | stream.first_tokens: 4 is not allowed; must be 0, or 5 or more
stream: {max_hop_tokens: many} | stream.max_hop_tokens: expected int, got 'many'
stream: {max_hop_tokens: true} | stream.max_hop_tokens: expected int, got True
stream: {max_hop_tokens: 25.5} | stream.max_hop_tokens: expected int, got 25.5
limits: {idle_seconds: 1e308} | limits.idle_seconds: 1e+308 is not between
stream: {steps: [4, -2]} | stream.steps[1]: -2 is not between
limits: {idle_seconds: .nan} | limits.idle_seconds: expected float, got nan
limits: {streams: .inf} | limits.streams: expected int, got inf
stream: {end_after_repeats: 1} | stream.end_after_repeats: 1 is not allowed; must be 0, or 2 or
stream: {reference: 'yes'} | stream.reference: expected bool, got 'yes'
runtime: {device: tpu} | runtime.device: 'tpu'
runtime: {device: 'cuda:'} | runtime.device: 'cuda:'
runtime: {device: 'cuda:-1'} | runtime.device: 'cuda:-1'
runtime: {device: 0} | runtime.device: expected str, got 0
stream: [1 | cannot be read as YAML
runtime: &a {backend: *a} | runtime.backend
stream: !!python/object/apply:os.system ['touch executed'] | cannot be read as YAML
stream: !new:StreamConfig {} | line 1: the tag '!new:StreamConfig' is unknown
limits:\n  streams: 3\n  streams: 4 | line 3: key 'streams' appears more than once, first in line 2
limits: {streams: 3}\nlimits: {} | line 2: key 'limits' appears more than once
limits: &a {streams: 3}\nstream: {<<: *a} | line 2: merge keys (<<) are not allowed
"""
)
HOSTILE = [
    ("stream: {max_hop_tokens: " + "x" * 100 + "}", f"got '{'x' * 79}..."),
    ('"a\\nb": 1', "unknown key"),
    ("stream: " + "[" * 3000, "cannot be read as YAML"),
    ("limits: {streams: 1" + "0" * 400 + "}\n", "limits.streams: expected int, got 1000"),
    ("limits: {streams: 0x" + "f" * 3900 + "}\n", "an integer of 15600 bits"),
]


def test_every_number_has_bounds() -> None:
    for section in (StreamConfig, RuntimeConfig, LimitConfig):
        for name, kind in kinds(section).items():
            inner, *bounds = get_args(kind) if get_origin(kind) is Annotated else (kind,)
            if get_origin(inner) is tuple:
                inner, *bounds = get_args(get_args(inner)[0])
            if inner not in (bool, str, str | None) and get_origin(inner) is not Literal:
                assert isinstance(bounds[0], Bounds), name


@pytest.mark.parametrize(("text", "words"), [*BAD, *HOSTILE])
def test_a_bad_file_is_refused_by_key_on_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | bytes, words: str
) -> None:
    path = written(tmp_path, text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_server_config(path)
    message = one_line(caught.value)
    assert message.startswith(f"{path}: ")
    assert words in message
    assert sorted(tmp_path.iterdir()) == [path]  # nothing was executed


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (
            StreamConfig(max_hop_tokens=90),
            r"stream\.max_hop_tokens: 90 is not a multiple .* 25 tokens",
        ),
        (
            StreamConfig(block_tokens=10),
            r"stream\.block_tokens: 10, but the block of this model is fixed at 25 tokens; "
            r"expected 0$",
        ),
        (
            StreamConfig(lookahead_frames=5),
            r"stream\.lookahead_frames: 5, expected 0 to 4; the look-ahead",
        ),
        (
            StreamConfig(left_blocks=500),
            r"stream\.left_blocks: 500 past blocks and a chunk of 100 tokens need 505 pages of the "
            r"cache, which has 65; lower",
        ),
        (
            StreamConfig(left_blocks=0, max_hop_tokens=10_000),
            r"stream\.left_blocks: 0 past blocks and a chunk of 10000 tokens need 401 pages",
        ),
        (
            StreamConfig(max_hop_tokens=10_000),
            r"stream\.max_hop_tokens: 10000 tokens need 401 pages of the cache",
        ),
    ],
)
def test_settings_beyond_the_model_or_the_cache(stream: StreamConfig, words: str) -> None:
    runtime = RuntimeConfig(device="cpu", cache_mib=64)  # 65 pages
    with pytest.raises(ConfigError, match=words):
        check_settings(TINY, stream, runtime)
    with pytest.raises(ConfigError, match=words):
        Token2Wav.load(TINY, stream=stream, runtime=runtime)


def test_a_hash_identifies_configurations() -> None:
    first = config_hash(StreamConfig(), RuntimeConfig())
    assert first == config_hash(StreamConfig(), RuntimeConfig())
    assert len(first) == 12
    hashes = {
        config_hash(StreamConfig(first_tokens=0), RuntimeConfig()),
        config_hash(RuntimeConfig(), StreamConfig()),
    }
    assert first not in hashes
    assert len(hashes) == 2


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for content in (b"\xff\xfe\x00", b"x: \x80\n", b"\x00\x01\x02" * 100, bytes(range(256))):
        path = written(tmp_path, content)
        with pytest.raises(ConfigError, match=f"^{path}: cannot be read as YAML") as caught:
            read_yaml(path)
        one_line(caught.value)
    for missing in (tmp_path / "nowhere.yaml", tmp_path):
        with pytest.raises(ConfigError, match=f"^{missing}: cannot be read: "):
            read_yaml(missing)


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    assert read_yaml(written(tmp_path, b"#" * MAX_FILE_BYTES)) is None
    path = written(tmp_path, b"#" * (MAX_FILE_BYTES + 1))
    for large in (path, Path("/dev/zero")):  # the second one has no end
        with pytest.raises(ConfigError, match=f"larger than {MAX_FILE_BYTES} bytes"):
            read_yaml(large)
    assert len(read_bounded(path, MAX_FILE_BYTES + 1)) == MAX_FILE_BYTES + 1


def test_a_prefix_of_a_message_is_added_once() -> None:
    twice = prefixed("file: "), prefixed("file: ")
    with pytest.raises(ConfigError, match=r"^file: key: wrong$"), twice[0], twice[1]:
        raise ConfigError("key: wrong")
