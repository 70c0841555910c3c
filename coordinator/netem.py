"""``halos netem``: a link with a rate and a round-trip time, as a process."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from halos.wire.link import Link, LinkSettings


def netem(
    to: Annotated[str, typer.Option(help="Where connections go on to, HOST:PORT.")],
    listen: Annotated[
        str, typer.Option(help="Where it listens, HOST:PORT; port 0: any that is free.")
    ] = "127.0.0.1:0",
    rate_mbps: Annotated[
        float | None, typer.Option(help="Megabits a second, each way; without it, no limit.")
    ] = None,
    rtt_ms: Annotated[float, typer.Option(help="Round trip in milliseconds.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON lines.")] = False,
) -> None:
    """Emulate a slow network in front of a TCP address.

    Connections share the rate. SIGUSR1 cuts the link, SIGUSR2 mends it, Ctrl-C or SIGTERM ends it.
    """
    import logging

    logging.basicConfig(format="%(message)s", level=logging.INFO)
    asyncio.run(emulate(listen, to, settings_of(rate_mbps, rtt_ms), as_json))


def settings_of(rate_mbps: float | None, rtt_ms: float) -> LinkSettings:
    """Raises ``UserError`` for what is no rate or no time."""
    from pydantic import ValidationError

    from halos.errors import UserError
    from halos.reading import Place, remedy
    from halos.wire.link import LinkSettings

    try:
        return LinkSettings(rate_mbps=rate_mbps, rtt_ms=rtt_ms)
    except ValidationError as error:
        details = error.errors()[0]
        field = str(details["loc"][0])
        mistake = remedy(details, Place("", field, LinkSettings))
        raise UserError(f"{field}: {mistake}") from error


async def emulate(listen: str, to: str, settings: LinkSettings, as_json: bool) -> None:
    """Carry connections until SIGINT or SIGTERM. Raises ``UserError`` for a wrong address."""
    from halos.wire.link import Link

    ended = asyncio.Event()
    async with Link(listen, to, settings) as link:
        tell = Teller(link, as_json)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        loop.add_signal_handler(signal.SIGUSR1, tell.cut)
        loop.add_signal_handler(signal.SIGUSR2, tell.mend)
        tell.say(f"Listening on {link.address}, to {to}: {settings}.", "listening", to=to)
        await ended.wait()
        tell.end()


class Teller:
    """Says on standard output what has become of a link."""

    def __init__(self, link: Link, as_json: bool) -> None:
        self._link, self._as_json = link, as_json

    def say(self, text: str, event: str, **facts: Any) -> None:
        if self._as_json:
            text = json.dumps({"event": event, "address": self._link.address, **facts})
        print(text, flush=True)

    def cut(self) -> None:
        self._link.cut()
        self.say("Cut; SIGUSR2 mends it.", "cut")

    def mend(self) -> None:
        self._link.mend()
        self.say("Mended.", "mended")

    def end(self) -> None:
        up, down = self._link.carried
        text = f"Carried {up:,} bytes up and {down:,} bytes down."
        self.say(text, "ended", up_bytes=up, down_bytes=down)
