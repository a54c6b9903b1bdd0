"""Settings of the gateway: refused values, each with the name of its setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.tables import table
from token2wav import hub
from token2wav_gateway.settings import Settings, SettingsError, read_settings

# Text of a file, and the message about it. FOLDER has the voice anna, and a file without a voice.
REFUSED = table(
    r"""
limits: {streams: 0} | limits\.streams: .*greater than or equal to 1
limits: {stream: 1} | limits: unknown key 'stream'; expected one of streams,
limit: {streams: 1} | document: unknown key 'limit'; expected one of language_model,
limits: {streams: 1, streams: 2} | line 1: key 'streams' appears more than once
limits: {}\nmodels: [a]\nlimits: {} | key 'limits' appears more than once, first in li
limits: {seconds: .inf} | limits\.seconds: .*finite number
limits: {idle_s: .nan} | limits\.idle_s: .*finite number
language_model: {token_timeout_s: 1e400} | token_timeout_s: .*finite number
keys: [{name: a, sha256: abc}] | keys\.0\.sha256: expected 64 hexadecimal digits
models: [] | models: .*at least 1 item
aligner: {timeout_s: 0} | aligner\.timeout_s: .*greater than 0
aligner: {memory_mib: 100} | aligner\.memory_mib: .*greater than or equal to 256
aligner: {language: en} | aligner: unknown key 'language'; expected one of name,
3 | valid dictionary
a: [ | while parsing
origins: ['shop.example'] | origins\.0: expected http:// or https:// with a host
origins: ['https://shop.example/'] | origins\.0: expected http:// or https:// with a host
origins: ['*'] | origins\.0: expected http:// or https:// with a host
origins: ['null'] | origins\.0: expected http:// or https:// with a host
speech_server: {url: nowhere} | speech_server: .*url: 'nowhere'
speech_server: {token: a, token_file: b} | token and token_file are both set
speech_server: {token_file: /nowhere} | token_file: /nowhere cannot be read
speech_server: {token_file: /dev/null} | token_file: /dev/null is empty
speech_server: {url: 'far:8001', token: a} | speech_server: .*TLS
speech_server: {tls: {ca: 5}} | speech_server\.tls\.ca.*: Input is not a valid path
speech_server: {tls: {file: a}} | speech_server\.tls: unknown key 'file'; expected one of ca, cert
speech_server: {tls: {cert: a.crt}} | speech_server\.tls: .*key: missing
speech_server: {tls: {ca: /nowhere}} | speech_server\.tls: .*ca: cannot
language_model: {api_key_file: /nowhere} | api_key_file: /nowhere cannot be read
language_model: {url: 'localhost:9000'} | language_model\.url:
language_model: {url: '//localhost:9000/v1'} | language_model\.url:
language_model: {url: 'ftp://localhost/v1'} | language_model\.url:
language_model: {url: 'file:///v1'} | language_model\.url:
language_model: {url: 'http://'} | language_model\.url:
language_model: {url: 'http:///v1'} | language_model\.url:
language_model: {url: 'http://:9000/v1'} | language_model\.url:
language_model: {url: 'http://local host/v1'} | language_model\.url:
language_model: {url: 'http://localhost:99999/v1'} | language_model\.url:
language_model: {url: 'http://localhost:0/v1'} | language_model\.url:
language_model: {url: 'http://localhost:port/v1'} | language_model\.url:
language_model: {url: 'http://[::1/v1'} | language_model\.url:
language_model: {url: 'http://localhost/v1?key=a'} | language_model\.url:
language_model: {url: 'http://localhost/v1#a'} | language_model\.url:
language_model: {url: ''} | language_model\.url:
language_model: {url: 'http://anna:pass1@host/v1'} | language_model\.url: a user or password
language_model: {url: 'ftp://anna:pass1@host'} | language_model\.url: a user or password
language_model: {url: 'anna:pass1@host:1'} | language_model\.url: a user or password
language_model: {url: 'pass1@host'} | language_model\.url: a user or password
speech_server: {url: 'http://anna:pass1@host/v1'} | speech_server\.url: a user or password
speech_server: {url: 'pass1@host'} | speech_server\.url: a user or password
voices: {model: nowhere} | voices\.model: nowhere is no folder
voices: {model: FOLDER/file} | voices\.model: .*file is no folder
voices: {model: ./acme/flow} | voices\.model: \./acme/flow is no folder
voices: {folder: FOLDER/file} | voices\.folder: .*file is no folder
voices: {folder: FOLDER, default: joe} | voices\.default: 'joe' has no file joe.safetensors in
voices: {folder: FOLDER/new, default: joe} | voices\.default: 'joe' has no file
voices: {folder: FOLDER, default: ../anna} | voices\.default: '../anna' has no file
voices: {default: anna} | voices\.default: needs voices\.folder
"""
)
TAKEN = (
    "language_model: {url: 'http://localhost:9000/v1'}",
    "language_model: {url: 'https://models.example'}",
    "language_model: {url: 'http://[::1]:9000/v1/'}",
    "voices: {folder: FOLDER, default: anna}",
    "voices: {folder: FOLDER/new, model: FOLDER}",
)


def read(folder: Path, text: str) -> Settings:
    """Reads the settings in a text, in which FOLDER is a folder of voices."""
    (voices := folder / "voices").mkdir()
    for name in ("file", "anna.safetensors"):
        (voices / name).touch()
    (path := folder / "gateway.yaml").write_text(text.replace("FOLDER", str(voices)))
    return read_settings(path)


@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_wrong_settings_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason) as caught:
        read(tmp_path, text)
    assert "pass1" not in str(caught.value)


@pytest.mark.parametrize("text", TAKEN)
def test_settings_that_are_taken(tmp_path: Path, text: str) -> None:
    read(tmp_path, text)


def test_a_name_in_place_of_a_model_folder_is_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = []

    def pull(*arguments: str) -> Path:
        pulled.append(arguments)
        return tmp_path

    monkeypatch.setattr(hub, "pull", pull)
    read(tmp_path, "voices: {model: acme/flow@v1}")
    assert pulled == [("acme/flow", "v1", "front_end")]


def test_a_name_that_cannot_be_pulled_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pull(*_: str) -> Path:
        raise hub.HubError("acme/flow: no such model")

    monkeypatch.setattr(hub, "pull", pull)
    with pytest.raises(SettingsError, match=r"voices\.model: acme/flow: no such model"):
        read(tmp_path, "voices: {model: acme/flow}")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("old key\n", "api_key: has a space"),
        ("old\nnew\n", "api_key: has a space, a line break"),
        ("schlüssel", "outside ASCII"),
        ("k" * 5000, "has more than 4096 characters"),
    ],
)
def test_a_refused_key_is_not_repeated(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(content)
    path = tmp_path / "gateway.yaml"
    path.write_text(f"language_model: {{api_key_file: {tmp_path / 'key'}}}")
    with pytest.raises(SettingsError, match=reason) as caught:
        read_settings(path)
    assert content.strip() not in str(caught.value)


def test_missing_settings_are_refused_and_none_are_the_defaults(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        read_settings(tmp_path / "gateway.yaml")
    assert read_settings(None).limits.streams == 64
