"""The configuration file of a server: every key is optional, and none is guessed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from tests.support.tiny_model import TINY, one_line
from token2wav import ConfigError, RuntimeConfig, StreamConfig, Token2Wav
from token2wav.config import LimitConfig, ServerConfig, config_hash, load_server_config
from token2wav.config.strict_yaml import MAX_FILE_BYTES
from token2wav.config.values import Bounds, kinds
from token2wav.families.cosyvoice3.config import CosyVoice3Config
from token2wav.serving.chunking import HopSchedule


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "server.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}\n", "stream: {}\nlimits: {}\n"])
def test_what_is_not_said_has_a_default(tmp_path: Path, text: str) -> None:
    assert load_server_config(written(tmp_path, text)) == load_server_config(None) == ServerConfig()


def test_the_defaults_are_those_of_the_public_loop() -> None:
    defaults = ServerConfig()
    assert defaults.stream == StreamConfig(8, 0, None, (), reference=False)
    assert HopSchedule.of(defaults.stream, CosyVoice3Config.read(TINY)) == HopSchedule(
        25, 100, 25, 8
    )
    assert defaults.runtime == RuntimeConfig("auto", "auto", "", "auto", 0)
    assert defaults.limits.streams > 1


FULL = """
stream: {first_tokens: 12, max_hop_tokens: 200, left_blocks: 8, steps: [10, 4], hold_frames: 8, \
trim_silence_ms: 200,
         reference: true}
runtime: {device: "cuda:1", backend: torch, engines: made, precision: float16, workers: 3, \
cache_mib: 512,
          cache_storage: int8}
limits:
    streams: 3
    stream_tokens: 20
    idle_seconds: 2.5
    streams_per_client: 2
    batch_streams: 5
    player_buffer_seconds: 0.1
