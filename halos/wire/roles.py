"""Roles that a certificate may name, and what each may do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

Role = Literal["coordinator", "server", "worker", "operator"]

ROLES: tuple[Role, ...] = get_args(Role)
SERVING: frozenset[Role] = frozenset({"coordinator", "server"})
JOINING: frozenset[Role] = frozenset({"server", "worker", "operator"})
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")

MAY_OPEN: Mapping[str, frozenset[Role]] = {
    "worker": frozenset({"worker"}),
    "server": frozenset({"server"}),
    "operator": frozenset({"operator", "coordinator"}),
    "observer": frozenset(ROLES),
}


def parse_name(common_name: str) -> tuple[Role, str] | None:
    """``role:name`` of a certificate in its two parts; None if it is not of that form."""
    role, colon, name = common_name.partition(":")
    if not colon or role not in ROLES or not NAME.fullmatch(name):
        return None
    return role, name


def peer_role(auth_context: Mapping[str, Iterable[bytes]]) -> Role | None:
    """The role that a caller's certificate names, from ``ServicerContext.auth_context()``.

    None when the connection is plain, or when the name is not of the form that we issue.
    """
    names = list(auth_context.get("x509_common_name") or ())
    if len(names) != 1:
        return None
    parsed = parse_name(names[0].decode("ascii", errors="replace"))
    return parsed and parsed[0]


def may_open(role: str | None, wanted: str) -> bool:
    """Whether a certificate of ``role`` may open a session as ``wanted``.

    A worker may be a worker and a server a server; operator and coordinator may ask for status
    and give orders (``operator``); each may observe (``observer``). None, a caller without
    certificate, may nothing: on a plain server do not ask.
    """
    return role in MAY_OPEN.get(wanted, frozenset())
