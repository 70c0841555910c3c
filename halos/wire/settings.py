"""The section ``[wire]`` of a specification: in which codecs a run's tensors travel."""

from __future__ import annotations

from typing import Literal, NamedTuple, cast, get_args

from pydantic import field_validator

from halos.core.settings import Settings
from halos.wire.frames import CodecName, Codecs


class Uplink(NamedTuple):
    """``feedback``: what a push loses in rounding goes into the next one."""

    codec: CodecName
    feedback: bool


class Downlink(NamedTuple):
    """``delta``: a server that holds a model is sent what the next one differs by."""

    codec: CodecName
    delta: bool


class WireTable(Settings):
    """In which codecs models and updates travel.

    ``workers``: both ways between workers and their server, such as ``bf16``. Between servers,
    ``uplink``: pushes, such as ``int4+ef+zstd`` with error feedback; ``downlink``: models, such as
    ``int8-delta`` for differences to the model before. What is left out comes with the preset of
    ``[sync]``.
    """

    workers: Literal["fp32", "bf16", "fp16"] | None = None
    uplink: str | None = None
    downlink: str | None = None

    @field_validator("uplink")
    @classmethod
    def _is_an_uplink(cls, uplink: str | None) -> str | None:
        if uplink is not None and _uplink(uplink).codec not in get_args(CodecName):
            raise ValueError(
                f'"{uplink}" is not known; give one of {KNOWN}, with +ef for error feedback and, '
                "from int8 on, +zstd to compress it"
            )
        return uplink

    @field_validator("downlink")
    @classmethod
    def _is_a_downlink(cls, downlink: str | None) -> str | None:
        if downlink is None:
            return None
        codec, delta = _downlink(downlink)
        if codec not in (get_args(CodecName) if delta else WHOLE):
            raise ValueError(
                f'"{downlink}" is not known; give {", ".join(WHOLE)}, or with -delta any codec of '
                f"{KNOWN}, such as int8-delta"
            )
        return downlink

    def over(self, preset: WireTable) -> WireTable:
        """With what is left out here as in ``preset``."""
        given = self.model_dump(exclude_none=True)
        return WireTable(**preset.model_dump(exclude_none=True) | given)

    @property
    def up(self) -> Uplink:
        return _uplink(self.uplink or EXACT)

    @property
    def down(self) -> Downlink:
        return _downlink(self.downlink or EXACT)

    @property
    def codecs(self) -> Codecs:
        """Of each kind of message."""
        down, delta = self.down
        return Codecs(
            workers=self.workers or EXACT,
            up=self.up.codec,
            models=EXACT if delta else down,
            differences=down if delta else None,
        )


EXACT: CodecName = "fp32"
WHOLE = ("fp32", "bf16", "fp16")  # for what is not made up for later
KNOWN = ", ".join(name for name in get_args(CodecName) if "+" not in name)


def _uplink(text: str) -> Uplink:
    """Of ``CODEC[+ef][+zstd]``, in any order; the codec may be none."""
    parts = text.split("+")
    feedback = "ef" in parts[1:]
    if feedback:
        parts.remove("ef")
    return Uplink(cast(CodecName, "+".join(parts)), feedback)


def _downlink(text: str) -> Downlink:
    """Of ``CODEC[+zstd][-delta]``; the codec may be none."""
    codec = text.removesuffix("-delta")
    return Downlink(cast(CodecName, codec), codec != text)
