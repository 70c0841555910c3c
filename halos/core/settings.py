"""Base of every settings class. A settings class lives beside what it configures."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Frozen, strict about unknown names and about infinities; errors name the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
