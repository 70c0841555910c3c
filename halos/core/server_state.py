"""What a server is set to, and all that it knows: what a checkpoint keeps, tensors apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from halos.core.frozen import frozen
from halos.core.leasing import LeasingSettings, LeasingState
from halos.core.ledger import Pending
from halos.core.samples import Report
from halos.core.settings import Settings


class ServerSettings(Settings):
    """What governs one server. ``stop_after_local_steps`` ends a comparison (DESIGN 4)."""

    leasing: LeasingSettings = LeasingSettings()
    accumulation: int = Field(default=32, ge=1)
    merge_weight: float = Field(default=0.25, gt=0, le=1)
    in_flight: Literal["drop", "carry"] = "drop"
    drain_timeout_s: float = Field(default=300.0, gt=0)
    stop_after_local_steps: int | None = Field(default=None, ge=1)


@frozen
class InFlight:
    """A push that the parent has not answered yet. ``fence``: of the session it was sent in."""

    sequence: int
    fence: int
    report: Report


@dataclass(slots=True)
class ServerState:
    """``ready``: holds a model to hand out. ``pristine``: that is still the run's first model.

    ``fence`` is that of the session with the parent, ``None`` while it is away; nothing but
    ``Resume`` may be sent in it before it is ``resumed``.
    """

    leasing: LeasingState = field(default_factory=LeasingState)
    version: int = 0  # updates applied
    merged_version: int = 0  # version at the last merge
    base_version: int = 0  # parent's version that was merged last
    pending: Pending = field(default_factory=Pending)
    push: InFlight | None = None
    sequence: int = 0  # of the last push cut
    tenure: int = 0  # under which the parent knows this server's state
    fence: int | None = None
    resumed: bool = False
    ready: bool = False
    pristine: bool = True
    exhausted_at: float | None = None  # since when somebody idles though nothing is left
    reported: Report = field(default_factory=Report)  # totals over the run, ranges apart
    finished: bool = False
