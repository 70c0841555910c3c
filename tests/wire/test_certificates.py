"""What ``halos certs`` makes: names, purposes, permissions, and all of it or nothing."""

from __future__ import annotations

import re
import stat
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID

from halos.errors import UserError
from halos.wire import certificates
from halos.wire.certificates import issue, make_authority
from halos.wire.roles import ROLES, SERVING, Role
from halos.wire.security import hash_of

NOW = datetime(2030, 5, 1, tzinfo=UTC)
SERVES, JOINS = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    make_authority(tmp_path / "authority", now=NOW)
    return tmp_path / "authority"


def issued(authority: Path, role: Role, **more: object) -> x509.Certificate:
    to = authority.with_name("issued")
    issue(authority, to, role, "one", now=NOW, replace=True, **more)  # type: ignore[arg-type]
    return x509.load_pem_x509_certificate((to / "cert.pem").read_bytes())


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_authority_may_sign_certificates_and_no_authorities(authority: Path) -> None:
    assert names_in(authority) == {"ca.pem", "ca-key.pem", "token", "token.sha256"}
    ca = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes())
    constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical and constraints.value.ca and constraints.value.path_length == 0
    usage = ca.extensions.get_extension_for_class(x509.KeyUsage).value
    assert usage.key_cert_sign and usage.crl_sign and not usage.digital_signature
    assert ca.not_valid_after_utc == NOW + timedelta(days=3650)


def test_the_token_is_long_and_its_hash_lies_beside_it(authority: Path) -> None:
    token = (authority / "token").read_text().strip()
    assert len(token) >= 43
    assert (authority / "token.sha256").read_text().strip() == hash_of(token)


@pytest.mark.parametrize("role", ROLES)
def test_a_certificate_names_its_role_and_only_some_serve(authority: Path, role: Role) -> None:
    certificate = issued(authority, role)
    assert certificate.subject.rfc4514_string() == f"CN={role}:one"
    assert certificate.not_valid_before_utc == NOW - timedelta(days=1)
    assert certificate.not_valid_after_utc == NOW + timedelta(days=730)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical and not constraints.value.ca
    usage = certificate.extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical and usage.value.digital_signature and not usage.value.key_cert_sign
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    kinds = {extension.oid for extension in certificate.extensions}
    assert set(purposes) == ({SERVES, JOINS} if role in SERVING else {JOINS})
    assert (ExtensionOID.SUBJECT_ALTERNATIVE_NAME in kinds) == (role in SERVING)


def test_certificate_and_authority_are_tied_by_their_key_identifiers(authority: Path) -> None:
    certificate = issued(authority, "worker")
    ca = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes())
    certificate.verify_directly_issued_by(ca)
    of_authority = certificate.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    own = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    assert of_authority.key_identifier == own.digest


def test_hosts_are_served_besides_the_name_that_all_answer_to(authority: Path) -> None:
    certificate = issued(authority, "server", hosts=["eu.example", "10.0.0.7", "localhost"])
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["halos", "localhost", "eu.example"]
    addresses = [ip_address(text) for text in ("127.0.0.1", "::1", "10.0.0.7")]
    assert names.get_values_for_type(x509.IPAddress) == addresses


@pytest.mark.parametrize(
    ("role", "secrets"),
    [
        ("coordinator", {"token.sha256"}),
        ("server", {"token", "token.sha256"}),
        ("worker", {"token"}),
        ("operator", {"token"}),
    ],
)
def test_each_role_gets_what_it_needs_of_the_token(
    authority: Path, role: Role, secrets: set[str]
) -> None:
    issued(authority, "server")  # the leftovers of another role go
    issued(authority, role)
    files = {"ca.pem", "cert.pem", "key.pem"} | secrets
    assert names_in(authority.with_name("issued")) == files


