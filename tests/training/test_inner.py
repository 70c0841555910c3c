from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from halos.core.equations import learning_rate
from halos.core.fragments import Fragments
from halos.core.messages import LocalStepsDone, RunLocalSteps
from halos.core.samples import Lease
from halos.core.tensors import NOTHING
from halos.errors import Interrupted, UserError
from halos.training.data import Dataset, SampleOrder
from halos.training.inner import LocalTrainer, resolve_device
from halos.training.model import LanguageModel, ModelSettings, build_model
from halos.training.optimizer import InnerSettings
from halos.training.parameters import gather, l2_norm, layout_of

Make = Callable[..., LocalTrainer]
Job = Callable[..., RunLocalSteps]


def flat(payload: object) -> Tensor:
    assert isinstance(payload, Fragments)
    return torch.cat(payload.tensors)


def parameters(trainer: LocalTrainer) -> Fragments:
    return gather(trainer.model, trainer.layout)


def plain_training(
    model: LanguageModel, dataset: Dataset, batches: list[list[int]], **adamw: object
) -> list[float]:
    """What the rounds of one worker that always gets back its own result amount to."""
    order = SampleOrder(7, dataset.samples)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    losses = []
    for iteration, positions in enumerate(batches, start=1):
        for group in optimizer.param_groups:
            rate = learning_rate(iteration, peak=1e-3, warmup=2, total=20, floor_ratio=0.1)
            group["lr"] = rate * min(1.0, iteration / 3)
        x, y = dataset.batch([order.locate(p)[1] for p in positions])
        loss = model.loss(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_rounds_from_ones_own_result_are_plain_adamw(
    trainer: Make, job: Job, dataset: Dataset, sizes: ModelSettings, accumulation: int
) -> None:
    rounds = trainer(rewarm_steps=3, accumulation=accumulation)
    rounds.global_batch = 4
    plain = build_model(sizes, seed=1)
    batches = [list(range(at, at + 4)) for at in range(40, 64, 4)]  # over the end of an epoch
    expected = plain_training(plain, dataset, batches)

    payload = parameters(rounds)
    for number, (start, end) in enumerate([(40, 52), (52, 60), (60, 64)]):
        done = rounds.run(job(start, end, payload, progress=start - 40))
        first = (start - 40) // 4
        steps = expected[first : first + (end - start) // 4]
        assert done.loss == pytest.approx(sum(steps) / len(steps), rel=1e-6), number
        ended = parameters(rounds)
        change = flat(payload) - flat(ended)
        torch.testing.assert_close(flat(done.payload), change, rtol=0, atol=0)
        payload = ended
    wanted = flat(gather(plain, layout_of(plain)))
    rounding = 1e-7 if accumulation == 1 else 1e-6  # sums in another order
    torch.testing.assert_close(flat(payload), wanted, rtol=0, atol=rounding)


def test_what_is_told_of_a_round(trainer: Make, job: Job) -> None:
    worker = trainer()
    payload = parameters(worker)
    kept = flat(payload).clone()
    done = worker.run(job(8, 18, payload))
    assert (done.lease, done.local_steps, done.tokens) == ("8-18", 3, 10 * 8)
    assert isinstance(done.payload, Fragments)
    assert done.norm == l2_norm(done.payload) > 0
    assert done.seconds > 0
    assert torch.equal(flat(payload), kept), "the parameters handed in belong to others"


def test_the_loss_weighs_a_smaller_last_batch_by_its_tokens(trainer: Make, job: Job) -> None:
    worker = trainer(learning_rate=1e-30)
    payload = parameters(worker)
    alone = [worker.run(job(at, at + 1, payload)).loss for at in range(7)]
    assert worker.run(job(0, 7, payload)).loss == pytest.approx(sum(alone) / 7, rel=1e-6)


def test_the_rate_follows_the_whole_runs_progress(trainer: Make, job: Job) -> None:
    settings = {"warmup_iterations": 10, "weight_decay": 0.0, "rewarm_steps": 0}
    early, late = trainer(**settings), trainer(**settings)
    payload = parameters(early)
    first = early.run(job(0, 4, payload, progress=0)).norm
    # Iteration 1 of 10 against 5 of 10: adam's first step is as long as the rate.
    assert late.run(job(0, 4, payload, progress=4 * 8 + 7)).norm == pytest.approx(5 * first, 1e-3)


def test_positions_count_from_the_data_sets_origin(trainer: Make, job: Job) -> None:
    one, other = trainer(), trainer()
    payload = parameters(one)
    here = one.run(job(3, 9, payload, progress=0))
    there = other.run(job(1003, 1009, payload, origin=1000, progress=0))
    assert torch.equal(flat(here.payload), flat(there.payload))


def test_a_lease_of_several_ranges_is_trained_in_order(trainer: Make, job: Job) -> None:
    one, other = trainer(), trainer()
    payload = parameters(one)
    whole = one.run(job(0, 8, payload))
    lease = Lease("parts", "some", 0, ((0, 3), (3, 4), (4, 4), (4, 8)), 0)
    parts = other.run(RunLocalSteps(lease, 2, 4, payload))
    assert torch.equal(flat(whole.payload), flat(parts.payload))


def test_a_lease_without_samples_changes_nothing(trainer: Make, job: Job) -> None:
    done = (worker := trainer()).run(job(5, 5, parameters(worker)))
    assert (done.local_steps, done.tokens, done.loss, done.norm) == (0, 0, 0.0, 0.0)


def test_no_sample_of_a_lease_is_left_out(trainer: Make) -> None:
    worker = trainer()
    lease = Lease("long", "some", 0, ((0, 9),), 0)
    with pytest.raises(ValueError, match="lease long holds 9 samples, more than 2 steps of 4"):
        worker.run(RunLocalSteps(lease, 2, 4, parameters(worker)))


def test_new_workers_warm_up_by_their_own_steps(trainer: Make, job: Job) -> None:
    cold, warm = trainer(rewarm_steps=4), trainer(rewarm_steps=0)
    payload = parameters(cold)
    steps = {"progress": 80}
    norms = [
        (cold.run(job(at, at + 4, payload, **steps)), warm.run(job(at, at + 4, payload, **steps)))
        for at in range(0, 24, 4)
    ]
    ratios = [c.norm / w.norm for c, w in norms]
    assert ratios == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0], rel=1e-5)


