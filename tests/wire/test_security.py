"""Who may connect to whom: real gRPC servers and clients over loopback, right ones and wrong."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from halos.errors import UserError
from halos.wire.certificates import issue, make_authority
from halos.wire.roles import ROLES, Role
from halos.wire.security import (
    Security,
    check_dial,
    check_listen,
    explain,
    is_loopback,
    may_open,
    peer_role,
    split_address,
)

LONG_AGO = datetime.now(UTC) - timedelta(days=1000)


@pytest.fixture(autouse=True)
def _no_token_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HALOS_TOKEN", raising=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, ``ours`` and ``theirs``, and below each a folder for every role."""
    top = tmp_path_factory.mktemp("certs")
    for authority in ("ours", "theirs"):
        make_authority(top / authority, now=LONG_AGO)
        for role in ROLES:
            issue(top / authority, top / authority / role, role, "one")
    return top


@pytest.fixture
def ours(folders: Path) -> Callable[[Role], Security]:
    return lambda role: Security.from_folder(folders / "ours" / role)


@pytest.fixture
def theirs(folders: Path) -> Callable[[Role], Security]:
    return lambda role: Security.from_folder(folders / "theirs" / role)


def expired(folders: Path, role: Role) -> Security:
    """Of our authority, valid until long ago, and read when it was."""
    to = folders / "ours" / f"expired-{role}"
    issue(folders / "ours", to, role, "old", days=9, now=LONG_AGO, replace=True)
    return Security.from_folder(to, now=LONG_AGO)


