"""The trace of a real run, replayed, gives the same parameters to the bit (DESIGN 3)."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor

from coordinator.replay import replay
from halos.core.leasing import LeasingSettings
from halos.core.membership import Identity, MembershipSettings
from halos.core.messages import Node, NodeId, RaiseFence, Received, Told
from halos.core.server import Server, ServerSettings
from halos.core.state import TorchState
from halos.core.tensors import NullState
from halos.errors import UserError
from halos.runtime.dispatcher import RoundEnds, Step
from halos.runtime.local import ALONE, LocalRun, Order, open_run
from halos.runtime.plan import RunPlan
from halos.runtime.prepare import Prepared
from halos.runtime.recorded import RecordedRun, facts_of, recorded_run
from halos.runtime.replay import Replay, ReplayDiffers, Replayed
from halos.runtime.trace import TraceWriter, parse_trace
from halos.runtime.virtual import VirtualClock
from halos.simulation.environment import Environment
from halos.store.encoding import TensorTable, encoder
from halos.training.inner import LocalTrainer

from .conftest import Prepare

REGIONS = [
    {"name": "us", "workers": [1.0, 0.5]},
    {"name": "eu", "workers": [0.8, 0.3]},
    {"name": "ap", "workers": [0.9, 0.9]},
]
Lines = list[dict[str, Any]]


@dataclass
class Recorded:
    """A run that was traced, and all bits that it ended with."""

    prepared: Prepared
    lines: Lines
    end: dict[str, list[Tensor]]
    states: dict[str, Any]

    def replay(self, lines: Lines | None = None) -> tuple[RecordedRun, Replayed]:
        """Live through these lines, by default those recorded, kept as one file a process."""
        files: dict[str, list[str]] = {}
        first, *events = lines or self.lines
        for line in events:
            process = line["node"].partition(".")[0]
            files.setdefault(process, [json.dumps(first)]).append(json.dumps(line))
        traces = [parse_trace(process, texts) for process, texts in files.items()]
        again = recorded_run(self.prepared, traces)
        return again, again.replay.run()


def record(
    prepared: Prepared, *, order: Order = "arrival", then: Callable[[LocalRun], None] | None = None
) -> Recorded:
    """Run to the end, tracing; ``then`` is called first."""
    file = io.StringIO()
    with open_run(prepared, order=order, beginning="replace") as run:
        run.driver.observers.append(TraceWriter(file, facts_of(prepared, ALONE)))
        if then is not None:
            then(run)
        assert run.run()
        unfinished = {
            p.node: p.event.job.lease.id
            for p in run.driver.under_way()
            if isinstance(p.event, RoundEnds)
        }
        return Recorded(
            prepared,
            [json.loads(text) for text in file.getvalue().splitlines()],
            bits(run.driver.nodes, run.trainers, unfinished),
            states(run.driver.nodes),
        )


def bits(
    nodes: dict[NodeId, Node],
    trainers: dict[NodeId, LocalTrainer],
    unfinished: dict[NodeId, str] | None = None,
) -> dict[str, list[Tensor]]:
    """Copies of every tensor of every server and worker."""
    found = {}
    for name, node in nodes.items():
        if isinstance(node, Server):
            assert isinstance(node.tensors, TorchState)
            for part, fragments in node.tensors.capture().items():
                found[f"{name} {part}"] = [t.clone() for t in fragments.tensors]
    for name, trainer in trainers.items():
        for part, tensor in trainer.capture(before=(unfinished or {}).get(name)).items():
            found[f"{name} {part}"] = [tensor]
    return found


def states(nodes: dict[NodeId, Node]) -> dict[str, Any]:
    encode = encoder(TensorTable())
    return {name: encode.unstructure(node.state) for name, node in nodes.items()}  # type: ignore[attr-defined]


def assert_same_end(recorded: Recorded, again: RecordedRun) -> None:
    mine, theirs = bits(again.replay.nodes, again.trainers), recorded.end
    assert mine.keys() == theirs.keys()
    for name, tensors in mine.items():
        assert all(map(torch.equal, tensors, theirs[name])), name


@pytest.fixture
def small(prepared: Prepare) -> Callable[..., Prepared]:
    def build(in_flight: str = "drop", **sections: Any) -> Prepared:
        sync = {"local_steps": 2, "accumulation": 2, "in_flight": in_flight}
        training = {"local_steps_total": 90, "batch_size": 2}
        return prepared(**{"regions": REGIONS, "sync": sync, "training": training} | sections)

    return build


@pytest.mark.parametrize("in_flight", ["drop", "carry"])
def test_a_replay_gives_the_same_bits_and_lines(
    small: Callable[..., Prepared], in_flight: str
) -> None:
    recorded = record(small(in_flight))
    again, replayed = recorded.replay()
    assert replayed.complete and replayed.events == len(recorded.lines) - 1
    assert not replayed.lost
    assert replayed.rounds == sum(types(line)[0] == "LocalStepsDone" for line in recorded.lines[1:])
    assert_same_end(recorded, again)
    assert states(again.replay.nodes).keys() == recorded.states.keys()


def types(line: dict[str, Any]) -> tuple[str, str]:
    event = line["event"]
    return event["type"], (event.get("message") or event.get("notice") or {}).get("type", "")


# ---------------------------------------------------------------- what is wrong is noticed


@pytest.fixture(scope="module")
def kept() -> list[Recorded]:
    return []


@pytest.fixture
def recorded(small: Callable[..., Prepared], kept: list[Recorded]) -> Recorded:
    """Recorded once, with lines that each test may falsify."""
    if not kept:
        kept.append(record(small()))
    return replace(kept[0], lines=deepcopy(kept[0].lines))


def spot(lines: Lines, node: NodeId, *kind: str, after: int = 0) -> int:
    """The index of a line in the midst of a node's events of this kind."""
    found = [
        i for i, line in enumerate(lines) if "event" in line and line["node"] == node
        and types(line)[: len(kind)] == kind
    ]  # fmt: skip
    return found[len(found) // 2 + after]


@pytest.mark.parametrize(
    ("node", "kind"),
    [
        ("us", ("Received", "WorkerUpdate")),
        ("root", ("Received", "Push")),
        ("eu", ("Received", "PushAnswer")),
        ("ap/1", ("Received", "Assignment")),
        ("us/0", ("LocalStepsDone",)),
    ],
)
def test_a_bit_that_differs_is_named(
    recorded: Recorded, node: NodeId, kind: tuple[str, ...]
) -> None:
    index = spot(recorded.lines, node, *kind)
    event = recorded.lines[index]["event"]
    payload = event.get("message", event)["payload"]
    true = payload["crc32"]
    payload["crc32"] ^= 1
    with pytest.raises(ReplayDiffers, match=r"payload\.crc32 was recorded as") as error:
        recorded.replay()
    assert error.value.node == node
    assert (error.value.recorded, error.value.came) == (true ^ 1, true)


def test_an_effect_that_differs_is_named_with_its_line(recorded: Recorded) -> None:
    index = spot(recorded.lines, "us", "Received", "WorkerUpdate")
    recorded.lines[index]["effects"][0]["message"]["version"] += 1
    number = [i for i, line in enumerate(recorded.lines[1:]) if of_process(line, "us")]
    with pytest.raises(ReplayDiffers, match=r"effects\[0\]\.message\.version") as error:
        recorded.replay()
    assert error.value.where == f"us:{number.index(index - 1) + 2}"  # the facts come first


def test_two_events_in_the_other_order_are_noticed(recorded: Recorded) -> None:
    one, other = (spot(recorded.lines, "us", "Received", "WorkerUpdate", after=i) for i in range(2))
    recorded.lines[one], recorded.lines[other] = recorded.lines[other], recorded.lines[one]
    with pytest.raises(ReplayDiffers, match="node us"):
        recorded.replay()


@pytest.mark.parametrize(
    ("node", "kind"),
    [
        ("us", ("Received", "WorkerUpdate")),
        ("us", ("Told", "MemberJoined")),
        ("us", ("Received", "Grant")),
        ("root", ("Received", "Push")),
        ("us/1", ("Received", "Assignment")),
        ("us/1", ("LocalStepsDone",)),
        ("us/1.session", ("Received", "Welcome")),
        ("root.members", ("Received", "Join")),
        ("eu", ("Received", "PushAnswer")),
        ("eu", ("Received", "Drain")),
        ("eu/0", ("Received", "Receipt")),
    ],
)
def test_a_line_that_is_missing_is_noticed(
    recorded: Recorded, node: NodeId, kind: tuple[str, ...]
) -> None:
    """If it had consequences, or another of its sender came later."""
    index = spot(recorded.lines, node, *kind)
    again: Replayed | None = None
    with suppress(ReplayDiffers):
        _, again = recorded.replay(recorded.lines[:index] + recorded.lines[index + 1 :])
    if kind[-1] in ("Drain", "Receipt"):
        assert again is not None and again.complete  # nothing came of it
    else:
        assert again is None or not again.complete


def test_a_node_that_was_never_started_is_not_replayed(recorded: Recorded) -> None:
    lines = [line for line in recorded.lines if types_or_none(line) != ("Started", "")]
    with pytest.raises(UserError, match="give the trace from the beginning of its run"):
        recorded.replay(lines)


def of_process(line: dict[str, Any], process: str) -> bool:
    name: str = line["node"]
    return name.partition(".")[0] == process


def types_or_none(line: dict[str, Any]) -> tuple[str, str] | None:
    return types(line) if "event" in line else None


# ---------------------------------------------------------------- runs with accidents


@pytest.mark.parametrize("process", ["us/0", "us", "root"])
def test_a_trace_that_ends_too_early_is_replayed_as_far_as_it_goes(
    recorded: Recorded, process: str
) -> None:
    """As a process that was killed leaves it, all others having traced on."""
    mine = [i for i, line in enumerate(recorded.lines[1:], 1) if of_process(line, process)]
    gone = set(mine[len(mine) // 2 :])
    again, replayed = recorded.replay([x for i, x in enumerate(recorded.lines) if i not in gone])
    assert not replayed.complete and not replayed.finished
    assert len(recorded.lines) // 4 < replayed.events < len(recorded.lines) - 1 - len(gone)
    line = next(iter(replayed.waiting.values()))
    assert line.where.partition(":")[0] != process
    # What was replayed is a beginning of what was recorded, for every node.
    assert again.replay.events == replayed.events


def test_a_link_that_is_cut_and_mended(small: Callable[..., Prepared]) -> None:
    def accident(run: LocalRun) -> None:
        run.run(events=120)
        run.driver.cut_link("eu")
        run.run(events=60)
        run.driver.mend_link("eu")

    recorded = record(small(), order="fixed", then=accident)
    assert ("LinkLost", "") in map(types_or_none, recorded.lines)
    again, replayed = recorded.replay()
    assert replayed.complete and replayed.finished
    assert_same_end(recorded, again)


@pytest.mark.parametrize("order", ["fixed", "arrival"])
def test_a_worker_that_an_operator_fences_amid_its_rounds(
    small: Callable[..., Prepared], order: Order
) -> None:
    """Whether a round that was taken away was trained to its end is seen by what came next."""

    def accident(run: LocalRun) -> None:
        updates = iter(range(10**6))

        def fence(step: Step) -> None:
            if step.node == "us" and isinstance(step.event, Received) and next(updates) % 9 == 8:
                run.driver.dispatch("eu.members", Told(RaiseFence("eu/0")), run.driver.now)

        run.driver.observers.append(fence)

    recorded = record(small(), order=order, then=accident)
    assert sum(types_or_none(x) == ("Told", "MemberLost") for x in recorded.lines) > 3
    again, replayed = recorded.replay()
    assert replayed.complete and replayed.finished
    assert_same_end(recorded, again)


def test_a_worker_that_was_killed_and_started_from_nothing(small: Callable[..., Prepared]) -> None:
    def accident(run: LocalRun) -> None:
        plan = recorded_run(prepared, [parse_trace("facts", [facts])]).replay.nodes
        run.run(events=120)
        run.driver.kill("us/1")
        run.trainers["us/1"] = prepared.trainer()
        run.driver.trainers["us/1"] = run.trainers["us/1"].run
        run.driver.revive({name: plan[name] for name in ("us/1", "us/1.session")})

    prepared = small()
    facts = json.dumps({"run": facts_of(prepared, ALONE).to_json()})
    recorded = record(prepared, order="fixed", then=accident)
    starts = [line for line in recorded.lines if types_or_none(line) == ("Started", "")]
    assert len(starts) == len(recorded.states) + 2
    again, replayed = recorded.replay()
    assert replayed.complete and replayed.finished
    assert_same_end(recorded, again)


def test_a_run_that_was_stopped_and_resumed(small: Callable[..., Prepared]) -> None:
    """Nothing is started again, and the trace goes on where it stopped."""
    prepared, file = small(), io.StringIO()
    for beginning in ("replace", "resume"):
        with open_run(prepared, order="fixed", beginning=beginning) as run:  # type: ignore[arg-type]
            run.driver.observers.append(TraceWriter(file, facts_of(prepared, ALONE)))
            run.run(events=200 if beginning == "replace" else None)
            run.save()
            end = bits(run.driver.nodes, run.trainers)
    trace = parse_trace("trace", file.getvalue().splitlines())
    again = recorded_run(prepared, [trace])
    assert again.replay.run().finished
    assert_same_end(Recorded(prepared, [], end, {}), again)


def test_a_run_that_went_back_to_a_checkpoint_is_not_taken_for_wrong_arithmetic(
    small: Callable[..., Prepared],
) -> None:
    prepared, file = small(), io.StringIO()
    for beginning in ("replace", "resume"):
        with open_run(prepared, order="fixed", beginning=beginning) as run:  # type: ignore[arg-type]
            run.driver.observers.append(TraceWriter(file, facts_of(prepared, ALONE)))
            run.run(events=200)
            if beginning == "replace":
                run.save()
                run.run(events=50)  # which the checkpoint knows nothing of
    trace = parse_trace("trace", file.getvalue().splitlines())
    with pytest.raises(ReplayDiffers, match="started again before that, perhaps from a saved"):
        recorded_run(prepared, [trace]).replay.run()


def test_a_simulation_without_tensors_in_which_machines_die() -> None:
    """With heartbeats and their timeouts, on the clock that was recorded."""
    environment = Environment.load("paper-4x4")
    topology = environment.tree()
    settings = ServerSettings(
        leasing=LeasingSettings(batch_size=8, local_steps_of=topology.local_steps(8)),
        accumulation=6,
    )
    plan = RunPlan(
        topology=topology,
        identity=Identity(run="run", model="model", datasets=("text",)),
        membership=MembershipSettings(),
        samples={"text": 12_000},
        server_settings=lambda _: settings,
        tensors=lambda _: NullState(),
    )
    driver, file = VirtualClock(plan.nodes(), environment.model_of(topology)), io.StringIO()
    driver.observers.append(TraceWriter(file))
    driver.start()
    driver.run(events=400)
    driver.kill("r1/2")
    driver.cut_link("r3")
    driver.run(events=400)
    driver.mend_link("r3")
    assert driver.run()
    lines = file.getvalue().splitlines()
    replayed = Replay(plan.nodes(), {}, [parse_trace("trace", lines)]).run()
    assert replayed.complete and replayed.finished and replayed.events == len(lines)
    assert replayed.lost["r3.session"] > 0


# ---------------------------------------------------------------- the right run, and the command


def test_a_trace_of_another_run_is_refused(
    small: Callable[..., Prepared], prepared: Prepare
) -> None:
    facts = json.dumps({"run": facts_of(small(), ALONE).to_json()})
    for field, sections in (
        (r"\[run\] seed", {"run": {"name": "small", "seed": 1}}),
        (r"\[run\] name", {"run": {"name": "other"}}),
        (r"\[model\]", {"model": {"layers": 2, "heads": 2, "width": 16}}),
    ):
        with pytest.raises(UserError, match=f"is of a run with {field} "):
            recorded_run(prepared(**sections), [parse_trace("trace", [facts])])
    with pytest.raises(UserError, match="does not say which run it is of"):
        recorded_run(small(), [parse_trace("trace", [])])


def test_a_node_that_is_not_of_the_run_is_refused(recorded: Recorded) -> None:
    recorded.lines[-1]["node"] = "mars"
    with pytest.raises(UserError, match="node mars is not one of this run"):
        recorded.replay()


def test_the_command_says_how_far_it_came_and_what_differs(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(
        f"""
        run = {{name = "small"}}
        model = {{layers = 1, heads = 2, width = 16}}
        inner = {{device = "cpu"}}
        training = {{local_steps_total = 90, batch_size = 2}}
        sync = {{local_steps = 2, accumulation = 2, in_flight = "drop"}}
        regions = [{{name = "us", workers = [1.0, 0.5]}}, {{name = "eu", workers = [0.8, 0.3]}},
                   {{name = "ap", workers = [0.9, 0.9]}}]
        [data]
        train = "{tmp_path}/train.bin"
        validation = "{tmp_path}/validation.bin"
        dtype = "uint8"
        vocab_size = 256
        sequence_length = 16
        """
    )
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, recorded.lines[:-1])))
    replay(tmp_path / "run.toml", [trace])
    said = capsys.readouterr().out
    assert f"Replayed {len(recorded.lines) - 2} events" in said
    assert "The end of the run is not among them." in said
    recorded.lines[spot(recorded.lines, "us", "Received", "WorkerUpdate")]["version"] += 1
    trace.write_text("\n".join(map(json.dumps, recorded.lines)))
    with pytest.raises(typer.Exit):
        replay(tmp_path / "run.toml", [trace])
    assert "node us: version was recorded as" in capsys.readouterr().out
