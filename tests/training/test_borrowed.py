"""An optimizer of the user's own, with whatever it keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halos.core.fragments import Fragments
from halos.core.messages import LocalStepsDone, RunLocalSteps
from halos.errors import UserError
from halos.training.borrowed import BorrowedOptimizer
from halos.training.data import Dataset, SampleOrder
from halos.training.loss import loss_of
from halos.training.model import ModelSettings, build_model
from halos.training.optimizer import InnerSettings
from halos.training.parameters import gather, layout_of
from halos.training.replica import Replica

from .conftest import LENGTH

Job = Callable[..., RunLocalSteps]
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Hoarder(torch.optim.Optimizer):
    """Keeps state of every kind, some of it from its first step on, some in its groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0, "beta": 0.5})

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group.setdefault("length", torch.zeros(())).add_(1)
            for parameter in group["params"]:
                kept = self.state[parameter]
                if not kept:
                    average = torch.zeros_like(parameter, dtype=torch.float64)
                    kept |= {"averages": [average, (average.clone(), None)], "best": float("inf")}
                    kept |= {"by": {"name": "x", 3: True}, "grows": torch.zeros(0)}
                average = kept["averages"][0].mul_(group["beta"]).add_(parameter.grad)
                kept["averages"][1][0].add_(average)
                kept["best"] = min(kept["best"], float(average.norm()))
                kept["grows"] = torch.cat((kept["grows"], average.norm().float().view(1)))
                slow = 1 / (group["steps"] + len(kept["grows"]) + float(group["length"]))
                change = (average + kept["averages"][1][0]) * slow / (1 + kept["best"])
                parameter.data.sub_((group["lr"] * change).to(parameter.dtype))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=9.0, momentum=0.9, nesterov=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


def tensor_rate(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(9.0), foreach=False)


def hoarder(model: nn.Module) -> torch.optim.Optimizer:
    return Hoarder(model.parameters())


ALL = pytest.mark.parametrize("make", [sgd, adamw, adafactor, tensor_rate, hoarder])


