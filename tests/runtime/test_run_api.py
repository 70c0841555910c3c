"""Somebody's own loop through ``Run``, against the loop that halos has itself."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from halos.core.fragments import Fragments
from halos.core.messages import RunLocalSteps
from halos.core.samples import Lease
from halos.errors import Interrupted, UserError
from halos.run import Run, moved
from halos.runtime.handover import Handover
from halos.runtime.local import open_run
from halos.runtime.prepare import prepare, prepare_data, prepare_model
from halos.specification import RunSpecification
from halos.training.model import build_model
from halos.training.parameters import gather, layout_of, scatter

from .conftest import Spec
from .joined import Joined, joined, side_by_side

ALONE = [{"name": "us", "workers": 1}]
OWN = {"dataset": "own", "samples": 40, "name": "numbers"}


def one_worker(specification: Spec, **sections: Any) -> RunSpecification:
    document = {
        "regions": ALONE,
        "training": {"local_steps_total": 30, "batch_size": 4},
        "sync": {"local_steps": 4},
    }
    return specification(**(document | sections))


def train(run: Run) -> None:
    for tokens, targets in run.batches():
        loss = run.loss(tokens, targets) / run.accumulation
        loss.backward()
        run.step(loss)


def built_in(specification: RunSpecification) -> Fragments:
    """What the run comes to when halos trains it by its own loop."""
    with open_run(prepare(specification), order="fixed") as run:
        assert run.run()
        return run.model


def equal(one: Fragments, other: Fragments) -> bool:
    return all(map(torch.equal, one.tensors, other.tensors))


# ---------------------------------------------------------------- the same as halos itself


@pytest.mark.parametrize("inner", [{}, {"accumulation": 3}, {"precision": "bf16"}])
def test_a_loop_of_ones_own_equals_the_built_in_one_bit_for_bit(
    specification: Spec, inner: dict[str, Any]
) -> None:
    document = one_worker(specification, inner={"device": "cpu", **inner})
    with joined(document) as ours:
        run = ours.join()
        train(run)
        assert run.finished
        assert ours.ledger.credited.as_tuple() == ((0, 120),)
    assert equal(ours.model, built_in(document))


def test_many_loops_train_every_sample_once(specification: Spec) -> None:
    with joined(specification()) as ours:
        runs = [ours.join(worker=name) for name in ours.handovers]
        side_by_side([lambda run=run: train(run) for run in runs])
        assert all(run.finished for run in runs)
    assert ours.ledger.credited.as_tuple() == ((0, 180),)


def test_parts_of_unequal_size_weigh_by_their_samples(specification: Spec) -> None:
    """Whatever the parts, a step is that of the mean over its samples."""
    models = []
    for accumulation in (1, 3, 8):
        inner = {"device": "cpu", "accumulation": accumulation}
        with joined(one_worker(specification, inner=inner)) as ours:
            train(ours.join())
        models.append(torch.cat(ours.model.tensors))
    for model in models[1:]:
        torch.testing.assert_close(model, models[0], rtol=0, atol=1e-6)


def test_what_the_loop_can_know(specification: Spec) -> None:
    inner = {"device": "cpu", "accumulation": 2}
    with joined(one_worker(specification, inner=inner)) as ours, ours.join() as run:
        assert (run.batch_size, run.total_samples, run.progress) == (4, 120, 0)
        assert run.accumulation == 2
        seen = []
        for tokens, targets in run.batches():
            assert tokens.shape == targets.shape == (2, 16)
            assert torch.equal(tokens[:, 1:], targets[:, :-1])
            seen.append((run.progress, run.accumulation))
            assert not run.finished
            run.step(run.loss(tokens, targets) / run.accumulation)
        assert run.finished
        assert {a for _, a in seen} == {2.0}
        # what was issued when each lease was, its own samples among it: 4 steps a lease of 4
        assert sorted({p for p, _ in seen}) == list(range(0, 120, 16))


# ---------------------------------------------------------------- anybody's model, optimizer, data


class Numbers(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Item i is of inputs i and of the output that a line makes of it; remembers what was asked."""

    def __init__(self, length: int = 40) -> None:
        self.length, self.asked = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.asked.append(index)
        x = torch.tensor([index / 40, 1.0])
        return {"x": x, "y": x @ torch.tensor([2.0, -1.0])}


