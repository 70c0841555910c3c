"""Which model a run trains: the built-in gpt by its size, one of transformers, one of a factory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from halos.core.settings import Settings
from halos.errors import UserError

PRESETS: Mapping[str, Mapping[str, int | bool]] = {
    # Named after their size over bytes, a vocabulary of 256.
    "0.1m": {"layers": 2, "heads": 4, "width": 64},
    "0.4m": {"layers": 2, "heads": 4, "width": 128},
    "0.8m": {"layers": 4, "heads": 4, "width": 128},
    "2m": {"layers": 4, "heads": 6, "width": 192},
    "10m": {"layers": 6, "heads": 6, "width": 384},
    # Shapes of Pythia (Biderman et al. 2023) and Llama, named after their size over about 50,000
    # tokens, each of which these models embed twice.
    "70m": {"layers": 6, "heads": 8, "width": 512, "tied": False},
    "160m": {"layers": 12, "heads": 12, "width": 768, "tied": False},
    "410m": {"layers": 24, "heads": 16, "width": 1024, "tied": False},
    "1b": {"layers": 16, "heads": 8, "width": 2048, "tied": False},
    "1.4b": {"layers": 24, "heads": 16, "width": 2048, "tied": False},
    "2.8b": {"layers": 32, "heads": 32, "width": 2560, "tied": False},
    "7b": {"layers": 32, "heads": 32, "width": 4096, "ffn_width": 11008, "tied": False},
}


Kind = Literal["gpt", "transformers", "factory"]
GPT_ONLY = ("preset", "layers", "width", "heads", "kv_heads", "ffn_width", "tied", "rope_base")
NEEDS: Mapping[str, str] = {"config": "transformers", "arguments": "factory"}
POSITIONS = "max_position_embeddings"  # what most of transformers call the context


class ModelSettings(Settings):
    """Size of the built-in model: a ``preset``, or ``layers``, ``heads`` and ``width``.

    What is given besides a preset overrides it. ``vocab_size`` and ``context`` (the longest
    sequence, in tokens) default to those of the data set (:meth:`for_data`).

    In place of it ``transformers`` names a type of causal language model of that library, made
    from the values of ``config``; or ``factory``, as "package.module:function", a function that
    returns a module when called with ``arguments``, looked for in ``folder`` first.
    """

    preset: str | None = None
    layers: int = Field(default=0, ge=1)
    width: int = Field(default=0, ge=1)
    heads: int = Field(default=0, ge=1)
    kv_heads: int = Field(default=0, ge=0, validate_default=True)
    ffn_width: int = Field(default=0, ge=0, validate_default=True)
    vocab_size: int | None = Field(default=None, ge=2)
    context: int | None = Field(default=None, ge=1)
    tied: bool = True
    rope_base: float = Field(default=10_000.0, gt=0)
    transformers: str | None = None
    config: dict[str, Any] = Field(default={})
    factory: str | None = None
    arguments: dict[str, Any] = Field(default={})
    folder: Path | None = None

    @property
    def kind(self) -> Kind:
        return "transformers" if self.transformers else "factory" if self.factory else "gpt"

    @model_validator(mode="before")
    @classmethod
    def _overlay(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        for field, needs in NEEDS.items():
            if given.get(field) and not given.get(needs):
                raise ValueError(f"{field}: goes with {needs}, which is not set")
        for kind in ("transformers", "factory"):
            if given.get(kind):
                return cls._foreign(kind, given)
        preset = given.get("preset")
        known = ", ".join(PRESETS)
        if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
            raise ValueError(f"preset: there is no {preset!r}; the presets are {known}")
        values = {**PRESETS.get(preset or "", {}), **given}
        missing = [name for name in ("layers", "heads", "width") if name not in values]
        if missing:
            raise ValueError(f"{missing[0]}: is missing; set it, or preset to one of {known}")
        return values

    @classmethod
    def _foreign(cls, kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """What was written down of a model that is not ours holds our fields' defaults."""
        defaults = {name: field.default for name, field in cls.model_fields.items()}
        kept = {name: v for name, v in given.items() if name not in GPT_ONLY or v != defaults[name]}
        other = "factory" if kind == "transformers" else "transformers"
        for field in kept:
            if field in GPT_ONLY or (field == other and given[field]):
                raise ValueError(f"{field}: does not go with {kind}; remove one of the two")
        return kept

    @field_validator("factory")
    @classmethod
    def _module_and_function(cls, factory: str | None) -> str | None:
        module, colon, function = (factory or "m:f").partition(":")
        if not (
            colon and function.isidentifier() and all(map(str.isidentifier, module.split(".")))
        ):
            raise ValueError(f'"{factory}" is not allowed; give "package.module:function"')
        return factory

    @field_validator("heads")
    @classmethod
    def _even_heads(cls, heads: int, info: ValidationInfo) -> int:
        width = info.data.get("width")
        if width is not None and heads > 0 and width % (2 * heads):
            raise ValueError(f"width {width} is not a multiple of 2 * heads ({2 * heads})")
        return heads

    @field_validator("kv_heads")
    @classmethod
    def _fill_kv_heads(cls, kv_heads: int, info: ValidationInfo) -> int:
        heads = info.data.get("heads", 0)
        if kv_heads and heads % kv_heads:
            raise ValueError(f"heads ({heads}) is not a multiple of it")
        return kv_heads or heads

    @field_validator("ffn_width")
    @classmethod
    def _fill_ffn_width(cls, ffn_width: int, info: ValidationInfo) -> int:
        # Three matrices of 8/3 the width weigh what two of 4 times the width do.
        return ffn_width or 32 * math.ceil(info.data.get("width", 0) * 8 / 3 / 32)

    def for_data(self, vocab_size: int, sequence_length: int) -> ModelSettings:
        """With ``vocab_size`` and ``context`` filled in. ``UserError`` if one is too small."""
        values: dict[str, int] = {}
        for field, needed in (("vocab_size", vocab_size), ("context", sequence_length)):
            name, mine = self._given(field)
            if mine is not None and mine < needed:
                raise UserError(f"model.{name} is {mine}, but the data needs {needed} or more")
            values[field] = mine or needed
        return self.model_copy(update=values)

    def _given(self, field: str) -> tuple[str, int | None]:
        """Under which name ``vocab_size`` or ``context`` is set, and to what."""
        name = POSITIONS if field == "context" else field
        if self.kind == "transformers" and isinstance(value := self.config.get(name), int):
            return f"config.{name}", value
        return field, getattr(self, field)