class Worker:
    """A replica and its data; ``optimizer`` None is the run's own AdamW."""

    def __init__(
        self,
        dataset: Dataset,
        sizes: ModelSettings,
        make: Optimizer | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = build_model(sizes, seed=1).to(dtype)
        self.data, self.order = dataset, SampleOrder(7, dataset.samples)
        settings = InnerSettings(warmup_iterations=2, total_iterations=20, device="cpu")
        self.optimizer = make(self.model) if make is not None else None
        self.replica = Replica(
            self.model,
            layout_of(self.model),
            settings,
            global_batch=8,
            tokens_a_sample=LENGTH,
            optimizer=BorrowedOptimizer(self.optimizer, self.model) if self.optimizer else None,
        )

    def start(self) -> Fragments:
        return gather(self.model, layout_of(self.model))

    def train(self, job: RunLocalSteps, steps: int | None = None) -> LocalStepsDone | None:
        """The whole round, or only its first ``steps``, after which it is given up."""
        self.replica.begin(job)
        while (part := self.replica.part) is not None and steps != 0:
            loss = loss_of(self.model)(*self.data.batch(self.order.indices(part.positions)))
            (loss / part.accumulation).backward()
            self.replica.step(loss / part.accumulation)
            steps = None if steps is None else steps - 1
        if steps is None:
            return self.replica.finish()
        self.replica.give_up()
        return None


@pytest.fixture
def worker(dataset: Dataset, sizes: ModelSettings) -> Callable[..., Worker]:
    return lambda make, dtype=torch.float32: Worker(dataset, sizes, make, dtype)


def flat(done: LocalStepsDone | None) -> Tensor:
    assert done is not None
    assert isinstance(done.payload, Fragments)
    return torch.cat(done.payload.tensors)


def test_adamw_of_torch_is_the_runs_own(worker: Callable[..., Worker], job: Job) -> None:
    theirs, ours = worker(adamw), worker(None)
    start = ours.start()
    for at in range(0, 24, 8):
        one, other = theirs.train(job(at, at + 8, start)), ours.train(job(at, at + 8, start))
        torch.testing.assert_close(flat(one), flat(other), rtol=0, atol=1e-7)
        assert flat(one).norm() > 0


@ALL
@pytest.mark.parametrize("rounds_before", [0, 1])
def test_a_round_that_is_given_up_never_was(
    worker: Callable[..., Worker], job: Job, make: Optimizer, rounds_before: int
) -> None:
    one, other = worker(make), worker(make)
    start = one.start()
    for either in (one, other):
        for at in range(rounds_before):
            either.train(job(8 * at, 8 * at + 8, start))
    one.train(job(8, 24, start), steps=3)
    assert len(one.optimizer.state) == len(other.optimizer.state)
    again, expected = one.train(job(16, 32, start)), other.train(job(16, 32, start))
    assert torch.equal(flat(again), flat(expected))


@ALL
def test_what_it_keeps_can_be_captured_and_gone_on_from(
    worker: Callable[..., Worker], job: Job, make: Optimizer
) -> None:
    one = worker(make)
    start = one.start()
    one.train(job(0, 8, start))
    saved = one.replica.capture(before=None)
    second = one.train(job(8, 24, start))
    assert same(one.replica.capture(before="8-24"), saved)
    assert not same(one.replica.capture(before=None), saved)
    other = worker(make)
    other.replica.restore(saved)
    assert same(other.replica.capture(before=None), saved)
    assert torch.equal(flat(other.train(job(8, 24, start))), flat(second))
    one.replica.undo("8-24")
    assert torch.equal(flat(one.train(job(8, 24, start))), flat(second))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_state_keeps_its_own_precision(worker: Callable[..., Worker], job: Job) -> None:
    """As ``load_state_dict`` would not: it casts state to its parameter's type."""
    one, other = (worker(hoarder, torch.bfloat16) for _ in range(2))
    one.train(job(0, 8, one.start()))
    other.replica.restore(one.replica.capture(before=None))
    kinds = {t.dtype for kept in other.optimizer.state.values() for t in kept["averages"][:1]}
    assert kinds == {torch.float64}


def test_tensors_stay_where_they_are_when_a_round_is_undone(
    worker: Callable[..., Worker], job: Job
) -> None:
    one = worker(tensor_rate)
    start = one.start()
    one.train(job(0, 8, start))
    where = {p: kept["exp_avg"].data_ptr() for p, kept in one.optimizer.state.items()}
    rate = one.optimizer.param_groups[0]["lr"]
    one.train(job(8, 24, start), steps=1)
    assert {p: k["exp_avg"].data_ptr() for p, k in one.optimizer.state.items()} == where
    assert one.optimizer.param_groups[0]["lr"] is rate


def test_every_group_steps_at_the_runs_rate_times_its_own_scale(
    worker: Callable[..., Worker], job: Job
) -> None:
    def scaled(model: nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        groups = [{"params": [first], "lr_scale": 0.25}, {"params": rest}]
        return torch.optim.SGD(groups, lr=77.0)

    one = worker(scaled)
    one.train(job(0, 4, one.start(), progress=0))
    small, large = (group["lr"] for group in one.optimizer.param_groups)
    assert large == pytest.approx(1e-3 / 2 / 8)  # half of the warm-up, an eighth of its own
    assert small == large / 4


def test_an_optimizer_of_another_model_is_refused(sizes: ModelSettings) -> None:
    model, other = build_model(sizes, 1), build_model(sizes, 1)
    with pytest.raises(UserError, match="optimizer: holds a parameter that is not one of the mod"):
        BorrowedOptimizer(sgd(other), model)
    some = torch.optim.SGD(list(model.parameters())[1:], lr=1.0)
    with pytest.raises(UserError, match=r"does not hold parameter embedding.weight, which is tra"):
        BorrowedOptimizer(some, model)
    model.embedding.weight.requires_grad_(False)
    BorrowedOptimizer(some, model)


def test_state_of_another_optimizer_is_refused(worker: Callable[..., Worker], job: Job) -> None:
    one, own, two_groups = worker(sgd), worker(None), worker(adamw)
    one.train(job(0, 8, one.start()))
    before = one.replica.capture(before=None)
    for other in (own, two_groups):
        with pytest.raises(ValueError, match="another model"):
            other.replica.restore(before)
    for state in ({}, own.replica.capture(before=None)):
        with pytest.raises(ValueError, match="another model"):
            one.replica.restore(state)
    assert same(one.replica.capture(before=None), before)


def test_state_that_cannot_be_saved_is_named(worker: Callable[..., Worker], job: Job) -> None:
    one = worker(sgd)
    one.optimizer.param_groups[0]["callback"] = print
    with pytest.raises(UserError, match=r"keeps group.0.callback as builtin_function_or_method"):
        one.train(job(0, 8, one.start()))
