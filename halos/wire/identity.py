"""Reads what ``halos certs`` wrote, and finds what is wrong with it before a connection does."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from halos.errors import UserError
from halos.wire.roles import Role, parse_name

log = logging.getLogger(__name__)

CA, CA_KEY, CERTIFICATE, KEY = "ca.pem", "ca-key.pem", "cert.pem", "key.pem"
TOKEN, TOKEN_HASH = "token", "token.sha256"


@dataclass(frozen=True)
class Identity:
    """Whom a folder's certificate names."""

    role: Role
    name: str


def read_identity(folder: Path, now: datetime) -> Identity:
    """Check the certificate, key and authority in ``folder`` at the time ``now``.

    Raises ``UserError`` when one is missing or ill-formed, when they do not belong together, and
    when the certificate is not valid now. Others being able to read the key is a warning.
    """
    if not (folder / CERTIFICATE).exists() and (folder / CA_KEY).exists():
        raise UserError(
            f"{folder}: is the authority's folder; give one that was issued from it: `halos certs "
            f"issue {folder} --role ROLE --to FOLDER`"
        )
    remedy = reissue(folder, "ROLE")
    certificate = read_certificates(folder / CERTIFICATE, remedy)[0]
    identity = _identity(certificate, folder)
    remedy = reissue(folder, identity.role)
    authorities = read_certificates(folder / CA, remedy)
    if read_key(folder / KEY, remedy).public_key() != certificate.public_key():
        raise UserError(f"{folder / KEY}: is not the key of {CERTIFICATE} beside it; {remedy}")
    issuers = [a for a in authorities if _issued(a, certificate)]
    if not issuers:
        raise UserError(
            f"{folder / CERTIFICATE}: was not issued by the authority in {CA} beside it; {remedy}"
        )
    _check_time(folder / CERTIFICATE, certificate, now, remedy)
    _check_time(folder / CA, issuers[0], now, "make an authority and all certificates anew")
    warn_if_open(folder / KEY)
    return identity


def read_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """An authority's certificate and key. Raises ``UserError`` if they are missing or no pair."""
    remedy = "give the folder that `halos certs init` made"
    certificate = read_certificates(folder / CA, remedy)[0]
    key = read_key(folder / CA_KEY, remedy)
    if key.public_key() != certificate.public_key():
        raise UserError(f"{folder / CA_KEY}: is not the key of {CA} beside it; {remedy}")
    return certificate, key


def read(path: Path, remedy: str) -> bytes:
    """A file's bytes. Raises ``UserError``, which ends with ``remedy``, if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error


def read_certificates(path: Path, remedy: str) -> list[x509.Certificate]:
    """The certificates in a PEM file, one or more; ``UserError`` as in :func:`read`."""
    content = read(path, remedy)
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError as error:
        raise UserError(f"{path}: is not a certificate in PEM form; {remedy}") from error


def read_key(path: Path, remedy: str) -> ec.EllipticCurvePrivateKey:
    """The elliptic-curve key in a PEM file; ``UserError`` as in :func:`read`."""
    content = read(path, remedy)
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: is not a key in PEM form, without password; {remedy}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path}: is not a key of an elliptic curve; {remedy}")
    return key


def reissue(folder: Path, role: str) -> str:
    """What to do about a folder's files."""
    return f"write it anew with `halos certs issue AUTHORITY --role {role} --to {folder} --force`"


def warn_if_open(path: Path) -> None:
    """Warn when others on this machine may read a secret."""
    if path.stat().st_mode & 0o077:
        log.warning("%s: others on this machine may read it; chmod 600 %s", path, path)


def _identity(certificate: x509.Certificate, folder: Path) -> Identity:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    parsed = parse_name(str(names[0].value)) if len(names) == 1 else None
    if parsed is None:
        raise UserError(
            f"{folder / CERTIFICATE}: its subject, {certificate.subject.rfc4514_string()!r}, does "
            f"not name a role as in CN=worker:name; {reissue(folder, 'ROLE')}"
        )
    return Identity(*parsed)


def _issued(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, TypeError, ValueError):
        return False
    return True


def _check_time(path: Path, certificate: x509.Certificate, now: datetime, remedy: str) -> None:
    if now > certificate.not_valid_after_utc:
        raise UserError(f"{path}: expired on {certificate.not_valid_after_utc:%Y-%m-%d}; {remedy}")
    if now < certificate.not_valid_before_utc:
        raise UserError(
            f"{path}: is valid from {certificate.not_valid_before_utc:%Y-%m-%d} only, and here it "
            f"is {now:%Y-%m-%d}; put this machine's clock right"
        )
