"""Which methods can be simulated, and what each is set to.

A method is written as a name, and what differs from its settings after colons:
``halos:k=4:up=int4``. Those that meet through servers run on the production core; what they are
compared with is short, and shares the inner loop, the data and the equations.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, ValidationError

from halos.core.equations import OuterSettings
from halos.core.settings import Settings
from halos.core.topology import Topology
from halos.errors import UserError
from halos.reading import Place, remedy
from halos.specification import PRESETS, WIRES, OuterTable, ResolvedSync, SyncTable, resolve_sync
from halos.wire.frames import CodecName


class Servers(Settings):
    """Workers that meet at parameter servers, through the production core.

    ``h``, ``k``, ``alpha`` are the paper's H, K and merge weight; ``local_*`` is the outer
    optimizer of the regions, the other that of the root, both as quoted. ``up`` and ``down`` are
    the codecs of the wide-area links. Without ``tree`` all workers are attached to the root.
    ``correction``: what is done about staleness, see ``corrections.py``.
    """

    h: int = Field(default=8, ge=1, le=10**6)
    k: int = Field(default=32, ge=1, le=10**6)
    alpha: float = Field(default=0.25, gt=0, le=1)
    in_flight: Literal["drop", "carry"] = "drop"
    local_rate: float | None = Field(default=None, gt=0)
    local_mean_rate: float | None = Field(default=None, gt=0)
    local_momentum: float = Field(default=0.0, ge=0, lt=1)
    local_delay: int = Field(default=1, ge=1)
    local_share: float = Field(default=0.0, ge=0, le=1)
    rate: float | None = Field(default=None, gt=0)
    mean_rate: float | None = Field(default=None, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    delay: int = Field(default=1, ge=1)
    share: float = Field(default=0.0, ge=0, le=1)
    up: CodecName = "fp32"
    down: CodecName = "fp32"
    tree: bool = True
    correction: Literal["none", "momentum", "delay"] = "none"

    @classmethod
    def of(cls, sync: SyncTable) -> Servers:
        """As a preset of the specification has it, or a run's own table once it is whole."""
        given = {
            "h": sync.local_steps,
            "k": sync.accumulation,
            "alpha": sync.merge_weight,
            "in_flight": sync.in_flight,
        }
        for prefix, tier in (("local_", sync.local), ("", sync.root)):
            given |= {prefix + short: getattr(tier, name) for short, name in OUTER.items()}
        return cls.model_validate(
            {name: value for name, value in given.items() if value is not None}
        )

    def resolved(self, topology: Topology) -> ResolvedSync:
        """For the servers of ``topology``."""
        local, root = (
            OuterTable(**{name: getattr(self, prefix + short) for short, name in OUTER.items()})
            for prefix in ("local_", "")
        )
        table = SyncTable(
            preset="paper",
            local_steps=self.h,
            accumulation=self.k,
            merge_weight=self.alpha,
            in_flight=self.in_flight,
            local=local,
            **{"global": root},
        )
        return resolve_sync(table, topology)

    def varied(self, values: Mapping[str, object]) -> Servers:
        """With these values; a rate takes the place of a mean rate, and the other way round."""
        kept = self.model_dump()
        for prefix in ("local_", ""):
            rates = {f"{prefix}rate", f"{prefix}mean_rate"}
            if rates & values.keys():
                kept |= dict.fromkeys(rates)
        return type(self).model_validate(kept | dict(values))


OUTER: Mapping[str, str] = {  # an outer optimizer's settings, by their short names here
    "rate": "rate",
    "mean_rate": "mean_rate",
    "momentum": "momentum",
    "delay": "momentum_delay",
    "share": "momentum_share",
}


