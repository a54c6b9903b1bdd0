"""Settings of the gateway: one YAML file, in which unknown keys are errors."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from token2wav.config import strict_yaml
from token2wav.config.values import shown
from token2wav.errors import ConfigError
from token2wav.hub import HubError, model_folder
from token2wav.plugins import Plugins
from token2wav_client import ClientError, Tls
from token2wav_client.connection import checked_metadata
from token2wav_gateway.errors import GatewayError
from token2wav_gateway.forms import Pronunciations, matching

_LONGEST_SECRET = 4096  # characters


class SettingsError(GatewayError):
    """Error of the settings; the message names the file and the key."""


class Section(BaseModel):
    """Section of a file, in which an unknown key is an error, and every number is finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, values: Any) -> Any:
        if isinstance(values, dict):
            _check_keys(values, cls.model_fields)
        return values


def _check_keys(values: dict[Any, Any], known: Collection[str]) -> None:
    for key in values:
        if key not in known:
            raise ValueError(f"unknown key {shown(key)}; expected one of {', '.join(known)}")


Origin: TypeAlias = Annotated[
    str,
    matching(
        r"https?://[a-z0-9.:\[\]-]+",
        "http:// or https:// with a host in lower case, and perhaps with a port, as in "
        "https://shop.example",
    ),
]
_SectionT = TypeVar("_SectionT", bound=Section)


def _without_user(url: str) -> str:
    """Checks that an address contains no user and password. The message does not repeat it."""
    if "@" in url:
        raise ValueError(
            "a user or password before @ is not allowed, because addresses appear in logs; set "
            "api_key for a language model server, and token for a speech server"
        )
    return url


def _base_url(url: str) -> str:
    parts = urlsplit(url)  # ValueError for wrong brackets
    plain = not re.search(r"[\s?#]", url) and parts.port != 0  # ValueError for a wrong port
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
        raise ValueError(
            "must be http:// or https:// with a host, and perhaps with a port and a path, as in "
            "http://localhost:9000/v1"
        )
    return url


_Address = Annotated[str, AfterValidator(_without_user)]


def _secret(name: str, value: str | None, file: Path | None) -> str | None:
    """Returns a secret that stands in the settings or in a file.

    Raises:
        ValueError: it stands in both, or the file is empty or cannot be read.
    """
    if file is None:
        return value
    if value is not None:
        raise ValueError(f"{name} and {name}_file are both set; use one")
    try:
        with file.open(encoding="utf-8") as stream:
            secret = stream.read(_LONGEST_SECRET + 1).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}_file: {file} cannot be read: {error}") from None
    if not secret:
        raise ValueError(f"{name}_file: {file} is empty")
    if len(secret) > _LONGEST_SECRET:
        raise ValueError(f"{name}_file: {file} has more than {_LONGEST_SECRET} characters")
    return secret


class LanguageModelSettings(Section):
    """Language model server.

    Attributes:
        url: base URL of an OpenAI-style server, such as `http://localhost:9000/v1`.
        model: name that the server gives to the model.
        template: name of a template of the package, or path of a template file.
        folder: folder of the model with `cosyvoice3_metadata.json`, which contains the id of the
            first speech token; None for the `offset` of the template.
        api_key: key of the server; None for none.
        api_key_file: file with the key, instead of `api_key`.
        connect_timeout_s: seconds in which the server must accept a connection.
        token_timeout_s: seconds without a byte from the server after which the request fails.
    """

    url: Annotated[_Address, AfterValidator(_base_url)] = "http://localhost:9000/v1"
    model: str = "speech"
    template: str = "cosyvoice3"
    folder: Path | None = None
    api_key: str | None = None
    api_key_file: Path | None = None
    connect_timeout_s: Annotated[float, Field(gt=0, le=60)] = 5.0
    token_timeout_s: Annotated[float, Field(gt=0, le=600)] = 30.0

    @model_validator(mode="after")
    def _check(self) -> LanguageModelSettings:
        self.key()
        return self

    def key(self) -> str | None:
        """Returns the key of the server; None for none.

        Raises:
            ValueError: as `_secret`; or the key does not fit into a header. The message does not
                contain the key.
        """
        key = _secret("api_key", self.api_key, self.api_key_file)
        if key is not None and not re.fullmatch(r"[!-~]+", key):
            raise ValueError("api_key: has a space, a line break or a character outside ASCII")
        return key