def test_nobody_else_may_read(authority: Path) -> None:
    issued(authority, "server")
    for folder in (authority, authority.with_name("issued")):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_folder_that_holds_other_things_keeps_its_permissions(
    authority: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    (home / "mine").write_text("mine")
    issue(authority, home, "worker", "one")
    assert stat.S_IMODE(home.stat().st_mode) == 0o755
    assert stat.S_IMODE((home / "key.pem").stat().st_mode) == 0o600


@pytest.mark.parametrize("file", ["ca.pem", "ca-key.pem", "token", "token.sha256"])
def test_an_authority_is_never_overwritten(authority: Path, file: str) -> None:
    for other in names_in(authority) - {file}:
        (authority / other).unlink()
    before = (authority / file).read_bytes()
    with pytest.raises(UserError, match=rf"{file}: exists already, and an authority is never"):
        make_authority(authority)
    assert names_in(authority) == {file}
    assert (authority / file).read_bytes() == before


def test_of_two_that_make_an_authority_at_once_one_is_refused_and_nothing_is_mixed(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in authority.iterdir()}
    (authority / "ca.pem").unlink()  # the other one is amid placing its files
    monkeypatch.setattr(certificates, "_there", lambda *_: None)  # and was not seen
    with pytest.raises(UserError, match="cannot be written"):
        make_authority(authority)
    assert {path.name: path.read_bytes() for path in authority.iterdir()} == {
        name: content for name, content in before.items() if name != "ca.pem"
    }


def test_a_certificate_is_replaced_when_that_is_asked_for(authority: Path, tmp_path: Path) -> None:
    to = tmp_path / "eu"
    issue(authority, to, "worker", "one")
    before = (to / "cert.pem").read_bytes()
    with pytest.raises(UserError, match=r"key\.pem: exists already; .* --force"):
        issue(authority, to, "worker", "one")
    assert (to / "cert.pem").read_bytes() == before
    issue(authority, to, "worker", "one", replace=True)
    assert (to / "cert.pem").read_bytes() != before
    assert not list(to.glob(".building-*"))


def test_a_certificate_does_not_outlive_its_authority(authority: Path) -> None:
    ends = NOW + timedelta(days=3650)
    assert issued(authority, "worker", days=10_000).not_valid_after_utc == ends
    with pytest.raises(
        UserError, match=r"ca\.pem: the authority ended on 2040-04-28; make another"
    ):
        issue(authority, authority.with_name("late"), "worker", "one", now=ends)


@pytest.mark.parametrize(
    ("role", "name", "hosts", "days", "said"),
    [
        ("worker", "a:b", [], 1, "name: 'a:b' is not allowed"),
        ("worker", "", [], 1, "name: '' is not allowed"),
        ("worker", "x" * 49, [], 1, "is not allowed; give up to 48"),
        ("worker", "one", ["h"], 1, "host: a certificate of role worker cannot serve"),
        ("server", "one", ["h:7443"], 1, "host: 'h:7443' is neither a name nor an IP address"),
        ("server", "one", ["ä.example"], 1, "is neither a name nor an IP address"),
        ("server", "one", [], 0, "days: 0 is not allowed"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_nothing_is_written(
    authority: Path, role: Role, name: str, hosts: list[str], days: int, said: str
) -> None:
    to = authority.with_name("refused")
    with pytest.raises(UserError, match=re.escape(said)):
        issue(authority, to, role, name, hosts=hosts, days=days)
    assert not to.exists()


def test_the_authoritys_own_folder_is_no_process_folder(authority: Path) -> None:
    with pytest.raises(UserError, match="is the authority's own folder"):
        issue(authority, authority / ".." / "authority", "worker", "one", replace=True)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("ca.pem", None, "ca.pem: cannot be read"),
        ("ca.pem", "nonsense", "ca.pem: is not a certificate"),
        ("ca-key.pem", None, "ca-key.pem: cannot be read"),
        ("ca-key.pem", "nonsense", "ca-key.pem: is not a key"),
        ("token", None, "token: cannot be read"),
    ],
)
def test_an_authority_that_is_not_whole_is_one_sentence(
    authority: Path, file: str, content: str | None, said: str
) -> None:
    (authority / file).unlink()
    if content is not None:
        (authority / file).write_text(content)
    with pytest.raises(UserError, match=re.escape(said)):
        issue(authority, authority.with_name("to"), "worker", "one")
    assert not authority.with_name("to").exists()


def test_the_key_of_another_authority_is_refused(authority: Path, tmp_path: Path) -> None:
    make_authority(tmp_path / "other")
    (authority / "ca-key.pem").write_bytes((tmp_path / "other" / "ca-key.pem").read_bytes())
    with pytest.raises(UserError, match=r"ca-key\.pem: is not the key of ca\.pem"):
        issue(authority, tmp_path / "to", "worker", "one")


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        make_authority(tmp_path / folder)