class DiLoCo(Settings):
    """Everybody trains ``h`` steps and waits for the slowest; then one outer step (2311.08105).

    ``dynamic``: a slower worker trains fewer steps, so that all are ready at about the same time
    (dynamic local updates, 2401.09135).
    """

    h: int = Field(default=32, ge=1, le=10**6)
    rate: float = Field(default=0.7, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    dynamic: bool = False

    @property
    def outer(self) -> OuterSettings:
        return OuterSettings(rate=self.rate, momentum=self.momentum)


class DataParallel(Settings):
    """Everybody computes a gradient on samples of his own; their mean is one step for all."""


class Quorum(Settings):
    """Merges what a quorum of workers has finished, weighted by tokens (2604.21428).

    Once ``quorum`` of all workers wait, those who are expected within ``grace`` of the time that
    the quorum took are waited for as well.
    """

    h: int = Field(default=32, ge=1, le=10**6)
    quorum: float = Field(default=0.5, gt=0, le=1)
    grace: float = Field(default=0.25, ge=0)
    rate: float = Field(default=0.7, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)

    @property
    def outer(self) -> OuterSettings:
        return OuterSettings(rate=self.rate, momentum=self.momentum)


MethodSettings = Servers | DiLoCo | DataParallel | Quorum


@dataclass(frozen=True)
class Method:
    """``name`` is the text that the method was asked for with."""

    name: str
    settings: MethodSettings


def _async(**given: object) -> Servers:
    """All workers at one server, as asynchronous local SGD has it (2401.09135)."""
    return Servers.model_validate({"tree": False, "h": 32, **given})


NAMED: Mapping[str, tuple[MethodSettings, str]] = {
    "fast": (
        Servers.of(PRESETS["fast"]).model_copy(
            update={"up": WIRES["fast"].up.codec, "down": WIRES["fast"].down.codec}
        ),
        "HALoS with the preset fast and its compressed links",
    ),
    "paper": (Servers.of(PRESETS["paper"]), "HALoS with the settings of its paper"),
    "halos": (Servers.of(PRESETS["paper"]), "the same, to be varied: halos:k=4:up=int4:down=int8"),
    "async-local-sgd": (
        _async(rate=0.7 / 16, momentum=0.9, delay=16),
        "every worker's change applied at once, at one server",
    ),
    "diloco": (DiLoCo(), "local steps for all alike, then one step together"),
    "diloco-dynamic": (DiLoCo(dynamic=True), "fewer local steps for the slower"),
    "data-parallel": (DataParallel(), "one step together after every gradient"),
    "decoupled-diloco": (Quorum(), "a quorum's changes merged by tokens, after a window of grace"),
    "heloco": (
        _async(rate=0.7 / 16, momentum=0.9, delay=16, correction="momentum"),
        "stale changes corrected against the outer momentum, at one server",
    ),
    "loscar": (
        Servers.of(PRESETS["paper"]).model_copy(
            update={
                "k": 8,
                "alpha": 1.0,
                "in_flight": "carry",
                "correction": "delay",
                "local_momentum": 0.0,
                "local_delay": 1,
            }
        ),
        "HALoS whose regions add what they did meanwhile to the root's model",
    ),
}
METHODS: Mapping[str, str] = {name: about for name, (_, about) in NAMED.items()}


def varied(base: MethodSettings, values: Mapping[str, object]) -> MethodSettings:
    """``base`` with other values. Raises ``ValidationError``."""
    if isinstance(base, Servers):
        return base.varied(values)
    return type(base).model_validate({**base.model_dump(), **values})


def method_of(text: str) -> Method:
    """The method that ``text`` asks for. Raises ``UserError``."""
    name, *given = text.strip().split(":")
    if name not in NAMED:
        close = difflib.get_close_matches(name, NAMED, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(NAMED)}"
        raise UserError(f"method {name}: there is no such method; {hint}")
    base = NAMED[name][0]
    values: dict[str, str] = {}
    for part in given:
        field, equals, value = part.partition("=")
        if field in values:
            raise UserError(f"method {text}: {field} is there twice; set it once")
        if not part:
            raise UserError(f"method {text}: nothing stands after a colon; remove the colon")
        if not equals:
            raise UserError(
                f'method {text}: "{part}" sets nothing; give it as {field or "k"}=VALUE'
            )
        values[field] = value
    try:
        settings = varied(base, values)
    except ValidationError as error:
        details = error.errors()[0]
        field = str(details["loc"][0])
        right = remedy(details, Place("", field, type(base)))
        raise UserError(f"method {text}: {field}: {right}") from error
    return Method(text.strip(), settings)
