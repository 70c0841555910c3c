"""One push on each tier in closed form, with K and N unlike the number of workers (DESIGN 4).

Two workers, K = 5, N = 4 at the region; two regions, N = 3 at the root.
"""

from __future__ import annotations

import pytest

from halos.core.equations import OuterSettings
from halos.core.leasing import LeasingSettings
from halos.core.messages import Assignment, Push, PushAnswer
from halos.core.server import Server, ServerSettings
from tests.core.builders import (
    finished,
    found,
    fragments,
    join_region,
    only,
    push_of,
    receive,
    request_of,
    root_server,
    torch_state,
    values,
    working_region,
)

LOCAL = OuterSettings(rate=0.2, momentum=0.9, momentum_delay=4)
GLOBAL = OuterSettings(rate=0.15, momentum=0.5, momentum_delay=3)
THETA = (10.0, -20.0)
G = [(1.0, 2.0), (0.5, -1.0), (-2.0, 4.0), (3.0, 0.25), (0.125, 8.0)]


def total(*gs: tuple[float, float]) -> list[float]:
    return [sum(g) for g in zip(*gs, strict=True)]


def pushed() -> tuple[Server, Push, list[Assignment]]:
    """The region after five updates of two workers by turns: its push and their assignments."""
    tensors = torch_state(*THETA, outer=LOCAL, parent=True)
    region, current = working_region(tensors=tensors, workers=2, accumulation=5, merge_weight=0.25)
    for i, g in enumerate(G):
        effects = receive(region, f"w{i % 2}", finished(current[i % 2], *g))
        current[i % 2] = only(effects, Assignment)
        assert bool(found(effects, Push)) == (i == 4)
    return region, only(effects, Push), current


def test_the_region_pushes_base_minus_theta() -> None:
    """When `version >= merged_version + K` and no push is in flight: push `u = base - theta`."""
    _, push, _ = pushed()
    # Each g at the quoted rate, and beta times their mean once, at the fourth, at N times it.
    expected = [
        0.2 * x + (4 * 0.2) * 0.9 * (y / 4) for x, y in zip(total(*G), total(*G[:4]), strict=True)
    ]
    assert values(push.payload) == pytest.approx(expected)
    assert (push.sequence, push.base_version) == (1, 0)


def test_the_region_reports_all_that_the_push_contains() -> None:
    _, push, _ = pushed()
    report = push.report
    assert (report.updates, report.local_steps, report.tokens) == (5, 20, 200)
    assert (report.contained, report.dropped) == (((0, 20),), ())


def test_the_root_applies_it_and_answers_with_its_model() -> None:
    """applies each region's change, answers with the current global model"""
    root = root_server(tensors=torch_state(0.0, outer=GLOBAL))
    for fence, name in enumerate(("eu", "us"), start=1):
        join_region(root, name, fence=fence)
        receive(root, name, request_of(1, 100, fence=fence))
    models = []
    for i, (name, u) in enumerate([("eu", 1.0), ("us", 10.0), ("us", -4.0), ("eu", 2.0)]):
        fence, sequence = (1, 1 + (i == 3)) if name == "eu" else (2, i)
        start = 20 * i if name == "eu" else 100 + 20 * i
        push = push_of(sequence, u, fence=fence, contained=((start, start + 20),))
        answer = only(receive(root, name, push), PushAnswer, name)
        models.append(values(answer.payload)[0])
        assert (answer.sequence, answer.version) == (sequence, i + 1)
    third = -0.15 * (1 + 10 - 4) - (3 * 0.15) * 0.5 * ((1 + 10 - 4) / 3)
    assert models == pytest.approx([-0.15, -1.65, third, third - 0.3])


def test_the_region_blends_the_answer_in() -> None:
    """theta = (1-alpha)*theta + alpha*q, base = theta, merged_version = version"""
    region, push, current = pushed()
    theta = [x - u for x, u in zip(THETA, values(push.payload), strict=True)]
    q = (100.0, 200.0)
    receive(region, "root", PushAnswer(1, 1, 9, fragments(*q)))
    merged = [0.75 * x + 0.25 * y for x, y in zip(theta, q, strict=True)]
    assert values(region.tensors.publish()) == pytest.approx(merged)
    assert (region.state.merged_version, region.state.base_version) == (5, 9)
    # base = theta: the next push holds only what came after the merge.
    for i, g in enumerate(G):
        effects = receive(region, f"w{i % 2}", finished(current[i % 2], *g))
        current[i % 2] = only(effects, Assignment)
    u = [0.2 * x for x in total(*G)]
    # The eighth update is the third of these: m = .9 * (first four)/4 + (5th and first three)/4.
    m = [0.9 * x / 4 + y / 4 for x, y in zip(total(*G[:4]), total(G[4], *G[:3]), strict=True)]
    expected = [a + 4 * 0.2 * 0.9 * b for a, b in zip(u, m, strict=True)]
    assert values(only(effects, Push).payload) == pytest.approx(expected)


def test_who_gets_parameters_after_the_merge_gets_the_blend() -> None:
    region, push, current = pushed()
    receive(region, "root", PushAnswer(1, 1, 9, fragments(0.0, 0.0)))
    answer = only(receive(region, "w0", finished(current[0], 0.0, 0.0)), Assignment)
    theta = [x - u for x, u in zip(THETA, values(push.payload), strict=True)]
    assert values(answer.payload) == pytest.approx([0.75 * x for x in theta])


def test_paper_settings() -> None:
    """Paper settings: H 8, K 32, alpha 0.25"""
    settings = ServerSettings()
    assert LeasingSettings().local_steps == 8
    assert (settings.accumulation, settings.merge_weight, settings.in_flight) == (32, 0.25, "drop")
