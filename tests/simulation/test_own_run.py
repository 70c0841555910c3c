"""A run's own specification as an environment and a method."""

from __future__ import annotations

import pytest

from halos.core.messages import BlockRequest, Push, WorkerUpdate
from halos.core.samples import Report
from halos.core.tensors import NOTHING
from halos.errors import UserError
from halos.simulation.environment import EnvironmentModel
from halos.simulation.methods import Servers
from halos.simulation.own_run import environment_of_run, method_of_run
from halos.specification import RunSpecification


def specification(**sections: object) -> RunSpecification:
    given = {
        "run": {"name": "mine"},
        "regions": [
            {"name": "us", "workers": [1.0, 0.5]},
            {"name": "eu", "workers": [0.8], "link": {"rate_mbps": 10.0}},
        ],
        "link": {"rate_mbps": 100.0, "rtt_ms": 80.0},
        **sections,
    }
    return RunSpecification.model_validate(given)


def test_links_and_workers_are_those_of_the_specification() -> None:
    run = specification()
    environment = environment_of_run(run, step_ms=20)
    topology = environment.tree()
    assert [(w.name, w.speed) for w in topology.workers] == [
        ("us/0", 1.0),
        ("us/1", 0.5),
        ("eu/0", 0.8),
    ]
    assert environment.bandwidth_gbps is not None
    root, us, eu = environment.bandwidth_gbps
    assert root[1:] == (0.1, 0.01)
    assert (us[0], eu[0], us[2]) == (0.1, 0.01, 0.01)
    assert environment.latency_s(0, 1) == environment.latency_s(2, 0) == 0.04
    assert environment.latency_s(1, 2) == 0.08  # by way of the root
    assert environment.model_bytes == 4 * 123_200
    assert EnvironmentModel(environment, topology).compute_s("us/1", 4, 0.0) == pytest.approx(0.16)


def test_what_is_sent_between_regions_waits_for_more_than_its_bytes() -> None:
    environment = environment_of_run(specification(), step_ms=20, exchange_ms=6)
    model = EnvironmentModel(environment, environment.tree())
    push = Push(1, 1, 0, Report(), NOTHING)
    alone = 4 * 123_200 * 8 / 0.1e9
    assert model.transfer_s("us", "root", push) == pytest.approx(2.2 * 0.04 + alone)
    assert model.transfer_s("us", "root", BlockRequest(1, 1, 1, 1)) == pytest.approx(0.04)
    update = WorkerUpdate("us/0/1/1", 1, 0, 1, 1, 0.0, 0.0, 0.0, NOTHING)
    assert model.transfer_s("us/0", "us", update) == pytest.approx(0.003, abs=1e-5)


def test_the_method_is_that_of_the_specification() -> None:
    wire = {"uplink": "bf16+ef", "downlink": "bf16-delta"}
    run = specification(sync={"accumulation": 3}, wire=wire)
    settings = method_of_run(run).settings
    assert isinstance(settings, Servers)
    assert (settings.k, settings.up, settings.down) == (3, "bf16", "bf16")
    assert settings.resolved(run.topology) == run.resolved_sync


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"root": {"workers": 1}}, "[root] workers: cannot be simulated yet"),
        (
            {
                "regions": [
                    {"name": "eu", "workers": 1},
                    {"name": "rack", "workers": 1, "parent": "eu"},
                ]
            },
            '[[regions]] "rack" parent: cannot be simulated yet',
        ),
    ],
)
def test_what_cannot_be_simulated_is_said(sections: dict[str, object], said: str) -> None:
    with pytest.raises(UserError) as caught:
        environment_of_run(specification(**sections), step_ms=20)
    assert str(caught.value).startswith(said)