@dataclass
class Door(grpc.GenericRpcHandler):
    """A method that opens a session, as the runtime's server does it, and says for whom."""

    security: Security
    wanted: str

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(self.open)

    async def open(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        caller = context.auth_context()
        if refusal := self.security.refusal(context.invocation_metadata(), caller, self.wanted):
            await context.abort(*refusal)
        return str(peer_role(caller)).encode()


async def call(server: Security, client: Security, wanted: str) -> tuple[str, str]:
    """What one call gives: the role that the server saw, or the sentence that the client gets."""
    grpc_server = grpc.aio.server()
    grpc_server.add_generic_rpc_handlers((Door(server, wanted),))
    credentials = server.server_credentials()
    if credentials is None:
        port = grpc_server.add_insecure_port("127.0.0.1:0")
    else:
        port = grpc_server.add_secure_port("127.0.0.1:0", credentials)
    await grpc_server.start()
    address = f"127.0.0.1:{port}"
    try:
        async with channel(address, client) as dialled:
            opening = dialled.unary_unary("/door/open")
            answer = await opening(b"", metadata=client.metadata(), timeout=60)
        return answer.decode(), ""
    except grpc.aio.AioRpcError as error:
        return "", explain(error, address, client).removeprefix(f"{address}: ")
    finally:
        await grpc_server.stop(None)


def channel(address: str, security: Security) -> grpc.aio.Channel:
    credentials = security.channel_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(address)
    return grpc.aio.secure_channel(address, credentials, security.channel_options())


def seen(server: Security, client: Security, wanted: str) -> str:
    role, sentence = asyncio.run(call(server, client, wanted))
    assert sentence == ""
    return role


def refused(server: Security, client: Security, wanted: str = "worker") -> str:
    role, sentence = asyncio.run(call(server, client, wanted))
    assert role == "" and "\n" not in sentence
    return sentence


# What passes


@pytest.mark.parametrize(
    ("server", "client"),
    [("coordinator", "server"), ("server", "server"), ("server", "worker")],
)
def test_the_right_ones_meet(ours: Callable[[Role], Security], server: Role, client: Role) -> None:
    assert seen(ours(server), ours(client), client) == client


@pytest.mark.parametrize("wanted", ["operator", "observer"])
def test_an_operator_gives_orders_and_observes(
    ours: Callable[[Role], Security], wanted: str
) -> None:
    assert seen(ours("coordinator"), ours("operator"), wanted) == "operator"


def test_plain_meets_plain_and_names_nobody() -> None:
    assert seen(Security.plain(), Security.plain(), "worker") == "None"


def test_the_environment_gives_the_token_on_both_sides(
    ours: Callable[[Role], Security], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ours("coordinator"), ours("server")
    monkeypatch.setenv("HALOS_TOKEN", "another-token-for-this-run\n")
    assert seen(ours("coordinator"), ours("server"), "server") == "server"
    assert "does not know the join token in HALOS_TOKEN" in refused(
        before[0], ours("server"), "server"
    )


# What is refused, and what each side is told


def test_a_wrong_token(ours: Callable[[Role], Security]) -> None:
    client = replace(ours("worker"), token="the-token-of-another-run")
    assert refused(ours("server"), client) == (
        f"the server does not know the join token in {client.folder}/token; put there the token of "
        "the authority that issued the server's certificate"
    )


def test_no_token(ours: Callable[[Role], Security]) -> None:
    client = ours("coordinator")
    assert client.metadata() == ()
    assert refused(ours("coordinator"), client, "operator") == (
        f"the server wants a join token and there is none in {client.folder}; give --certs with a "
        "folder that was issued for this run, or set HALOS_TOKEN"
    )


def test_a_certificate_of_another_authority(
    ours: Callable[[Role], Security], theirs: Callable[[Role], Security]
) -> None:
    assert refused(ours("server"), theirs("worker")) == (
        "the server's certificate was issued by another authority than ours; use certificates that "
        "one authority issued for both ends"
    )


CLOSED = (
    "the server closed the connection at once: it refuses our certificate (issued by another "
    "authority, or expired), or is no halos server; use certificates that one authority issued "
    "for both ends, or correct the address"
)


def test_a_certificate_of_another_authority_from_one_who_trusts_ours(
    ours: Callable[[Role], Security], theirs: Callable[[Role], Security]
) -> None:
    client = replace(theirs("worker"), authority=ours("worker").authority)
    assert refused(ours("server"), client) == CLOSED


def test_an_expired_certificate_of_the_client(
    folders: Path, ours: Callable[[Role], Security]
) -> None:
    assert refused(ours("server"), expired(folders, "worker")) == CLOSED


def test_an_expired_certificate_of_the_server(
    folders: Path, ours: Callable[[Role], Security]
) -> None:
    assert refused(expired(folders, "server"), ours("worker")) == (
        "the server's certificate has expired, or this machine's clock is wrong; issue it another "
        "with `halos certs issue`"
    )


@dataclass(frozen=True, repr=False)
class Anonymous(Security):
    """Encrypts, but shows no certificate."""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority)


def test_no_certificate_of_the_client(ours: Callable[[Role], Security]) -> None:
    worker = ours("worker")
    client = Anonymous(**{name: getattr(worker, name) for name in Security.__dataclass_fields__})
    assert refused(ours("server"), client) == CLOSED


def test_plain_to_a_tls_port(ours: Callable[[Role], Security]) -> None:
    assert refused(ours("server"), Security.plain()) == (
        "the server closed the connection at once: it wants TLS, or is no halos server; give "
        "--certs DIR with certificates of this run, or correct the address"
    )


def test_tls_to_a_plain_port(ours: Callable[[Role], Security]) -> None:
    assert refused(Security.plain(), ours("worker")) == (
        "the server speaks plain text where we speak TLS, or is no halos server; start it with "
        "--certs, or leave out --certs here"
    )


@pytest.mark.parametrize("role", ["worker", "operator"])
def test_a_certificate_that_may_not_serve_poses_as_a_server(
    ours: Callable[[Role], Security], role: Role
) -> None:
    assert refused(ours(role), ours("worker")) == (
        "the certificate shown there may not serve (a worker's or an operator's); start the server "
        "with a folder that was issued for role coordinator or server"
    )


def test_a_workers_certificate_does_not_open_as_a_server(ours: Callable[[Role], Security]) -> None:
    assert refused(ours("coordinator"), ours("worker"), "server") == (
        "a certificate of role worker may not open a session as server; use one that was issued "
        "for that role"
    )


@pytest.mark.parametrize(
    ("code", "details", "said"),
    [
        ("UNAVAILABLE", "...Failed to connect to remote host: Connection refused", "nothing liste"),
        ("UNAVAILABLE", "errors resolving x: [field:hostname]", "there is no host of this name"),
        ("UNAVAILABLE", "failed to connect: Network is unreachable", "cannot be reached from here"),
        (
            "UNAVAILABLE",
            "last error: Failed parsing HTTP/2 (...)",
            "what listens there is no halos",
        ),
        ("UNAVAILABLE", "Socket closed", "Socket closed (UNAVAILABLE)"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "no answer in time; the server is down, cannot"),
        ("INTERNAL", "two\nlines", "two lines (INTERNAL)"),
        ("UNKNOWN", None, "failed without a reason (UNKNOWN)"),
    ],
)
def test_other_failures_are_one_sentence_too(code: str, details: str | None, said: str) -> None:
    none = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode[code], none, none, details=details)
    sentence = explain(error, "eu.example:7443", Security.plain())
    assert sentence.startswith(f"eu.example:7443: {said}") and "\n" not in sentence


