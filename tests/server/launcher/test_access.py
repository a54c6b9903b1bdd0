"""Files of certificates and of the admin key that cannot be used. tests/served/test_tls.py has
servers that use such files.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.certificates import Authority, self_signed
from token2wav import ConfigError
from token2wav_server.launcher.access import Certificates, read_or_make_key


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"), "token2wav.test")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("stranger"), "token2wav.test")


def test_certificates_that_cannot_be_used(
    authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    certificate, key = authority.certificate("token2wav.test"), authority.key("token2wav.test")
    junk = tmp_path / "junk"
    junk.write_text("no certificate")
    for files, problem in (
        ((tmp_path / "none", key), "No such file or directory"),
        ((junk, key), "certificate .*junk with key "),
        ((certificate, stranger.key("token2wav.test")), "key values mismatch"),
        ((certificate, _encrypted(key, tmp_path)), "the key is encrypted"),
    ):
        with pytest.raises(ConfigError, match=problem):
            Certificates(*files)
    with pytest.raises(ConfigError, match=r"client CA .*junk"):
        Certificates(certificate, key, junk)
    with pytest.raises(
        ConfigError,
        match=r"the canary needs a valid certificate that .* signed for use by clients too",
    ):
        Certificates(certificate, key, stranger.ca).for_canary()
    with pytest.raises(
        ConfigError, match=r"nameless\.crt: names no host; it needs a subjectAltName"
    ):
        Certificates(*self_signed(tmp_path)).for_canary()


def test_a_key_file_that_is_no_key(tmp_path: Path) -> None:
    file = tmp_path / "key"
    made = read_or_make_key(file)
    assert len(made) >= 32
    assert read_or_make_key(file) == made
    for text in ("short", "with spaces in between it", "äöüäöüäöüäöüäöüäöü"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"^admin key file "):
            read_or_make_key(file)
    with pytest.raises(ConfigError, match="No such file or directory"):
        read_or_make_key(tmp_path / "none" / "key")


def _encrypted(key: Path, folder: Path) -> Path:
    out = folder / "encrypted.key"
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", key, "-out", out, "-passout", "pass:secret"],
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    return out