voices: [anna.safetensors, /voices/bob.safetensors]
"""


def test_a_full_file_sets_everything(tmp_path: Path) -> None:
    config = load_server_config(written(tmp_path, FULL))
    assert config == ServerConfig(
        StreamConfig(12, 200, 8, steps=(10, 4), hold_frames=8, trim_silence_ms=200, reference=True),
        RuntimeConfig("cuda:1", "torch", "made", "float16", 3, cache_mib=512, cache_storage="int8"),
        LimitConfig(3, 20, 2.5, 2, batch_streams=5, player_buffer_seconds=0.1),
        voices=(str(tmp_path / "anna.safetensors"), "/voices/bob.safetensors"),
    )
    for part in dataclasses.fields(ServerConfig):  # no setting is missing in the file above
        given, default = getattr(config, part.name), getattr(ServerConfig(), part.name)
        assert given != default, part.name
        for item in dataclasses.fields(given) if dataclasses.is_dataclass(given) else ():
            assert getattr(given, item.name) != getattr(default, item.name), item.name


@pytest.mark.parametrize(
    ("earlier", "name", "value"), [("lanes", "workers", 3), ("engine", "backend", "torch")]
)
def test_an_earlier_name_works_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, earlier: str, name: str, value: int | str
) -> None:
    file = written(tmp_path, f"runtime: {{{earlier}: {value}}}\n")
    assert getattr(load_server_config(file, warn=False).runtime, name) == value
    assert not caplog.records
    assert getattr(load_server_config(file).runtime, name) == value
    [record] = caplog.records
    assert record.getMessage() == (
        f"runtime.{earlier}: the setting is called runtime.{name} now; the next release refuses "
        "the earlier name"
    )


def test_whole_floats_pass_as_integers_and_integers_as_floats(tmp_path: Path) -> None:
    config = load_server_config(written(tmp_path, "limits: {streams: 3.0, idle_seconds: 2}\n"))
    assert (config.limits.streams, config.limits.idle_seconds) == (3, 2.0)
    assert isinstance(config.limits.streams, int)
    assert isinstance(config.limits.idle_seconds, float)


BAD: dict[str, tuple[str | bytes, list[str]]] = {
    "unknown section": ("streams: {}\n", ["unknown key 'streams'", "stream, runtime, limits"]),
    "unknown key": (
        "stream: {hops: fixed}\n",
        ["stream: unknown key 'hops'", "first_tokens, max_hop_tokens"],
    ),
    "unknown key on two lines": ('"a\\nb": 1\n', ["unknown key"]),
    "key that is no text": ("1: 2\n", ["unknown key"]),
    "not a mapping": ("- stream\n", ["expected a mapping, got list"]),
    "text": ("stream\n", ["expected a mapping, got str"]),
    "section is no mapping": ("stream: fixed\n", ["stream: expected a mapping, got str"]),
    "section is empty": ("limits:\n", ["limits: expected a mapping, got NoneType"]),
    "unknown engine": (
        "runtime: {backend: random}\n",
        ["runtime.backend: 'random'", "auto, torch, onnx, tensorrt"],
    ),
    "engine is a number": (
        "runtime: {backend: 25}\n",
        ["runtime.backend: 25", "auto, torch, onnx, tensorrt"],
    ),
    "engine is a list": (
        "runtime: {backend: [torch]}\n",
        ["runtime.backend", "auto, torch, onnx, tensorrt"],
    ),
    "key that went": (
        "stream: {hop: lead}\n",
        ["stream: unknown key 'hop'", "known are first_tokens, "],
    ),
    "too few first tokens": (
        "stream: {first_tokens: 4}\n",
        ["stream.first_tokens: 4 is not 0, nor 5 or more"],
    ),
    "negative first tokens": (
        "stream: {first_tokens: -1}\n",
        ["stream.first_tokens: -1 is not between 0 and 1000"],
    ),
    "text as tokens": (
        "stream: {max_hop_tokens: many}\n",
        ["stream.max_hop_tokens: expected int, got 'many'"],
    ),
    "boolean as tokens": (
        "stream: {max_hop_tokens: true}\n",
        ["stream.max_hop_tokens: expected int, got True"],
    ),
    "fraction as tokens": (
        "stream: {max_hop_tokens: 25.5}\n",
        ["stream.max_hop_tokens: expected int, got 25.5"],
    ),
    "NaN": ("limits: {idle_seconds: .nan}\n", ["limits.idle_seconds: expected float, got nan"]),
    "infinity": ("limits: {streams: .inf}\n", ["limits.streams: expected int, got inf"]),
    "endless idle time": (
        "limits: {idle_seconds: .inf}\n",
        ["limits.idle_seconds: expected float, got inf"],
    ),
    "no streams": ("limits: {streams: 0}\n", ["limits.streams: 0 is not between 1 and 10000"]),
    "negative time": (
        "limits: {idle_seconds: -1}\n",
        ["limits.idle_seconds: -1.0 is not between 0.001 and 86400"],
    ),
    "negative hop": (
        "stream: {max_hop_tokens: -25}\n",
        ["stream.max_hop_tokens: -25 is not between 0 and 100000"],
    ),
    "negative window": (
        "stream: {left_blocks: -2}\n",
        ["stream.left_blocks: -2 is not between -1 and"],
    ),
    "text as boolean": (
        "stream: {reference: 'yes'}\n",
        ["stream.reference: expected bool, got 'yes'"],
    ),
    "unknown device": ("runtime: {device: tpu}\n", ["runtime.device: 'tpu'", "cuda:N"]),
    "device without number": ("runtime: {device: 'cuda:'}\n", ["runtime.device: 'cuda:'"]),
    "negative device": ("runtime: {device: 'cuda:-1'}\n", ["runtime.device: 'cuda:-1'"]),
    "device is a number": ("runtime: {device: 0}\n", ["runtime.device: expected str, got 0"]),
    "negative workers": (
        "runtime: {workers: -1}\n",
        ["runtime.workers: -1 is not between 0 and 256"],
    ),
    "huge number": (
        "limits: {streams: 1" + "0" * 400 + "}\n",
        ["limits.streams: expected int, got 1000"],
    ),
    "no YAML": ("stream: [1\n", ["cannot be read as YAML"]),
    "no date": ("stream: 2024-99-99\n", ["cannot be read as YAML"]),
    "nested without end": ("stream: " + "[" * 3000, ["cannot be read as YAML"]),
    "both names": (
        "runtime: {lanes: 1, workers: 1}\n",
        ["runtime.lanes: the earlier name of runtime.workers, which is there too; remove one"],
    ),
    "in itself": ("runtime: &a {backend: *a}\n", ["runtime.backend", "auto, torch, onnx"]),
    "binary": (b"\x00\x80\xff", ["cannot be read as YAML"]),
    "code to run": (
        "stream: !!python/object/apply:os.system ['touch executed']\n",
        ["cannot be read as YAML", "python"],
    ),
    "key given twice": (
        "limits:\n  streams: 3\n  idle_seconds: 5\n  streams: 4\n",
        ["line 4: key 'streams' is given twice, first in line 2"],
    ),
    "section given twice": (
        "limits: {streams: 3}\nlimits: {}\n",
        ["line 2: key 'limits' is given twice"],
    ),
    "merged sections": (
        "limits: &a {streams: 3}\nstream: {<<: *a}\n",
        ["line 2: merge keys (<<) are not allowed"],
    ),
    "hexadecimal beyond all bounds": (
        "limits: {streams: 0x" + "f" * 3900 + "}\n",
        ["an integer of 15600 bits"],
    ),
    "no number": ("limits: {streams: !!int ''}\n", ["cannot be read as YAML"]),
    "larger than a settings file": ("#" * (MAX_FILE_BYTES + 1), ["larger than 1048576 bytes"]),
    "local tag": ("stream: !new:StreamConfig {}\n", ["cannot be read as YAML"]),
}


def numbers(section: type) -> Iterator[tuple[str, Bounds]]:
    """Fields of a section that are numbers, or lists of numbers, with the bounds of the number."""
    for name, kind in kinds(section).items():
        inner, *bounds = get_args(kind) if get_origin(kind) is Annotated else (kind,)
        if get_origin(inner) is tuple:
            inner, *bounds = get_args(get_args(inner)[0])
        if inner not in (bool, str) and get_origin(inner) is not Literal:
            yield name, bounds[0]  # a number without bounds has none


SETTINGS = [
    (section, name, bounds)
    for section, config in (
        ("stream", StreamConfig),
        ("runtime", RuntimeConfig),
        ("limits", LimitConfig),
    )
    for name, bounds in numbers(config)
]


@pytest.mark.parametrize(
    ("section", "name", "bounds"), SETTINGS, ids=[name for _, name, _ in SETTINGS]
)
@pytest.mark.parametrize("value", [-2, 100_000_000, 10**9, 10**18, 1e308])
def test_every_number_has_bounds(
    tmp_path: Path, section: str, name: str, bounds: Bounds, value: float
) -> None:
    given = f"[{value}]" if name == "steps" else value
    with pytest.raises(
        ConfigError,
        match=rf"{section}\.{name}(\[0\])?: .* is not between {bounds.least} and {bounds.most}",
    ):
        load_server_config(written(tmp_path, f"{section}: {{{name}: {given}}}\n"))
    sections = {"stream": StreamConfig, "runtime": RuntimeConfig, "limits": LimitConfig}
    made: Any = (value,) if name == "steps" else value
    with pytest.raises(ConfigError, match=rf"{section}\.{name}.* is not between"):
        sections[section](**{name: made})


@pytest.mark.parametrize(("text", "words"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_refused_by_key_on_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | bytes, words: list[str]
) -> None:
    path = written(tmp_path, text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_server_config(path)
    message = one_line(caught.value)
    assert message.startswith(f"{path}: ")
    for word in words:
        assert word in message
    assert sorted(tmp_path.iterdir()) == [path]  # nothing was executed


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            load_server_config(path)
        assert str(path) in one_line(caught.value)


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (
            StreamConfig(max_hop_tokens=90),
            "stream.max_hop_tokens: 90 is not a multiple .* 25 tokens",
        ),
        (
            StreamConfig(max_hop_tokens=110),
            "stream.max_hop_tokens: 110 is not a multiple .* 25 tokens",
        ),
    ],
)
def test_a_hop_that_does_not_fit_the_model_is_refused_when_it_is_loaded(
    stream: StreamConfig, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Token2Wav.load(TINY, stream=stream, runtime=RuntimeConfig(device="cpu"))


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_devices_that_can_be_named(device: str) -> None:
    assert RuntimeConfig(device=device).device == device


def test_a_hash_identifies_configurations() -> None:
    first = config_hash(StreamConfig(), RuntimeConfig())
    assert first == config_hash(StreamConfig(), RuntimeConfig())
    assert len(first) == 12
    others = {
        config_hash(StreamConfig(first_tokens=0), RuntimeConfig()),
        config_hash(RuntimeConfig(), StreamConfig()),
    }
    assert first not in others
    assert len(others) == 2
