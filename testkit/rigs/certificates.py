"""Certificates of an authority of our own, made with openssl as docs/security.md says."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from testkit.patience import PATIENCE_SECONDS

SCRIPT = Path(__file__).resolve().parents[2] / "docker" / "tls" / "make_certificates.sh"


@dataclass(frozen=True)
class Authority:
    """Folder with a certificate authority and the certificates that it has signed."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, *names: str) -> Authority:
        """Signs a certificate for each server in `names`, and for one client, `client`."""
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed: apt-get install openssl")
        subprocess.run(
            ["bash", SCRIPT, folder, *names],
            check=True,
            capture_output=True,
            timeout=PATIENCE_SECONDS,
        )
        return cls(folder)

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    def certificate(self, name: str) -> Path:
        return self.folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def both(self, name: str) -> Path:
        """Certificate and key in one file, as HAProxy wants them."""
        return self.folder / f"{name}.pem"


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Makes a certificate without a host name and its key."""
    certificate, key = folder / "nameless.crt", folder / "nameless.key"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=a"]
    subprocess.run(
        [*request, "-out", certificate, "-keyout", key],
        check=True,
        capture_output=True,
        timeout=PATIENCE_SECONDS,
    )
    return certificate, key
