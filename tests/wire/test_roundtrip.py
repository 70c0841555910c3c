"""Within one process a message arrives as it would over gRPC."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halos.codec.codecs import CODECS
from halos.core import messages as core
from halos.core.fragments import Fragments
from halos.core.tensors import FRAGMENT_ELEMENTS, NOTHING
from halos.wire.chunks import arrives
from halos.wire.frames import CodecName, Codecs
from halos.wire.roundtrip import RoundTrip
from tests.wire.samples import CARRYING, FROM_CHILD, FROM_PARENT

CODEC_OF = {
    "worker_update": {"workers"},
    "assignment": {"workers"},
    "push": {"up"},
    "push, which holds a model": {"up"},
    "push_answer": {"models"},
    "push_answer, a difference": {"models", "differences"},
    "resumed": {"models"},
}
PLAIN = {
    name: message
    for name, message in {**FROM_CHILD, **FROM_PARENT}.items()
    if getattr(message, "payload", None) is None
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_message_without_tensors_arrives_equal(name: str) -> None:
    assert RoundTrip()(PLAIN[name]) == PLAIN[name]


@pytest.mark.parametrize("name", CARRYING)
def test_tensors_arrive_in_memory_of_their_own(name: str) -> None:
    sent = Fragments([torch.randn(300_000), torch.randn(5)])
    arrived = RoundTrip()(replace(CARRYING[name], payload=sent))
    assert replace(arrived, payload=NOTHING) == CARRYING[name]
    assert isinstance(arrived.payload, Fragments)
    for mine, theirs in zip(sent.tensors, arrived.payload.tensors, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()


@pytest.mark.parametrize("name", CARRYING)
def test_each_kind_of_link_has_its_codec(name: str) -> None:
    sent = Fragments([torch.randn(100)])
    rounded = [t.bfloat16().float() for t in sent.tensors]
    for links in ("workers", "up", "models", "differences"):
        arrived = RoundTrip(Codecs(**{links: "bf16"}))(replace(CARRYING[name], payload=sent))
        is_its_own = links in CODEC_OF[name]
        expected = rounded if is_its_own else list(sent.tensors)
        assert torch.equal(arrived.payload.tensors[0], expected[0])


def test_a_simulation_without_tensors_sends_messages_as_they_are() -> None:
    for message in (CARRYING["resumed"], CARRYING["assignment"]):
        assert RoundTrip()(message) is message


def test_numbers_that_are_none_arrive_so_that_they_can_be_refused() -> None:
    sent = Fragments([torch.tensor([float("nan"), float("inf"), 1.0])])
    for codec in ("fp32", "bf16"):
        arrived = RoundTrip(Codecs(workers=codec))(replace(CARRYING["worker_update"], payload=sent))
        assert isinstance(arrived, core.WorkerUpdate)
        assert isinstance(arrived.payload, Fragments)
        (values,) = arrived.payload.tensors
        assert values.isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize("codec", CODECS)
def test_a_whole_fragment_arrives_in_every_codec(codec: CodecName) -> None:
    """In as few chunks as a mebibyte allows: some codecs put a whole fragment into one."""
    sent = Fragments([torch.randn(FRAGMENT_ELEMENTS), torch.randn(5)])
    codecs = Codecs(up=codec, differences=codec)
    push = replace(CARRYING["push"], payload=sent)
    answer = replace(CARRYING["push_answer, a difference"], payload=sent)
    for message in (push, answer):
        arrived = RoundTrip(codecs)(message).payload
        assert isinstance(arrived, Fragments)
        for mine, theirs in zip(sent.tensors, arrived.tensors, strict=True):
            assert torch.equal(arrives(mine, codec), theirs)
