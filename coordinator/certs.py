"""``halos certs``: an authority for a run, and what each of its processes needs from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from halos.wire.roles import ROLES, Role

app = typer.Typer(
    name="certs",
    no_args_is_help=True,
    add_completion=False,
    help="Make certificates and the join token, with which machines trust each other.",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder for the authority.")],
    as_json: AsJson = False,
) -> None:
    """Make a run's authority and its join token. Once a run, on a machine you trust.

    Example: halos certs init authority
    """
    from halos.wire.certificates import AUTHORITY_DAYS, make_authority

    written = make_authority(folder)
    if as_json:
        print(json.dumps({"folder": str(folder), "files": [str(path) for path in written]}))
        return
    print(
        f"Wrote {', '.join(path.name for path in written)} in {folder}, valid for "
        f"{AUTHORITY_DAYS // 365} years.\n"
        f"Keep this folder: who has its key can join the run. Now, for every process:\n"
        f"  halos certs issue {folder} --role coordinator --to certs/coordinator"
    )


@app.command()
def issue(
    authority: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder that `halos certs init` made.")
    ],
    role: Annotated[Role, typer.Option(help="What the process is; status needs an operator.")],
    to: Annotated[Path, typer.Option(help="Folder to write into.")],
    name: Annotated[str | None, typer.Option(help="Whose it is; by default, the role.")] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Another name or IP address that it serves at; rarely needed. Repeat."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long it is valid.")] = 730,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the folder that a process takes as --certs: certificate, key and join token.

    Example: halos certs issue authority --role worker --name a100-3 --to certs/a100-3
    """
    from halos.wire.certificates import issue as issue_files
    from halos.wire.identity import CERTIFICATE, read_certificates

    called = name or role
    written = issue_files(authority, to, role, called, hosts=host or (), days=days, replace=force)
    ends = read_certificates(to / CERTIFICATE, "")[0].not_valid_after_utc
    if as_json:
        result = {
            "folder": str(to),
            "files": [str(path) for path in written],
            "role": role,
            "name": called,
            "valid_until": ends.isoformat(),
        }
        print(json.dumps(result))
        return
    print(
        f"Wrote {', '.join(path.name for path in written)} in {to}: {role} {called}, valid until "
        f"{ends:%Y-%m-%d}.\n"
        f"Copy the folder to that machine, readable by its user alone. There: {USE[role]} "
        f"--certs {to}"
    )


USE: dict[Role, str] = {
    "coordinator": "halos coordinator RUN.toml --listen 0.0.0.0:7443",
    "server": "halos server --region NAME --join COORDINATOR:7443",
    "worker": "halos worker --join SERVER:PORT",
    "operator": "halos status COORDINATOR:7443",
}
assert USE.keys() == set(ROLES)