# Tokens and roles without a wire


@pytest.mark.parametrize(
    ("given", "admitted"),
    [
        (["Bearer {}"], True),
        (["bearer {}"], True),
        ([b"Bearer {}"], True),
        (["{}"], False),
        (["Basic {}"], False),
        (["Bearer {} "], False),
        (["Bearer "], False),
        (["Bearer ä"], False),
        ([b"Bearer \xff"], False),
        (["Bearer {}", "Bearer {}"], False),
        ([], False),
    ],
)
def test_what_carries_the_token(
    ours: Callable[[Role], Security], given: Sequence[str | bytes], admitted: bool
) -> None:
    token = ours("worker").token
    assert token is not None
    metadata = [
        (
            "authorization",
            value.replace("{}", token)
            if isinstance(value, str)
            else value.replace(b"{}", token.encode()),
        )
        for value in given
    ]
    assert ours("server").admits([("user-agent", "x"), *metadata]) is admitted


def test_without_a_hash_nobody_is_admitted(ours: Callable[[Role], Security]) -> None:
    assert not ours("worker").admits(ours("worker").metadata())
    assert not ours("server").admits(None)
    assert Security.plain().admits(None)


ALLOWED = {
    "worker": {"worker"},
    "server": {"server"},
    "operator": {"operator", "coordinator"},
    "observer": set(ROLES),
}


@pytest.mark.parametrize("wanted", [*ALLOWED, "root", ""])
def test_what_each_role_may_open(wanted: str) -> None:
    allowed = {role for role in (*ROLES, "root", None) if may_open(role, wanted)}
    assert allowed == ALLOWED.get(wanted, set())


@pytest.mark.parametrize(
    ("names", "role"),
    [
        ([b"worker:one"], "worker"),
        ([b"worker:"], None),
        ([b"worker"], None),
        ([b"root:one"], None),
        ([b"worker:one:two"], None),
        ([b"worker:\xff"], None),
        ([b"worker:one", b"server:one"], None),
        ([], None),
    ],
)
def test_the_role_that_a_certificate_names(names: list[bytes], role: str | None) -> None:
    assert peer_role({"x509_common_name": names}) == role


# Reading a folder


@pytest.mark.parametrize("role", ROLES)
def test_nothing_shows_a_secret(ours: Callable[[Role], Security], role: Role) -> None:
    security = ours(role)
    assert repr(security) == str(security) == f"Security({security.folder}, {role}:one)"
    assert repr(Security.plain()) == "Security()"


@pytest.fixture
def folder(folders: Path, tmp_path: Path) -> Path:
    issue(folders / "ours", tmp_path / "server", "server", "one")
    return tmp_path / "server"


@pytest.mark.parametrize("file", ["ca.pem", "cert.pem", "key.pem", "token", "token.sha256"])
@pytest.mark.parametrize("content", [None, b"", b"nonsense", b"\xff\xfe\x00"])
def test_a_missing_or_ill_formed_file_is_named_with_its_remedy(
    folder: Path, file: str, content: bytes | None
) -> None:
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(UserError) as caught:
        Security.from_folder(folder)
    text = str(caught.value)
    assert text.startswith(f"{folder / file}: ") and "halos certs issue" in text
    assert "\n" not in text and "nonsense" not in text


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("key.pem", "key.pem: is not the key of cert.pem beside it"),
        ("ca.pem", "cert.pem: was not issued by the authority in ca.pem beside it"),
        ("token", "token.sha256: is not the hash of token beside it"),
        ("token.sha256", "token.sha256: is not the hash of token beside it"),
    ],
)
def test_files_that_do_not_belong_together(
    folders: Path, folder: Path, file: str, said: str
) -> None:
    (folder / file).write_bytes((folders / "theirs" / "server" / file).read_bytes())
    with pytest.raises(UserError, match=re.escape(said)):
        Security.from_folder(folder)


