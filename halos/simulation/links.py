"""Wide-area links that round what crosses them, with error feedback up and deltas down.

A region's push is rounded together with what its earlier pushes lost in rounding. A model comes
down as the rounded difference to what the region already has. Values are really rounded; how many
bytes they take is the codec's nominal size, without an entropy stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from halos.core.fragments import Fragments
from halos.core.messages import Message, NodeId, Push, PushAnswer, Resumed

LinkCodec = Literal["fp32", "bf16", "int8", "int4", "int2"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """So many bits a number, and for each ``size`` of them a scale in bf16."""

    bits: int
    size: int

    @property
    def bits_an_element(self) -> float:
        return self.bits + 16 / self.size


BLOCKS: Mapping[LinkCodec, Blocks] = {
    "int8": Blocks(8, 256),
    "int4": Blocks(4, 64),
    "int2": Blocks(2, 32),
}


def ratio(codec: LinkCodec) -> float:
    """Bytes on the link as a share of those in fp32."""
    if codec in BLOCKS:
        return BLOCKS[codec].bits_an_element / 32
    return 0.5 if codec == "bf16" else 1.0


def rounded(values: Tensor, codec: LinkCodec) -> Tensor:
    """What arrives of ``values`` (one dimension, fp32): to the nearest of evenly spaced levels.

    Each block spans from minus to plus its largest magnitude.
    """
    if codec == "fp32":
        return values
    if codec == "bf16":
        return values.bfloat16().float()
    blocks = BLOCKS[codec]
    levels = 2 ** (blocks.bits - 1) - 1
    padded = torch.nn.functional.pad(values, (0, -len(values) % blocks.size))
    rows = padded.view(-1, blocks.size)
    scale = (rows.abs().amax(dim=1, keepdim=True) / levels).bfloat16().float()
    steps = torch.where(scale > 0, rows / scale, 0.0).round_().clamp_(-levels, levels)
    arrives: Tensor = (steps * scale).view(-1)
    return arrives[: len(values)]


@dataclass
class _Loss:
    """What pushes lost in rounding: settled, and once push ``sequence`` is answered."""

    settled: list[Tensor]
    after: list[Tensor]
    sequence: int = 0


@dataclass
class CompressedLinks:
    """What becomes of messages between servers. Both ends' memory of it is kept here.

    ``start`` is the model that every region begins with.
    """

    up: LinkCodec
    down: LinkCodec
    start: Fragments
    _lost: dict[NodeId, _Loss] = field(default_factory=dict)
    _shadows: dict[NodeId, Fragments] = field(default_factory=dict)

    def __call__(self, sender: NodeId, to: NodeId, message: Message) -> Message:
        match message:
            case Push(sequence=sequence, payload=Fragments() as change):
                return replace(message, payload=self._pushed(sender, sequence, change))
            case PushAnswer(sequence=sequence, payload=Fragments() as model):
                self._settle(to, sequence)
                return replace(message, payload=self._shadowed(to, model))
            case Resumed():
                return self._resumed(to, message)
            case _:
                return message

    def _pushed(self, sender: NodeId, sequence: int, change: Fragments) -> Fragments:
        if self.up == "fp32":
            return change
        loss = self._lost.get(sender)
        if loss is None:
            zeros = [torch.zeros_like(t) for t in change.tensors]
            loss = self._lost[sender] = _Loss(zeros, zeros)
        wanted = [t + e for t, e in zip(change.tensors, loss.settled, strict=True)]
        arrives = [rounded(t, self.up) for t in wanted]
        loss.after = [t - a for t, a in zip(wanted, arrives, strict=True)]
        loss.sequence = sequence
        return Fragments(arrives)

    def _settle(self, sender: NodeId, sequence: int) -> None:
        loss = self._lost.get(sender)
        if loss is not None and loss.sequence == sequence:
            loss.settled = loss.after

    def _shadowed(self, to: NodeId, model: Fragments) -> Fragments:
        if self.down == "fp32":
            return model
        shadow = self._shadows.get(to, self.start)
        arrives = Fragments(
            [
                known + rounded(now - known, self.down)
                for now, known in zip(model.tensors, shadow.tensors, strict=True)
            ]
        )
        self._shadows[to] = arrives
        return arrives

    def _resumed(self, to: NodeId, message: Resumed) -> Message:
        """After an outage a push was answered, or not; after a reset the model comes whole."""
        if message.reset:
            self._lost.pop(to, None)
            if isinstance(message.payload, Fragments):
                self._shadows[to] = message.payload
            else:
                self._shadows.pop(to, None)
            return message
        if not isinstance(message.payload, Fragments):
            return message
        self._settle(to, message.sequence)
        return replace(message, payload=self._shadowed(to, message.payload))