class Line(nn.Module):
    """A linear model with one of everything that a layout has to cope with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.5, 0.0], [0.0, 0.5]]).t())
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        self.nothing = nn.Parameter(torch.empty(0, 2))
        self.again = self.scale
        self.fixed = nn.Parameter(torch.tensor([1.0, 1.0]), requires_grad=False)
        self.register_buffer("offset", torch.tensor([0.5]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = (x @ self.weight) @ self.fixed * self.scale + self.shift + self.offset
        return F.mse_loss(found, y)


def line_factory(folder: Path) -> dict[str, Any]:
    """As the coordinator makes its copy of the model."""
    (folder / "line_of_tests.py").write_text(f"from {__name__} import Line as line")
    return {"factory": "line_of_tests:line", "folder": folder}


@pytest.fixture
def lines(specification: Spec, tmp_path: Path) -> RunSpecification:
    """A run of the model above, on data that only the loop has."""
    return one_worker(
        specification,
        model=line_factory(tmp_path),
        data=OWN,
        training={"epochs": 3.0, "batch_size": 5},
        inner={"device": "cpu", "learning_rate": 0.2, "warmup_iterations": 0, "rewarm_steps": 0},
    )


def plain(lines: RunSpecification, order: list[int]) -> Line:
    """A loop that anybody would write, over samples in this order."""
    model, data = Line(), Numbers()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], momentum=0.5)
    inner = lines.inner_for(40)
    for step in range(len(order) // 5):
        items = [data[i] for i in order[5 * step : 5 * step + 5]]
        model(*(torch.stack([item[name] for item in items]) for name in "xy")).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = inner.rate(step + 1)
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_a_model_an_optimizer_and_data_of_ones_own(lines: RunSpecification) -> None:
    with joined(lines) as ours:
        model, numbers = Line(), Numbers()
        trained = [p for p in model.parameters() if p.requires_grad]
        run = ours.join(model, torch.optim.SGD(trained, momentum=0.5))
        for batch in run.batches(numbers):
            loss = model(**batch) / run.accumulation
            loss.backward()
            run.step(loss)
    assert sorted(numbers.asked) == sorted(list(range(40)) * 3)
    assert ours.ledger.credited.as_tuple() == ((0, 120),)
    expected = gather(plain(lines, numbers.asked), ours.prepared.layout)
    for one, other in zip(ours.model.tensors, expected.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert torch.cat(ours.model.tensors).norm() > 0


def test_items_come_several_at_once_and_as_the_loop_collates_them(lines: RunSpecification) -> None:
    class Several(Numbers):
        def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
            self.asked.append(len(indices))
            return [{"x": torch.tensor([i / 40, 1.0]), "y": torch.tensor(0.0)} for i in indices]

    def collate(items: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([i["x"] for i in items]), torch.stack([i["y"] for i in items])

    with joined(lines) as ours:
        model, several = Line(), Several()
        run = ours.join(model)
        for x, y in run.batches(several, collate):
            loss = model(x, y)
            loss.backward()
            run.step(loss)
    assert several.asked == [5] * 24


@pytest.mark.parametrize("own", [True, False])
def test_a_gradient_scaler_changes_nothing_but_the_scale(
    lines: RunSpecification, own: bool
) -> None:
    results = []
    for scale in (None, 1024.0):
        with joined(lines) as ours:
            model = Line()
            trained = [p for p in model.parameters() if p.requires_grad]
            run = ours.join(model, None if own else torch.optim.AdamW(trained))
            scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale else None
            for batch in run.batches(Numbers()):
                loss = model(**batch)
                (scaler.scale(loss) if scaler else loss).backward()
                run.step(loss, scaler)
        results.append(ours.model)
    assert equal(*results)


def test_a_step_that_a_scaler_skips_changes_nothing(lines: RunSpecification) -> None:
    with joined(lines) as ours:
        model = Line()
        run, scaler = ours.join(model), torch.amp.GradScaler("cpu", init_scale=4.0)
        batches = run.batches(Numbers())
        batch = next(batches)
        before = model.weight.clone()
        (scaler.scale(model(**batch)) * torch.inf).backward()
        run.step(torch.zeros(()), scaler)
        assert torch.equal(model.weight, before)
        assert scaler.get_scale() == 2.0
        stopped(ours)


# ---------------------------------------------------------------- leaving and coming back


def test_a_loop_that_was_left_amid_a_round_begins_it_again(specification: Spec) -> None:
    document = one_worker(specification)
    with joined(document) as ours:
        run = ours.join()
        for number, (tokens, targets) in enumerate(run.batches()):
            if number == 6:  # the third step of the second lease
                break
            loss = run.loss(tokens, targets)
            loss.backward()
            run.step(loss)
        train(run)
    assert ours.ledger.credited.as_tuple() == ((0, 120),)
    assert equal(ours.model, built_in(document))


@pytest.mark.parametrize("amid_a_step", [True, False])
def test_a_round_given_up_amid_training_does_not_touch_the_next(
    specification: Spec, amid_a_step: bool
) -> None:
    """As when a worker was thought dead: it is told so, and gets other samples."""
    document = one_worker(specification)
    data, start = prepare_data(document), prepare_model(document).start()

    def job(lease: str, at: int) -> RunLocalSteps:
        return RunLocalSteps(Lease(lease, data.name, 0, ((at, at + 16),), at), 4, 4, start)

    def steps(run: Run, batches: Iterator[Any], count: int) -> None:
        for tokens, targets in islice(batches, count):
            loss = run.loss(tokens, targets)
            loss.backward()
            run.step(loss)

    with ThreadPoolExecutor(2) as driver, closing(Handover()) as one, closing(Handover()) as other:
        run, given_up = Run.of(one, document, data), driver.submit(one, job("a", 64))
        batches = run.batches()
        steps(run, batches, 2)
        if amid_a_step:
            tokens, targets = next(batches)
            run.loss(tokens, targets).backward()
        wanted = driver.submit(one, job("b", 0))
        assert isinstance(given_up.exception(10), Interrupted)
        if amid_a_step:
            run.step(torch.zeros(()))
        steps(run, batches, 4)
        fresh, expected = Run.of(other, document, data), driver.submit(other, job("b", 0))
        steps(fresh, fresh.batches(), 4)
        assert wanted.result(10).lease == "b"
        assert equal(wanted.result(10).payload, expected.result(10).payload)


def test_a_run_that_is_left_says_that_it_is_not_over(specification: Spec) -> None:
    closed = []
    with joined(one_worker(specification)) as ours:
        run = Run.of(
            ours.handovers["us/0"],
            ours.specification,
            ours.data,
            on_close=lambda: closed.append(True),
        )
        with run:
            next(run.batches())
        assert closed == [True]
        assert not run.finished
        assert list(run.batches()) == []
        ours.driver.stop()


def test_why_a_run_ended_is_raised_in_the_loop(specification: Spec) -> None:
    with joined(one_worker(specification)) as ours:
        run = ours.join()
        batches = run.batches()
        tokens, targets = next(batches)
        ours.handovers["us/0"].close(error=UserError("evicted"))
        run.step(run.loss(tokens, targets))
        with pytest.raises(UserError, match="evicted"):
            next(batches)
        ours.driver.stop()


# ---------------------------------------------------------------- mistakes


def stopped(ours: Joined) -> None:
    ours.driver.stop()


def test_each_batch_wants_one_step(specification: Spec) -> None:
    with joined(one_worker(specification)) as ours:
        run = ours.join()
        with pytest.raises(UserError, match=r"run\.step: there is no batch"):
            run.step(torch.zeros(()))
        batches = run.batches()
        next(batches)
        with pytest.raises(UserError, match=r"run\.step: was not called for the last batch"):
            next(batches)
        train(run)
    assert ours.ledger.credited.as_tuple() == ((0, 120),)


def test_data_that_is_not_the_runs_is_refused(specification: Spec, lines: RunSpecification) -> None:
    with joined(lines) as ours:
        run = ours.join(Line())
        with pytest.raises(UserError, match=r"this run has no data of its own; .* of 40 samples"):
            run.batches()
        with pytest.raises(UserError, match="has 39 samples, but that of the run has 40"):
            run.batches(Numbers(39))
        with pytest.raises(UserError, match="generator has no len"):
            run.batches(i for i in range(40))
        stopped(ours)
    with joined(one_worker(specification)) as ours:
        with pytest.raises(UserError, match="optimizer: is given without its model"):
            ours.join(None, torch.optim.SGD(Line().parameters()))
        stopped(ours)


def test_halos_itself_cannot_read_what_only_a_loop_has(lines: RunSpecification) -> None:
    with pytest.raises(UserError, match=r'\[data\] dataset: is "own"'):
        prepare(lines)


@pytest.mark.parametrize(
    ("model", "data", "says"),
    [
        ({"preset": "0.1m"}, {"vocab_size": 9}, "sequence_length: is missing"),
        ({"preset": "0.1m"}, {"sequence_length": 9}, "vocab_size: is missing"),
        ({"transformers": "llama"}, {}, "vocab_size: is missing"),
    ],
)
def test_a_language_model_on_data_of_ones_own_is_told_its_sizes(
    specification: Spec, model: dict[str, Any], data: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        Joined(specification(model=model, data=OWN | data))


def test_tensors_are_moved_wherever_they_are_in_a_batch() -> None:
    pair = namedtuple("pair", "a b")
    batch = {"a": [torch.zeros(1), "x"], "b": pair(torch.zeros(2), (torch.zeros(3), None))}
    found = moved(batch, torch.device("meta"))
    assert type(found["b"]) is pair
    assert found["a"][1] == "x" and found["b"].b[1] is None
    tensors = (found["a"][0], found["b"].a, found["b"].b[0])
    assert {t.device.type for t in tensors} == {"meta"}


def test_a_model_of_a_run_is_built_as_the_coordinator_builds_it(specification: Spec) -> None:
    with joined(one_worker(specification)) as ours:
        run = ours.join()
        other = build_model(ours.prepared.settings, seed=5)
        scatter(other, layout_of(other), ours.prepared.start())
        assert layout_of(run.model) == ours.prepared.layout
        stopped(ours)