def test_several_authorities_in_one_file_are_all_trusted(
    folders: Path, folder: Path, theirs: Callable[[Role], Security]
) -> None:
    both = (folders / "theirs/ca.pem").read_bytes() + (folders / "ours/ca.pem").read_bytes()
    (folder / "ca.pem").write_bytes(both)
    server = Security.from_folder(folder)
    client = replace(theirs("worker"), authority=both)
    sentence = refused(server, client)
    assert "join token" in sentence  # the handshake passed


def test_the_time_is_checked_when_the_folder_is_read(folder: Path) -> None:
    with pytest.raises(UserError, match=r"cert\.pem: expired on .* `halos certs issue"):
        Security.from_folder(folder, now=datetime.now(UTC) + timedelta(days=731))
    with pytest.raises(UserError, match=r"cert\.pem: is valid from .* put this machine's clock"):
        Security.from_folder(folder, now=datetime.now(UTC) - timedelta(days=2))


@pytest.mark.parametrize("file", ["key.pem", "token"])
def test_a_secret_that_others_may_read_is_a_warning(
    folder: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / file).chmod(0o640)
    Security.from_folder(folder)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith(f"chmod 600 {folder / file}")


def test_the_authoritys_folder_is_not_a_processs(folders: Path) -> None:
    with pytest.raises(UserError, match="is the authority's folder; give one that was issued"):
        Security.from_folder(folders / "ours")


@pytest.mark.parametrize("token", ["short", "with a space in the middle", "ä" * 20])
def test_a_token_of_the_environment_that_cannot_be_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HALOS_TOKEN", token)
    with pytest.raises(UserError, match="HALOS_TOKEN: is not a token of 16") as caught:
        Security.from_folder(folder)
    assert token not in str(caught.value)


def test_a_token_of_the_environment_needs_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "token").unlink()
    (folder / "token.sha256").unlink()
    monkeypatch.setenv("HALOS_TOKEN", "another-token-for-this-run")
    security = Security.from_folder(folder)
    assert security.admits(security.metadata())


# Addresses


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST", "127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"]
)
def test_this_machine_alone(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    ["", "0.0.0.0", "::", "[::]", "10.0.0.1", "fe80::1", "localhost.example", "127.0.0.1.example"],
)
def test_every_other_address(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("eu.example:7443", ("eu.example", 7443)),
        ("[::1]:0", ("::1", 0)),
        (":7443", ("", 7443)),
    ],
)
def test_an_address_in_its_parts(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize(
    "address", ["", "eu.example", "eu.example:", "eu.example:x", "a:65536", "a:-1", "::1:80", "a:²"]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(UserError, match="is not of the form HOST:PORT"):
        split_address(address)


@pytest.mark.parametrize("check", [check_listen, check_dial])
def test_plain_on_this_machine_alone(
    check: Callable[[str, Security, bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    check("127.0.0.1:0", Security.plain(), False)
    check("[::1]:7443", Security.plain(), True)
    assert not caplog.records
    for address in ("0.0.0.0:7443", "[::]:7443", ":7443", "eu.example:7443"):
        with pytest.raises(UserError, match=r"needs certificates: give --certs DIR .* --insecure"):
            check(address, Security.plain(), False)
        check(address, Security.plain(), True)
        assert address in caplog.records[-1].getMessage()
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 4


def test_with_certificates_everywhere(
    ours: Callable[[Role], Security], caplog: pytest.LogCaptureFixture
) -> None:
    for address in ("127.0.0.1:0", "0.0.0.0:7443", "eu.example:7443"):
        check_listen(address, ours("coordinator"), False)
        check_listen(address, ours("server"), False)
        check_dial(address, ours("worker"), False)
    assert not caplog.records


@pytest.mark.parametrize("role", ["worker", "operator"])
def test_who_may_not_serve_is_told_before_listening(
    ours: Callable[[Role], Security], role: Role
) -> None:
    with pytest.raises(UserError, match=f"is for a process of role {role}, which does not serve"):
        check_listen("127.0.0.1:0", ours(role), True)


def test_reading_needs_no_torch_and_plain_needs_no_cryptography() -> None:
    look = (
        "import sys, halos.wire.security as s; s.Security.plain(); "
        "print('torch' in sys.modules, 'cryptography' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
