"""halos.join over real sockets: every kind of parameter arrives, and nothing is added."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halos
from halos.core.state import TorchState
from halos.errors import UserError
from halos.runtime.prepare import prepare
from halos.runtime.recorded import recorded_run
from halos.runtime.trace import read_trace
from halos.training.parameters import to_state_dict
from workers.worker import train

from .conftest import Spec
from .whole import Whole, whole_run

ODD = '''
import torch
from torch import nn

class Odd(nn.Module):
    """Tied, frozen, 0-d, bf16 and buffered parts; random where the coordinator's must win."""

    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.gain = nn.Parameter(torch.zeros(width, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.rand(width), requires_grad=False)
        self.register_buffer("shift", torch.rand(width))
        self.register_buffer("count", torch.randint(0, 99, (3,)))

    def forward(self, tokens):
        hidden = self.embedding(tokens) * self.scale * (1 + self.gain.float())
        return self.head(hidden + 0.01 * self.frozen + 0.01 * self.shift)

def build(width):
    return Odd(width)
'''
Parts = dict[str, Tensor]


def parts_of(model: nn.Module) -> Parts:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def root_model(whole: Whole) -> Parts:
    tensors = whole.coordinator.server.tensors
    assert isinstance(tensors, TorchState)
    state = to_state_dict(whole.coordinator.children.layout, tensors.publish())
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.fixture
def odd(tmp_path: Path, specification: Spec, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "odd_model.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_model", raising=False)
    model = {"factory": "odd_model:build", "arguments": {"width": 12}, "folder": str(tmp_path)}
    return lambda **sections: specification(model=model, **sections)


def test_frozen_buffered_scalar_bf16_and_tied_parameters_arrive_as_they_are(
    odd: Any, tmp_path: Path
) -> None:
    own = importlib.import_module("odd_model").build(12)  # random in other places than the run's
    before, seen = parts_of(own), []

    def loop(run: halos.Run) -> Parts:
        for tokens, targets in run.batches():
            if not seen:
                seen.append(parts_of(run.model))
            loss = run.loss(tokens, targets) / run.accumulation
            loss.backward()
            run.step(loss)
        return parts_of(run.model)

    training = {"local_steps_total": 48, "batch_size": 2}
    sync = {"local_steps": 2, "accumulation": 2, "in_flight": "carry"}
    with whole_run(odd(training=training, sync=sync)) as whole:
        first = root_model(whole)
        loops = whole.train(loop, "us", model=own), whole.train(loop, "us"), whole.train(loop, "eu")
        mine, *others = whole.end(*loops)
        last = root_model(whole)
        assert whole.coordinator.server.state.leasing.ledger.credited.total == 96

    assert own.head.weight is own.embedding.weight, "tied weights are one after the download"
    for name in ("scale", "gain", "embedding.weight"):
        assert mine[name].dtype == before[name].dtype and mine[name].shape == before[name].shape
        assert not torch.equal(last[name], first[name]), f"{name} was not trained"
    for name in ("frozen", "shift", "count"):
        assert not torch.equal(mine[name], before[name]), f"{name} is not the run's"
        assert all(torch.equal(mine[name], other[name]) for other in others)
        assert torch.equal(mine[name], seen[0][name]), f"{name} moved in training"


def test_a_model_that_differs_in_one_shape_is_named_and_changes_nothing(odd: Any) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(256, 13)

    with whole_run(odd(training={"local_steps_total": 24, "batch_size": 2})) as whole:
        with pytest.raises(UserError, match=r"model: .* embedding.weight"):
            halos.join(whole.address("us"), model=Other())
        whole.end(whole.train(train, "us"), whole.train(train, "us"), whole.train(train, "eu"))
        assert whole.coordinator.server.state.leasing.ledger.all_credited


@pytest.mark.parametrize("in_flight", ["drop", "carry"])
def test_the_trace_of_a_run_over_grpc_replays_to_the_same_bits(
    specification: Spec, tmp_path: Path, in_flight: str
) -> None:
    settings = specification(
        sync={"local_steps": 2, "accumulation": 2, "in_flight": in_flight},
        training={"local_steps_total": 60, "batch_size": 2},
    )
    traces = tmp_path / "traces"
    traces.mkdir()
    with whole_run(settings, traces) as whole:
        whole.end(
            *(
                whole.train(train, server, name=name, trace=traces / f"{server}-{name}.jsonl")
                for server, name in (("us", "0"), ("us", "1"), ("eu", "0"))
            )
        )
        ended = {"root": whole.coordinator.server.tensors.publish()} | {
            name: process.server.tensors.publish() for name, process in whole.regions.items()
        }

    recorded = recorded_run(prepare(settings), [read_trace(file) for file in traces.iterdir()])
    replayed = recorded.replay.run()
    assert replayed.complete and replayed.rounds >= 25
    for name, model in ended.items():
        again = recorded.replay.nodes[name].tensors.publish()  # type: ignore[attr-defined]
        assert all(map(torch.equal, again.tensors, model.tensors)), f"{name} differs"
