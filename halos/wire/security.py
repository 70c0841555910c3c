"""Who may connect to whom: mutual TLS and a join token, or plain on this machine alone."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import grpc

from halos.errors import UserError
from halos.wire.roles import JOINING, SERVING, Role, may_open, peer_role

__all__ = [
    "Security",
    "check_dial",
    "check_listen",
    "explain",
    "hash_of",
    "is_loopback",
    "may_open",
    "peer_role",
    "split_address",
    "was_closed",
    "will_not_heal",
]

log = logging.getLogger(__name__)

SERVER_NAME = "halos"  # in every certificate that serves, so that none depends on an address
TOKEN_VARIABLE = "HALOS_TOKEN"
HASH = re.compile(r"[0-9a-f]{64}")
TOKEN = re.compile(r"[!-~]{16,512}")

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, repr=False)
class Security:
    """One process's certificate and token, or, all empty, a plain connection.

    ``repr`` tells whose they are and never shows a secret.
    """

    folder: Path | None = None
    role: Role | None = None
    name: str = ""
    authority: bytes = b""
    certificate: bytes = b""
    key: bytes = b""
    token: str | None = None
    token_hash: str | None = None

    @classmethod
    def plain(cls) -> Self:
        """No encryption and no token."""
        return cls()

    @classmethod
    def from_folder(cls, folder: Path, *, now: datetime | None = None) -> Self:
        """Read a folder that ``halos certs issue`` wrote.

        HALOS_TOKEN in the environment replaces the token, and what is compared with. Raises
        ``UserError`` for anything that a handshake would stumble over.
        """
        from halos.wire.identity import CA, CERTIFICATE, KEY, read_identity

        identity = read_identity(folder, now or datetime.now(UTC))
        token, token_hash = _read_token(folder, identity.role)
        return cls(
            folder=folder,
            role=identity.role,
            name=identity.name,
            authority=(folder / CA).read_bytes(),
            certificate=(folder / CERTIFICATE).read_bytes(),
            key=(folder / KEY).read_bytes(),
            token=token,
            token_hash=token_hash,
        )

    def __repr__(self) -> str:
        return f"Security({self.folder}, {self.role}:{self.name})" if self.tls else "Security()"

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted and both ends known."""
        return bool(self.certificate)

    def server_credentials(
        self, begun: Callable[[], None] = lambda: None
    ) -> grpc.ServerCredentials | None:
        """For ``add_secure_port``; None for ``add_insecure_port``. Clients need a certificate.

        ``begun`` is called, in a thread of gRPC's, whenever somebody connects.
        """
        if not self.tls:
            return None
        pairs = [(self.key, self.certificate)]
        shown = grpc.ssl_server_certificate_configuration(pairs, self.authority)

        def asked() -> grpc.ServerCertificateConfiguration:
            begun()
            return shown

        return grpc.dynamic_ssl_server_credentials(shown, asked, require_client_authentication=True)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """For ``secure_channel``; None for ``insecure_channel``."""
        if not self.tls:
            return None
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """What a channel needs besides: servers answer to one name at every address."""
        return (("grpc.ssl_target_name_override", SERVER_NAME),) if self.tls else ()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries: the join token, if there is one."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def admits(self, metadata: Metadata | None) -> bool:
        """Whether a call's metadata carries the join token. A plain server asks for none."""
        if not self.tls:
            return True
        given = [value for key, value in metadata or () if key == "authorization"]
        if len(given) != 1 or self.token_hash is None:
            return False
        value = given[0] if isinstance(given[0], str) else given[0].decode("ascii", "replace")
        scheme, _, token = value.partition(" ")
        matches = hmac.compare_digest(hash_of(token), self.token_hash)
        return matches and scheme.lower() == "bearer"

    def refusal(
        self,
        metadata: Metadata | None,
        auth_context: Mapping[str, Iterable[bytes]],
        wanted: str,
    ) -> tuple[grpc.StatusCode, str] | None:
        """Why a caller may not open a session as ``wanted``, as arguments of ``abort``; or None.

        ``wanted`` is one of worker, server, operator (status and orders) and observer.
        """
        if not self.admits(metadata):
            return grpc.StatusCode.UNAUTHENTICATED, "the call does not carry this run's join token"
        if not self.tls or may_open(role := peer_role(auth_context), wanted):
            return None
        reason = (
            f"a certificate of role {role} may not open a session as {wanted}; use one that was "
            "issued for that role"
        )
        return grpc.StatusCode.PERMISSION_DENIED, reason


