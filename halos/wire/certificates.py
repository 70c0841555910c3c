"""Certificates and the join token: a folder for the authority, and one for each process.

An authority signs for one run. What it signs is named ``role:name``. Only coordinators and servers
get a certificate that serves, and every one of those answers to the name ``halos``: a client asks
for that name whatever address it dials, so no certificate depends on an address, and a stolen
worker's certificate cannot pose as a server.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from halos.errors import UserError
from halos.wire.identity import (
    CA,
    CA_KEY,
    CERTIFICATE,
    KEY,
    TOKEN,
    TOKEN_HASH,
    read,
    read_authority,
)
from halos.wire.roles import JOINING, NAME, SERVING, Role
from halos.wire.security import SERVER_NAME, hash_of

AUTHORITY_DAYS = 3650
DAYS = 730
SKEW = timedelta(days=1)  # certificates are valid from a day ago, for clocks differ
HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")


def make_authority(folder: Path, *, now: datetime | None = None) -> list[Path]:
    """Make an authority and the run's join token in ``folder``. Returns the files written.

    Raises ``UserError`` when any of them is there already: an authority is never overwritten.
    """
    now = now or datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    public = _subject_key(key).digest.hex()[:8]  # two authorities must not have one name
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"halos authority {public}")])
    certificate = (
        _builder(name, name, key, now, now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(_authority_key(key), critical=False)
        .sign(key, hashes.SHA256())
    )
    token = secrets.token_urlsafe(32)
    files = {
        CA: _pem(certificate),
        CA_KEY: _pem(key),
        TOKEN: f"{token}\n".encode(),
        TOKEN_HASH: f"{hash_of(token)}\n".encode(),
    }
    if there := _there(folder, files):
        raise UserError(
            f"{there}: exists already, and an authority is never overwritten; issue certificates "
            "from it, or give another folder"
        )
    return _write(folder, files, replace=False)


def issue(
    authority: Path,
    to: Path,
    role: Role,
    name: str,
    *,
    hosts: Sequence[str] = (),
    days: int = DAYS,
    replace: bool = False,
    now: datetime | None = None,
) -> list[Path]:
    """Write what a process of ``role`` needs into the folder ``to``. Returns the files written.

    The certificate is called ``role:name``, is valid for ``days`` but not longer than its
    authority and, for roles that serve, for ``hosts`` (names or IP addresses) besides ``halos``
    and this machine. Raises ``UserError`` for a name, host or length of time that cannot be, an
    authority that cannot be read, and, unless ``replace``, when ``to`` holds a certificate.
    """
    now = now or datetime.now(UTC)
    _check_request(authority, to, role, name, hosts, days)
    if not replace and (there := _there(to, (KEY, CERTIFICATE, CA, TOKEN, TOKEN_HASH))):
        raise UserError(f"{there}: exists already; give another folder, or --force to replace it")
    issuer, issuer_key = read_authority(authority)
    ends = min(now + timedelta(days=min(days, AUTHORITY_DAYS)), issuer.not_valid_after_utc)
    if ends <= now:
        raise UserError(
            f"{authority / CA}: the authority ended on {ends:%Y-%m-%d}; make another with "
            "`halos certs init` in a new folder, and issue all certificates anew"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{role}:{name}")])
    builder = (
        _builder(subject, issuer.subject, key, now, ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(_purposes(role), critical=False)
        .add_extension(_authority_key(issuer_key), critical=False)
    )
    if role in SERVING:
        names = [SERVER_NAME, "localhost", "127.0.0.1", "::1", *hosts]
        alternatives = x509.SubjectAlternativeName([_general_name(n) for n in dict.fromkeys(names)])
        builder = builder.add_extension(alternatives, critical=False)
    certificate = builder.sign(issuer_key, hashes.SHA256())
    files = {KEY: _pem(key), CERTIFICATE: _pem(certificate), CA: _pem(issuer)}
    wanted = [TOKEN] * (role in JOINING) + [TOKEN_HASH] * (role in SERVING)
    files |= {file: read(authority / file, "make an authority again") for file in wanted}
    written = _write(to, files, replace=replace)
    for file in {TOKEN, TOKEN_HASH} - files.keys():
        (to / file).unlink(missing_ok=True)  # of another role, that was replaced
    return written


def _check_request(
    authority: Path, to: Path, role: Role, name: str, hosts: Sequence[str], days: int
) -> None:
    if not NAME.fullmatch(name):
        raise UserError(
            f"name: {name!r} is not allowed; give up to 48 letters, digits, dots, dashes and "
            "underscores, the first a letter or digit"
        )
    if hosts and role not in SERVING:
        raise UserError(
            f"host: a certificate of role {role} cannot serve; leave out {hosts[0]}, or give the "
            "role coordinator or server"
        )
    if days < 1:
        raise UserError(f"days: {days} is not allowed; give a whole number from 1")
    if to.resolve() == authority.resolve():
        raise UserError(
            f"{to}: is the authority's own folder, whose key should stay where it is; give another"
        )


def _there(folder: Path, files: Iterable[str]) -> Path | None:
    return next((folder / file for file in files if (folder / file).exists()), None)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    ends: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(ends)
        .add_extension(_subject_key(key), critical=False)
    )


def _subject_key(key: ec.EllipticCurvePrivateKey) -> x509.SubjectKeyIdentifier:
    return x509.SubjectKeyIdentifier.from_public_key(key.public_key())


def _authority_key(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _purposes(role: Role) -> x509.ExtendedKeyUsage:
    serves = [ExtendedKeyUsageOID.SERVER_AUTH] if role in SERVING else []
    return x509.ExtendedKeyUsage([*serves, ExtendedKeyUsageOID.CLIENT_AUTH])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not HOST.fullmatch(host):
            raise UserError(
                f"host: {host!r} is neither a name nor an IP address; give it without a port"
            ) from None
        return x509.DNSName(host)


def _pem(item: x509.Certificate | ec.EllipticCurvePrivateKey) -> bytes:
    if isinstance(item, x509.Certificate):
        return item.public_bytes(serialization.Encoding.PEM)
    return item.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(folder: Path, files: Mapping[str, bytes], *, replace: bool) -> list[Path]:
    """Write files that nobody else may read: each whole or not at all, and all or none."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            folder.chmod(0o700)  # it was there, empty; a folder with other things stays as it is
        with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as building:
            for name, content in files.items():
                _write_synced(Path(building) / name, content)
            _place(Path(building), folder, list(files), replace=replace)
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be written ({error.strerror}); give another folder"
        ) from error
    return [folder / name for name in files]


def _write_synced(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _place(building: Path, folder: Path, names: Sequence[str], *, replace: bool) -> None:
    """Give finished files their names; a link, unlike a rename, never replaces what is there."""
    placed: list[Path] = []
    try:
        for name in names:
            if replace:
                (building / name).replace(folder / name)
            else:
                (folder / name).hardlink_to(building / name)
                placed.append(folder / name)
    except OSError:
        for path in placed:
            path.unlink()
        raise
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