def _read_tls(values: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """Checks the options of `token2wav_client.Tls`, which reads its files."""
    if isinstance(values, dict):
        _check_keys(values, [field.name for field in fields(Tls)])
    try:
        return read(values)
    except ClientError as error:
        raise ValueError(str(error)) from None


class SpeechServerSettings(Section):
    """Speech server, a Triton server with the model `token2wav`.

    Attributes:
        url: host:port of its gRPC endpoint.
        token: access token; None for none.
        token_file: file with the access token, instead of `token`.
        tls: encryption of the connection, with the fields of `token2wav_client.Tls`; None for an
            unencrypted connection.
        response_timeout_s: seconds without a response that the server owes.
    """

    url: _Address = "localhost:8001"
    token: str | None = None
    token_file: Path | None = None
    tls: Annotated[Tls | None, WrapValidator(_read_tls)] = None
    response_timeout_s: Annotated[float, Field(gt=0, le=600)] = 30.0

    @model_validator(mode="after")
    def _check(self) -> SpeechServerSettings:
        try:
            checked_metadata(self.url, self.tls, {}, self.access_token())
        except ClientError as error:
            raise ValueError(str(error)) from None
        return self

    def access_token(self) -> str | None:
        """Returns the access token; None for none."""
        return _secret("token", self.token, self.token_file)


class VoiceSettings(Section):
    """Voices that clients choose by name.

    Attributes:
        folder: folder of the voices; None for a model without voices, such as a codec.
        model: model folder, or a name, with a speech tokenizer and `campplus.onnx`, which turn a
            recording into a voice; None if clients cannot create voices.
        default: voice that speaks for the names of OpenAI's voices, such as `alloy`; None to refuse
            a name without a file.
        most: largest number of voices.
        longest_s: longest recording in seconds.
    """

    folder: Path | None = None
    model: str | Path | None = None
    default: str | None = None
    most: Annotated[int, Field(ge=1, le=100_000)] = 100
    longest_s: Annotated[float, Field(gt=0, le=30)] = 30.0


class AlignerSettings(Section):
    """Aligner, which finds the times of words (`word_timestamps`).

    Attributes:
        name: name of an installed aligner, such as `pocketsphinx`; None for no times of words.
        timeout_s: seconds within which the aligner must answer, also after the end of the audio.
        longest_s: longest audio that is aligned, in seconds.
        waiting: texts that are aligned at once, each for as long as its audio arrives.
        memory_mib: most memory of its process, in MiB of addresses.
    """

    name: str | None = None
    timeout_s: Annotated[float, Field(gt=0, le=60)] = 10.0
    longest_s: Annotated[float, Field(gt=0, le=600)] = 60.0
    waiting: Annotated[int, Field(ge=1, le=1024)] = 16
    memory_mib: Annotated[int, Field(ge=256, le=1 << 16)] = 1024


class TextSettings(Section):
    """Changes to texts before they are spoken.

    Attributes:
        normalise: name of an installed normaliser, which writes numbers and abbreviations as words,
            such as `wetext`; None for none.
        pronunciations: spellings of words for the language model.
    """

    normalise: str | None = None
    pronunciations: Pronunciations = Field(default_factory=dict)


class KeySettings(Section):
    """Access key.

    Attributes:
        name: name of the holder, for logs and metrics.
        sha256: SHA-256 of the key in hexadecimal digits. The key itself is stored nowhere.
        streams: largest number of requests at the same time.
        requests_per_minute: largest number of requests that start within a minute. Each sentence of
            a WebSocket is a request too.
    """

    name: str
    sha256: Annotated[str, matching("[0-9a-f]{64}", "64 hexadecimal digits in lower case")]
    streams: Annotated[int, Field(ge=1)] = 8
    requests_per_minute: Annotated[int, Field(ge=1)] = 600


class LimitSettings(Section):
    """Limits of every request.

    Attributes:
        streams: largest number of requests that speak at the same time.
        text_characters: longest text, and longest instructions.
        body_bytes: largest body of a request without a recording.
        upload_bytes: largest body of a request with a recording.
        speech_tokens: largest number of speech tokens that the language model may send for a text.
        seconds: longest duration of a text, and of the arrival of a body.
        sockets: largest number of open WebSockets.
        idle_s: seconds without a message after which a WebSocket that speaks nothing is closed, and
            seconds in which nothing more can be sent to a client after which it is dropped.
        text_wait_s: seconds that words of a WebSocket wait for the end of their sentence while
            nothing is spoken. Then they are spoken up to the last comma, or the last complete word.
        ahead_s: seconds of audio that may wait for a client that reads slowly, or for the speech
            server. The language model is read no further meanwhile. A chunk of the speech server
            has up to 8 s.
    """

    streams: Annotated[int, Field(ge=1)] = 64
    text_characters: Annotated[int, Field(ge=1)] = 4096
    body_bytes: Annotated[int, Field(ge=1024)] = 1 << 20
    upload_bytes: Annotated[int, Field(ge=1024)] = 16 << 20
    speech_tokens: Annotated[int, Field(ge=1)] = 4096
    seconds: Annotated[float, Field(gt=0)] = 300.0
    sockets: Annotated[int, Field(ge=1)] = 256
    idle_s: Annotated[float, Field(gt=0)] = 60.0
    text_wait_s: Annotated[float, Field(gt=0)] = 1.2
    ahead_s: Annotated[float, Field(ge=5)] = 10.0


class Settings(Section):
    """Settings of the gateway.

    Attributes:
        models: names by which clients may call the model; the first is the name that is reported.
        keys: access keys; empty to admit every client.
        origins: origins of web pages that may use the gateway from a browser, such as
            `https://shop.example`, besides pages of the gateway's own host.
        log_level: level of the log. There is no `debug`, because libraries would log the texts and
            the keys of clients.
    """

    language_model: LanguageModelSettings = LanguageModelSettings()
    speech_server: SpeechServerSettings = SpeechServerSettings()
    voices: VoiceSettings = VoiceSettings()
    aligner: AlignerSettings = AlignerSettings()
    text: TextSettings = TextSettings()
    limits: LimitSettings = LimitSettings()
    keys: tuple[KeySettings, ...] = ()
    origins: tuple[Origin, ...] = ()
    models: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "token2wav",
        "tts-1",
        "tts-1-hd",
        "gpt-4o-mini-tts",
        "gpt-4o-mini-tts-2025-12-15",
        "gpt-realtime",
    )
    log_level: Literal["info", "warning", "error"] = "info"


