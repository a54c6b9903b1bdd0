"""Access rules of a server: TLS, and the protocols of Triton that need a key.

Triton offers more protocols than clients need, and some are dangerous. A client that may register
shared memory or enable traces can crash the server or write its files. So shared memory is closed
to everybody, and model repository, traces and logging need the admin key. HTTP has no TLS here, so
inference over HTTP needs the admin key too, unless an option opens it to everybody.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from token2wav.errors import ConfigError
from token2wav.serving.door.sequences import CLIENT_HEADER

if TYPE_CHECKING:
    from token2wav_client import Tls

KEY_NAME = "admin-key"  # header `admin-key` of HTTP, `triton-grpc-protocol-admin-key` of gRPC
_CLOSED = "model-repository,trace,logging"
_KEY_BYTES = 32
_SHORTEST_KEY = 16


@dataclass(frozen=True)
class Certificates:
    """TLS certificates of a server, with the authorities that sign certificates of clients.

    Attributes:
        certificate: PEM file with the certificate of the server, followed by the intermediate
            certificates up to the authority.
        key: PEM file with the private key, not encrypted.
        client_ca: PEM file with certificate authorities. The certificate of every client must be
            signed by an authority in this file. None admits clients without a certificate.

    Raises:
        ConfigError: a file cannot be used. The message names the file.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def __post_init__(self) -> None:
        self._server()  # reads and checks all files

    def arguments(self) -> list[str]:
        """Returns the options of tritonserver that enable TLS."""
        files = [f"--grpc-server-cert={self.certificate}", f"--grpc-server-key={self.key}"]
        mutual_tls = (
            ["--grpc-use-ssl-mutual=true", f"--grpc-root-cert={self.client_ca}"]
            if self.client_ca
            else []
        )
        return ["--grpc-use-ssl=true", *files, *mutual_tls]

    def for_canary(self) -> Tls:
        """Returns the TLS settings with which the canary connects to the server.

        The canary trusts only the server's own certificate file. If clients need a certificate, the
        canary presents the certificate of the server as its own. The files are read by this call,
        and not again for each connection: the server reads a renewed certificate at its next start,
        so until then the canary must not.

        Raises:
            ConfigError: the certificate has no subjectAltName, or is not valid, or is not signed by
                an authority in `client_ca`.
        """
        from token2wav_client import Tls

        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        client.load_verify_locations(self.certificate)
        client.load_cert_chain(self.certificate, self.key)
        signature = (
            f" that {self.client_ca} signed for use by clients too" if self.client_ca else ""
        )
        with _explained(
            f"certificate {self.certificate}: the canary needs a valid certificate{signature}; "
            "replace it, or set --canary-seconds=0"
        ):
            certificate = _handshake(self._server(), client)
        names = [
            str(name)
            for kind, name in certificate.get("subjectAltName", ())
            if kind in ("DNS", "IP Address")
        ]
        if not names:
            raise ConfigError(
                f"certificate {self.certificate}: names no host; it needs a subjectAltName"
            )
        cert, key = (self.certificate, self.key) if self.client_ca else (None, None)
        name = names[0].replace("*", "any", 1)
        credentials = Tls(ca=self.certificate, cert=cert, key=key).credentials()

        class ReadTls(Tls):
            """TLS settings whose files were read already."""

            def credentials(self) -> Any:
                return credentials

        return ReadTls(server_name=name)

    def _server(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with _explained(
            f"certificate {self.certificate} with key {self.key}: not a PEM certificate and "
            "its private key"
        ):
            context.load_cert_chain(self.certificate, self.key, _refuse_password)
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            with _explained(f"client CA {self.client_ca}: not a PEM file with certificates"):
                context.load_verify_locations(self.client_ca)
        return context


@dataclass(frozen=True)
class Access:
    """Access rules of one server.

    Attributes:
        certificates: certificates for TLS on gRPC; None for gRPC without encryption.
        admin_key: key for the protocols that are closed without it; by default a random key that is
            not published.
    """

    certificates: Certificates | None = None
    admin_key: str = field(default_factory=lambda: secrets.token_urlsafe(_KEY_BYTES), repr=False)
    http_inference: bool = False

    def arguments(self) -> list[str]:
        """Returns the options of tritonserver that close protocols and enable TLS."""
        nobodys_key = secrets.token_urlsafe(_KEY_BYTES)
        inference = "" if self.http_inference else ",inference"
        return [
            f"--grpc-restricted-protocol={_CLOSED}:{KEY_NAME}={self.admin_key}",
            f"--grpc-restricted-protocol=shared-memory:{KEY_NAME}={nobodys_key}",
            f"--http-restricted-api={_CLOSED}{inference}:{KEY_NAME}={self.admin_key}",
            f"--http-restricted-api=shared-memory:{KEY_NAME}={nobodys_key}",
            # Triton adds the header to the parameters of each request.
            f"--grpc-header-forward-pattern=^{CLIENT_HEADER}$",
            *(self.certificates.arguments() if self.certificates else []),
        ]


def read_or_make_key(file: Path) -> str:
    """Returns the admin key in a file.

    If the file does not exist, it is created with a random key, and only its owner can read it.

    Raises:
        ConfigError: the file can be neither read nor created, or does not contain a key of at least
            16 letters, digits, - and _.
    """
    subject = f"admin key file {file}"
    with _explained(subject):
        with (
            contextlib.suppress(FileExistsError),
            open(file, "x", opener=partial(os.open, mode=0o600)) as new_file,
        ):
            new_file.write(f"{secrets.token_urlsafe(_KEY_BYTES)}\n")
        key = file.read_text(encoding="ascii").strip()
    if len(key) < _SHORTEST_KEY or not key.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(
            f"{subject}: expected at least {_SHORTEST_KEY} letters, digits, - and _; delete "
            "the file to create a new key"
        )
    return key


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """Performs a TLS handshake in memory, and returns the certificate that the client received.

    Python's standard library has no other way to read the fields of a certificate, or to find out
    whether the other side accepts it.
    """
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = client.wrap_bio(to_client, to_server)
    unfinished = [client_side, server.wrap_bio(to_server, to_client, server_side=True)]
    while unfinished:
        for side in list(unfinished):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
                unfinished.remove(side)
    return client_side.getpeercert() or {}


@contextlib.contextmanager
def _explained(subject: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"{subject} ({getattr(error, 'strerror', None) or error})") from None


def _refuse_password() -> str:
    raise ValueError("the key is encrypted")
