"""Connection settings of a client: address, TLS, headers and message size.

All settings are checked before the client connects.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from token2wav_client.errors import InputError

_HEADER_NAME = re.compile("[a-z0-9_.-]+")
_HEADER_VALUE = re.compile("[ -~]+")
# Headers that a user may not set, because gRPC sets them itself or gives them a meaning.
_RESERVED_HEADER = re.compile("grpc-.*|.*-bin|te|content-type|user-agent")
_ADDRESS = re.compile(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\]):([0-9]{1,9})")
_MAX_PORT = 65535
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|\[::1\]")
_MIB = 2**20
_MAX_MESSAGE_MIB = 2047  # gRPC stores the limit in bytes as a signed 32-bit integer
# The server closes connections that ping more often, as it would a flood (docs/security.md).
_LEAST_KEEPALIVE_S, _MOST_KEEPALIVE_S = 2, 86_400

_CHANNEL_OPTIONS = (
    # Every client has its own connections. So a client does not wait for the reconnection pause of
    # another client, and a load balancer can distribute the clients of one process over servers.
    ("grpc.use_local_subchannel_pool", 1),
    # By default, gRPC waits up to two minutes before it tries a failed address again. A restarted
    # server would not be found in time.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


@dataclass(frozen=True, kw_only=True)
class Tls:
    """TLS settings of a connection: the trusted authorities and the client's certificate. Raises
    InputError if a file cannot be used, or only one of `cert` and `key` is set.

    Attributes:
        ca: PEM file with the certificate authorities to trust; None for the public authorities that
            come with gRPC.
        cert: PEM file with this client's certificate, for a server that requires one.
        key: PEM file with the private key of the certificate, not encrypted.
        server_name: name to expect in the server's certificate, if it differs from the address.
    """

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            missing = "cert" if self.cert is None else "key"
            raise InputError(f"{missing}: missing; a certificate and its key are needed together")
        # gRPC accepts any bytes and fails later with the misleading message "no server". The files
        # are loaded here to report the actual problem at once.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.ca is not None:
            _check("ca", self.ca, lambda: context.load_verify_locations(self.ca))
        if self.cert is not None:
            cert, key = self.cert, self.key
            _check(
                "cert, key",
                f"{cert}, {key}",
                lambda: context.load_cert_chain(cert, key, _no_password),
            )

    def credentials(self) -> Any:
        """Returns the channel credentials for gRPC."""
        return grpc.ssl_channel_credentials(
            *(path and Path(path).read_bytes() for path in (self.ca, self.key, self.cert))
        )


def checked_metadata(
    url: str, tls: Tls | None, headers: Mapping[str, str], token: str | None
) -> tuple[tuple[str, str], ...]:
    """Checks the address, TLS, headers and token of a client. Raises InputError if an argument is
    invalid; the message names it.

    Returns:
        Metadata that every call carries: the headers and the access token.
    """
    address = _ADDRESS.fullmatch(url)
    if address is None:
        raise InputError(f"url: {url!r} is not host:port, as in localhost:8001 or [::1]:8001")
    host, port = address.groups()
    # gRPC would wrap a larger number and connect to another port.
    if not 1 <= int(port) <= _MAX_PORT:
        raise InputError(f"url: {url!r} has the port {port}, which is outside 1 to {_MAX_PORT}")
    metadata = dict(checked_headers(headers))
    if token is not None:
        if "authorization" in metadata:
            raise InputError("headers: authorization and a token are both set; remove one")
        if tls is None and not _LOOPBACK.fullmatch(host):
            raise InputError(f"token: it would be sent to {host} unencrypted; use TLS")
        metadata |= [_header("authorization", f"Bearer {token}", shown="token")]
    return tuple(metadata.items())


def checked_headers(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Returns headers as the metadata of a call. Raises InputError if a header is invalid; the
    message names it.
    """
    return tuple(_header(name, value) for name, value in headers.items())


def open_channel(
    library: Any, url: str, tls: Tls | None, max_message_mib: int, keepalive_s: float = 0.0
) -> Any:
    """Opens a channel of `library`, which connects on first use. Raises InputError if
    max_message_mib or keepalive_s is outside its range.

    Args:
        library: grpc, or grpc.aio for a channel of the running event loop.
        url: host:port of the server.
        tls: TLS settings; None for an unencrypted channel.
        max_message_mib: largest size of a request or a response in MiB.
        keepalive_s: seconds between pings; 0 for none.
    """
    if not 1 <= max_message_mib <= _MAX_MESSAGE_MIB:
        raise InputError(f"max_message_mib: {max_message_mib} is outside 1 to {_MAX_MESSAGE_MIB}")
    if keepalive_s and not _LEAST_KEEPALIVE_S <= keepalive_s <= _MOST_KEEPALIVE_S:
        raise InputError(
            f"keepalive_s: {keepalive_s:g} is neither 0 nor {_LEAST_KEEPALIVE_S} to "
            f"{_MOST_KEEPALIVE_S}"
        )
    limit = max_message_mib * _MIB
    options: list[tuple[str, str | int]] = [
        *_CHANNEL_OPTIONS,
        ("grpc.max_send_message_length", limit),
        ("grpc.max_receive_message_length", limit),
    ]
    if _LOOPBACK.fullmatch(url.rpartition(":")[0]):
        # The proxy of $http_proxy, which gRPC uses otherwise, would connect to its own machine.
        options.append(("grpc.enable_http_proxy", 0))
    if keepalive_s:
        options.append(("grpc.keepalive_time_ms", round(1000 * keepalive_s)))
        # By default, gRPC stops after two pings between which no tokens were sent.
        options.append(("grpc.http2.max_pings_without_data", 0))
    if tls is None:
        return library.insecure_channel(url, options=options)
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return library.secure_channel(url, tls.credentials(), options=options)


def _header(name: str, value: str, shown: str = "") -> tuple[str, str]:
    lower = name.lower()
    if not _HEADER_NAME.fullmatch(lower) or _RESERVED_HEADER.fullmatch(lower):
        raise InputError(
            f"headers: {name!r} is not a valid header name of a gRPC call, as in x-api-key"
        )
    if not _HEADER_VALUE.fullmatch(value) or value != value.strip():
        # The message does not contain the value, because it may be a secret.
        raise InputError(
            f"{shown or f'headers, {name}'}: expected printable ASCII without spaces around it"
        )
    return lower, value


def _check(field: str, shown: object, load: Any) -> None:
    try:
        load()
        return
    except ssl.SSLError as error:
        reason = (error.reason or "not PEM").lower().replace("_", " ")
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError:
        reason = "the key is encrypted"
    raise InputError(f"{field}: cannot use {shown} ({reason})")


def _no_password() -> str:
    raise ValueError