def read_settings(path: Path | None) -> Settings:
    """Reads a settings file; without a file every setting has its default.

    Raises:
        SettingsError: the file cannot be read, a value is unknown, of another type or out of range,
            a folder or file of the voices does not exist, or their model cannot be pulled.
    """
    if path is None:
        return Settings()
    settings = validated(Settings, read_yaml(path), path)
    check_voices(settings.voices, path)
    return settings


def check_voices(voices: VoiceSettings, path: Path) -> None:
    """Checks the folders of the voices, and pulls a model that is a name.

    `VoiceSettings` does not check them, because a container's settings are also read on machines
    without its folders.

    Raises:
        SettingsError: a folder or a file does not exist, or the model cannot be pulled. The message
            names `path`.
    """
    if voices.model is not None:
        try:
            is_folder = model_folder(voices.model, "front_end").is_dir()
        except HubError as error:
            raise SettingsError(f"{path}: voices.model: {error}") from None
        if not is_folder:
            raise SettingsError(f"{path}: voices.model: {voices.model} is no folder")
    if voices.folder is not None and voices.folder.exists() and not voices.folder.is_dir():
        raise SettingsError(f"{path}: voices.folder: {voices.folder} is no folder")
    if voices.default is None:
        return
    if voices.folder is None:
        raise SettingsError(f"{path}: voices.default: needs voices.folder")
    if voices.default not in {file.stem for file in voices.folder.glob("*.safetensors")}:
        raise SettingsError(
            f"{path}: voices.default: {shown(voices.default)} has no file "
            f"{voices.default}.safetensors in {voices.folder}"
        )


def check_plugin(setting: str, name: str | None, plugins: Plugins) -> None:
    """Checks the plugin of a setting; None names no plugin.

    Raises:
        SettingsError: no plugin has this name, or it cannot be imported, such as for a package that
            is not installed.
    """
    if name is None:
        return
    try:
        plugins.load(name)
    except (LookupError, ImportError) as error:
        raise SettingsError(f"{setting}: {error}") from None


def read_yaml(path: Path) -> Any:
    """Reads a YAML file as data; an empty file is an empty mapping.

    Raises:
        SettingsError: the file cannot be read, is too large, is no YAML, or has a key twice.
    """
    try:
        document = strict_yaml.read_yaml(path)
    except (ConfigError, ValueError) as error:  # ValueError for a path with a zero byte
        raise SettingsError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    return {} if document is None else document


def validated(kind: type[_SectionT], document: Any, path: Path) -> _SectionT:
    """Checks a document against a model of pydantic.

    Raises:
        SettingsError: the message names the file, the first key at fault, and the reason.
    """
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        reason = first["msg"].removeprefix("Value error, ")
        raise SettingsError(f"{path}: {key or 'document'}: {reason}") from None