def hash_of(token: str) -> str:
    """A token as servers keep it: SHA-256 in hexadecimal."""
    return hashlib.sha256(token.encode()).hexdigest()


def split_address(address: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[IPV6]:PORT`` in its parts. Raises ``UserError`` for anything else."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    number = int(port) if port.isascii() and port.isdigit() else -1
    if not colon or not 0 <= number <= 65535 or (":" in host and not bracketed):
        raise UserError(
            f"address: {address!r} is not of the form HOST:PORT or [IPV6]:PORT; give, for "
            "example, 127.0.0.1:7443"
        )
    return host[1:-1] if bracketed else host, number


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine alone. An empty host, 0.0.0.0 and :: are every address."""
    if host.lower() == "localhost":
        return True
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped.is_loopback
    return parsed.is_loopback


def check_listen(address: str, security: Security, insecure: bool) -> None:
    """Raise ``UserError`` unless it is safe to listen on ``address`` (HOST:PORT) like this.

    Plain is, on this machine alone. ``insecure`` turns the error into a warning.
    """
    host, _ = split_address(address)
    if security.tls:
        if security.role not in SERVING:
            raise UserError(
                f"{security.folder}: is for a process of role {security.role}, which does not "
                "serve; give a folder that was issued with --role coordinator or --role server"
            )
    elif insecure and not is_loopback(host):
        log.warning(
            "%s: listening in plain text and without a token: whoever can reach this address can "
            "read and change the run",
            address,
        )
    elif not is_loopback(host):
        raise UserError(
            f"{address}: others can reach this address, so it needs certificates: give --certs DIR "
            "(`halos certs --help` makes them), listen on 127.0.0.1, or allow it with --insecure"
        )


def check_dial(address: str, security: Security, insecure: bool) -> None:
    """Raise ``UserError`` unless it is safe to dial ``address`` (HOST:PORT) like this."""
    host, _ = split_address(address)
    if security.tls or is_loopback(host):
        return
    if not insecure:
        raise UserError(
            f"{address}: is another machine, so the connection needs certificates: give --certs "
            "DIR (`halos certs --help` makes them), or allow plain text with --insecure"
        )
    log.warning("%s: connecting in plain text: others on the way can read and change it", address)


def explain(error: grpc.aio.AioRpcError, address: str, security: Security) -> str:
    """A failed call to ``address`` as one sentence with its remedy.

    A call that waits for the server to be ready learns nothing of why it is not: have the first
    call to a server not wait, and explain that one. Where gRPC cannot tell causes apart, the
    sentence names each.
    """
    code, details = error.code(), " ".join((error.details() or "").split())
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return f"{address}: {_about_token(security)}"
    if code in SAID:
        return f"{address}: {details}"
    if code is grpc.StatusCode.CANCELLED:
        return f"{address}: the server ended the connection; it is leaving, or is being restarted"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        other = "it speaks plain text" if security.tls else "it wants TLS (--certs)"
        return f"{address}: no answer in time; the server is down, cannot be reached, or {other}"
    for part, sentence in REASONS.items():
        if part in details:
            return f"{address}: {sentence}"
    if "failed to connect" in details:
        return f"{address}: {CLOSED_TLS if security.tls else CLOSED_PLAIN}"
    return f"{address}: {details or 'failed without a reason'} ({code.name})"


def will_not_heal(error: grpc.aio.AioRpcError) -> bool:
    """Whether trying again is in vain: the server turned us away, or both ends can never agree."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return any(part in (error.details() or "") for part in MISMATCHES)
    return error.code() in FINAL


def was_closed(error: grpc.aio.AioRpcError) -> bool:
    """Whether the server closed the connection at once: a mismatch, if it does so every time."""
    details = error.details() or ""
    return error.code() is grpc.StatusCode.UNAVAILABLE and not any(r in details for r in REASONS)


def _about_token(security: Security) -> str:
    if security.token is None:
        where = f"in {security.folder}" if security.tls else "in a plain connection"
        return (
            f"the server wants a join token and there is none {where}; give --certs with a folder "
            "that was issued for this run, or set HALOS_TOKEN"
        )
    from_environment = bool(os.environ.get(TOKEN_VARIABLE, "").strip())
    source = TOKEN_VARIABLE if from_environment else f"{security.folder}/token"
    return (
        f"the server does not know the join token in {source}; put there the token of the "
        "authority that issued the server's certificate"
    )


SAID = frozenset(  # statuses whose details are a sentence of our own
    {
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.ABORTED,
    }
)
FINAL = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
MISMATCHES = (
    "WRONG_VERSION_NUMBER",
    "unable to get local issuer",
    "signature failure",
    "certificate has expired",
    "CERTIFICATE_VERIFY_FAILED",
    "Failed parsing HTTP/2",
)
CLOSED_PLAIN = (
    "the server closed the connection at once: it wants TLS, or is no halos server; give --certs "
    "DIR with certificates of this run, or correct the address"
)
CLOSED_TLS = (
    "the server closed the connection at once: it refuses our certificate (issued by another "
    "authority, or expired), or is no halos server; use certificates that one authority issued "
    "for both ends, or correct the address"
)
PLAIN_SERVER = (
    "the server speaks plain text where we speak TLS, or is no halos server; start it with "
    "--certs, or leave out --certs here"
)
OTHER_AUTHORITY = (
    "the server's certificate was issued by another authority than ours; use certificates that "
    "one authority issued for both ends"
)
EXPIRED = (
    "the server's certificate has expired, or this machine's clock is wrong; issue it another with "
    "`halos certs issue`"
)
TOO_EARLY = "the server's certificate is not valid yet by this machine's clock; put the clock right"
NO_SERVER = (
    "the certificate shown there may not serve (a worker's or an operator's); start the server "
    "with a folder that was issued for role coordinator or server"
)
NO_HOST = "there is no host of this name; correct the address, or look at the name server"
NOTHING_THERE = "nothing listens there; start the server, or correct the address"
NO_ROUTE = "cannot be reached from here; look at the address, the firewall and the network"
SILENT = (
    "connections are accepted there and nobody answers: the server is held up, or the network "
    "between lets nothing pass"
)
REASONS = {  # what gRPC's details hold: what that means
    "errors resolving": NO_HOST,
    "DNS resolution failed": NO_HOST,
    "Connection refused": NOTHING_THERE,
    "No route to host": NO_ROUTE,
    "Network is unreachable": NO_ROUTE,
    "Connection timed out": NO_ROUTE,
    "before receiving SETTINGS": SILENT,
    "ping timeout": SILENT,
    "Endpoint closing": SILENT,  # by this end, amid a TLS handshake that takes too long
    "WRONG_VERSION_NUMBER": PLAIN_SERVER,
    "unable to get local issuer": OTHER_AUTHORITY,
    "signature failure": OTHER_AUTHORITY,
    "certificate has expired": EXPIRED,
    "certificate is not yet valid": TOO_EARLY,
    "CERTIFICATE_VERIFY_FAILED": NO_SERVER,
    "Failed parsing HTTP/2": "what listens there is no halos server; correct the address",
}


def _read_token(folder: Path, role: Role) -> tuple[str | None, str | None]:
    """The token and its hash, as far as ``role`` needs them."""
    from halos.wire import identity

    given = os.environ.get(TOKEN_VARIABLE, "").strip()
    if given:
        _check_token(given, TOKEN_VARIABLE, "set it to the token that `halos certs init` made")
        return given, hash_of(given) if role in SERVING else None
    remedy = identity.reissue(folder, role)
    token, token_hash = None, None
    if role in JOINING:
        path = folder / identity.TOKEN
        token = identity.read(path, remedy).decode("ascii", "replace").strip()
        _check_token(token, str(path), remedy)
        identity.warn_if_open(path)
    if role in SERVING:
        path = folder / identity.TOKEN_HASH
        token_hash = identity.read(path, remedy).decode("ascii", "replace").strip()
        if not HASH.fullmatch(token_hash):
            raise UserError(f"{path}: is not a SHA-256 in hexadecimal; {remedy}")
        if token is not None and hash_of(token) != token_hash:
            raise UserError(f"{path}: is not the hash of {identity.TOKEN} beside it; {remedy}")
    return token, token_hash


def _check_token(token: str, source: str, remedy: str) -> None:
    if not TOKEN.fullmatch(token):
        raise UserError(
            f"{source}: is not a token of 16 to 512 printable characters without spaces; {remedy}"
        )