def test_equal_trainers_agree_to_the_bit(trainer: Make, job: Job) -> None:
    def rounds(worker: LocalTrainer) -> list[LocalStepsDone]:
        payload = parameters(worker)
        return [worker.run(job(at, at + 10, payload)) for at in range(0, 30, 10)]

    for one, other in zip(rounds(trainer()), rounds(trainer()), strict=True):
        assert torch.equal(flat(one.payload), flat(other.payload))
        assert (one.loss, one.norm) == (other.loss, other.norm)


def test_trainers_in_threads_do_not_disturb_each_other(trainer: Make, job: Job) -> None:
    workers = [trainer() for _ in range(4)]
    payload = parameters(workers[0])
    found: dict[int, Tensor] = {}

    def train(number: int) -> None:
        for at in range(0, 24, 8):
            done = workers[number].run(job(at + number, at + number + 8, payload))
        found[number] = flat(done.payload)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        alone = trainer()
        for at in range(0, 24, 8):
            done = alone.run(job(at + number, at + number + 8, payload))
        assert torch.equal(found[number], flat(done.payload))


def test_training_goes_on_from_what_was_captured(trainer: Make, job: Job) -> None:
    worker = trainer()
    payload = parameters(worker)
    worker.run(job(0, 8, payload))
    at_rest = worker.capture(before=None)
    second = worker.run(job(8, 16, payload))
    assert same(worker.capture(before=second.lease), at_rest)
    assert not same(worker.capture(before=None), at_rest)
    for name, tensor in worker.capture(before=None).items():
        assert tensor.data_ptr() != worker.capture(before=None)[name].data_ptr()

    other = trainer()
    other.restore(at_rest)
    assert same(other.capture(before=None), at_rest)
    again = other.run(job(8, 16, payload))
    assert torch.equal(flat(again.payload), flat(second.payload))
    assert same(other.capture(before=None), worker.capture(before=None))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


class Watched:
    """Stands in for ``trainer.stop``: looked at before each step."""

    def __init__(self, look: Callable[[int], bool]) -> None:
        self.look, self.steps = look, 0

    def is_set(self) -> bool:
        self.steps += 1
        return self.look(self.steps)


