"""Settings of the gateway: what is refused at the start, and by which name."""

from __future__ import annotations

from pathlib import Path

import pytest

from token2wav_gateway.settings import SettingsError, read_settings


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("limits: {streams: 0}", r"limits\.streams: .*greater than or equal to 1"),
        (
            "limits: {stream: 1}",
            r"limits: unknown key 'stream'; expected one of streams, ",
        ),
        ("limit: {streams: 1}", r"document: unknown key 'limit'; expected one of language_model, "),
        ("limits: {streams: 1, streams: 2}", "line 1: key 'streams' appears more than once"),
        ("limits: {}\nmodels: [a]\nlimits: {}", "key 'limits' appears more than once, first in li"),
        ("limits: {seconds: .inf}", r"limits\.seconds: .*finite number"),
        ("limits: {idle_s: .nan}", r"limits\.idle_s: .*finite number"),
        ("language_model: {token_timeout_s: 1e400}", "token_timeout_s: .*finite number"),
        ("keys: [{name: a, sha256: abc}]", r"keys\.0\.sha256: expected 64 hexadecimal digits"),
        ("models: []", "models: .*at least 1 item"),
        ("aligner: {timeout_s: 0}", r"aligner\.timeout_s: .*greater than 0"),
        ("aligner: {memory_mib: 100}", r"aligner\.memory_mib: .*greater than or equal to 256"),
        ("aligner: {language: en}", r"aligner: unknown key 'language'; expected one of name, "),
        ("3", "valid dictionary"),
        ("a: [", "while parsing"),
        ("speech_server: {url: nowhere}", "speech_server: .*url: 'nowhere'"),
        ("speech_server: {token: a, token_file: b}", "token and token_file are both set"),
        ("speech_server: {token_file: /nowhere}", "token_file: /nowhere cannot be read"),
        ("speech_server: {token_file: /dev/null}", "token_file: /dev/null is empty"),
        ("speech_server: {url: 'far:8001', token: a}", "speech_server: .*TLS"),
        ("speech_server: {tls: {cert: a.crt}}", r"speech_server\.tls: .*key: missing"),
        ("speech_server: {tls: {ca: /nowhere}}", r"speech_server\.tls: .*ca: cannot"),
        ("language_model: {api_key_file: /nowhere}", "api_key_file: /nowhere cannot be read"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=reason):
        read_settings(path)


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


@pytest.mark.parametrize(
    ("url", "good"),
    [
        ("http://localhost:9000/v1", True),
        ("https://models.example", True),
        ("http://[::1]:9000/v1/", True),
        ("localhost:9000", False),
        ("//localhost:9000/v1", False),
        ("ftp://localhost/v1", False),
        ("file:///v1", False),
        ("http://", False),
        ("http:///v1", False),
        ("http://:9000/v1", False),
        ("http://local host/v1", False),
        ("http://localhost:99999/v1", False),
        ("http://localhost:0/v1", False),
        ("http://localhost:port/v1", False),
        ("http://[::1/v1", False),
        ("http://localhost/v1?key=a", False),
        ("http://localhost/v1#a", False),
        ("", False),
    ],
)
def test_the_url_of_a_language_model(url: str, good: bool, tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(f"language_model: {{url: '{url}'}}")
    if good:
        assert read_settings(path).language_model.url == url
    else:
        with pytest.raises(SettingsError, match=r"language_model\.url: "):
            read_settings(path)


@pytest.mark.parametrize("section", ["language_model", "speech_server"])
@pytest.mark.parametrize(
    "url", ["http://anna:pass1@host/v1", "ftp://anna:pass1@host", "anna:pass1@host:1", "pass1@host"]
)
def test_a_password_in_an_address_is_refused_and_not_repeated(
    section: str, url: str, tmp_path: Path
) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(f"{section}: {{url: '{url}'}}")
    with pytest.raises(SettingsError, match=rf"{section}\.url: a user or password") as caught:
        read_settings(path)
    assert "pass1" not in str(caught.value)


@pytest.mark.parametrize(
    ("voices", "reason"),
    [
        ("model: nowhere", r"voices\.model: nowhere is no folder"),
        ("model: FOLDER/file", r"voices\.model: .*file is no folder"),
        ("folder: FOLDER/file", r"voices\.folder: .*file is no folder"),
        ("folder: FOLDER, default: joe", r"voices\.default: 'joe' has no file joe.safetensors in "),
        ("folder: FOLDER/new, default: joe", r"voices\.default: 'joe' has no file"),
        ("folder: FOLDER, default: ../anna", r"voices\.default: '../anna' has no file"),
        ("default: anna", r"voices\.default: needs voices\.folder"),
        ("folder: FOLDER, default: anna", ""),
        ("folder: FOLDER/new, model: FOLDER", ""),
    ],
)
def test_folders_of_voices(voices: str, reason: str, tmp_path: Path) -> None:
    folder, path = tmp_path / "voices", tmp_path / "gateway.yaml"
    folder.mkdir()
    (folder / "file").touch()
    (folder / "anna.safetensors").touch()
    path.write_text(f"voices: {{{voices.replace('FOLDER', str(folder))}}}")
    if reason:
        with pytest.raises(SettingsError, match=reason):
            read_settings(path)
    else:
        read_settings(path)