def test_amid_a_round_its_start_can_be_captured(trainer: Make, job: Job) -> None:
    worker = trainer()
    payload = parameters(worker)
    worker.run(job(0, 8, payload))
    before, seen = worker.capture(before=None), []

    def look(step: int) -> bool:
        seen.append(worker.capture(before=None))
        return False

    worker.stop = Watched(look)
    worker.run(job(8, 20, payload))
    assert len(seen) == 3
    assert all(same(state, before) for state in seen)


def test_a_stopped_round_never_began(trainer: Make, job: Job) -> None:
    worker, other = trainer(), trainer()
    payload = parameters(worker)
    for either in (worker, other):
        either.run(job(0, 8, payload))
    worker.stop = Watched(lambda step: step == 3)
    with pytest.raises(Interrupted):
        worker.run(job(8, 24, payload))
    assert same(worker.capture(before=None), other.capture(before=None))
    assert worker.own_steps == other.own_steps == 2
    worker.stop = threading.Event()
    again, expected = worker.run(job(8, 24, payload)), other.run(job(8, 24, payload))
    assert torch.equal(flat(again.payload), flat(expected.payload))


def test_numbers_that_are_not_finite_do_not_stay(trainer: Make, job: Job) -> None:
    worker, other = trainer(), trainer()
    payload = parameters(worker)
    poisoned = Fragments([torch.full_like(t, torch.inf) for t in payload.tensors])
    assert not torch.isfinite(flat(worker.run(job(0, 8, poisoned)).payload)).all()
    healthy, expected = worker.run(job(0, 8, payload)), other.run(job(0, 8, payload))
    assert torch.equal(flat(healthy.payload), flat(expected.payload))


def test_gradients_are_clipped(trainer: Make, job: Job) -> None:
    # With eps this large a step is in proportion to the gradient.
    settings = {"eps": 1e6, "weight_decay": 0.0, "learning_rate": 1e3}
    clipped, free = (trainer(gradient_clip=clip, **settings) for clip in (1e-3, 0.0))
    payload = parameters(clipped)
    short, long = (worker.run(job(0, 4, payload)).norm for worker in (clipped, free))
    assert 0 < short < long / 10


def test_only_matrices_decay(trainer: Make, job: Job) -> None:
    worker = trainer(weight_decay=1.0, learning_rate=0.5, warmup_iterations=0, rewarm_steps=0)
    payload = parameters(worker)
    plain = trainer(weight_decay=0.0, learning_rate=0.5, warmup_iterations=0, rewarm_steps=0)
    worker.run(job(0, 4, payload))
    plain.run(job(0, 4, payload))
    for (name, decayed), other in zip(
        worker.model.named_parameters(), plain.model.parameters(), strict=True
    ):
        assert torch.equal(decayed, other) is (decayed.ndim < 2), name


def test_half_precision_is_close_and_its_parameters_stay_whole(trainer: Make, job: Job) -> None:
    whole, half = trainer(), trainer(precision="bf16")
    payload = parameters(whole)
    expected, found = whole.run(job(0, 8, payload)), half.run(job(0, 8, payload))
    assert found.loss == pytest.approx(expected.loss, rel=1e-2)
    assert found.loss != expected.loss
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}


def test_what_is_no_state_or_payload_of_this_model_is_refused(trainer: Make, job: Job) -> None:
    worker = trainer()
    with pytest.raises(TypeError, match="NullPayload"):
        worker.run(job(0, 4, NOTHING))
    with pytest.raises(ValueError, match="another layout"):
        worker.run(job(0, 4, Fragments([torch.zeros(3)])))
    with pytest.raises(ValueError, match="another model"):
        worker.restore({})
    assert worker.run(job(0, 4, parameters(worker))).local_steps == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"learning_rate": 0}, "greater than 0"),
        ({"betas": (0.9, 1.0)}, "each is from 0 below 1"),
        ({"warmup_iterations": 9, "total_iterations": 8}, "is longer than total_iterations (8)"),
        ({"precision": "fp16"}, "'fp32' or 'bf16'"),
        ({"gradient_clip": float("inf")}, "finite"),
    ],
)
def test_settings_that_cannot_train_are_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError) as error:
        InnerSettings.model_validate(given)
    assert says in str(error.value)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match=r"inner\.device is cuda"):
        resolve_device("cuda")
