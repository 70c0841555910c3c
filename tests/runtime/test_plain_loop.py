"""One worker under halos equals a loop that anybody would write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halos.core.equations import learning_rate
from halos.runtime.local import Order, open_run
from halos.runtime.prepare import Prepared, prepare
from halos.specification import preset_for
from halos.training.evaluate import validation_loss
from halos.training.model import GPT, build_model
from halos.training.parameters import gather, layout_of, scatter

from .conftest import Prepare, Spec
from .joined import joined

STEPS, BATCH = 60, 4
ALONE = [{"name": "us", "workers": 1}]


def plain_loop(prepared: Prepared) -> GPT:
    """AdamW over the same samples in the same order, with torch's own optimizer."""
    inner = prepared.specification.inner_for(prepared.dataset.samples)
    model = build_model(prepared.model, prepared.specification.run.seed)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": inner.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        betas=inner.betas,
        eps=inner.eps,
    )
    for step in range(STEPS):
        rate = learning_rate(
            step + 1,
            peak=inner.learning_rate,
            warmup=inner.warmup_iterations,
            total=inner.total_iterations,
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        indices = [prepared.order.locate(step * BATCH + i)[1] for i in range(BATCH)]
        optimizer.zero_grad()
        model.loss(*prepared.dataset.batch(indices)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


@pytest.mark.parametrize("order", ["fixed", "arrival"])
@pytest.mark.parametrize("local_steps", [1, 4])
def test_one_worker_equals_a_plain_loop(prepared: Prepare, order: Order, local_steps: int) -> None:
    small = prepared(
        regions=ALONE,
        sync={"local_steps": local_steps},
        training={"local_steps_total": STEPS, "batch_size": BATCH},
        inner={"device": "cpu", "rewarm_steps": 0},
    )
    assert preset_for(small.specification.sync, workers=1) == "single"
    with open_run(small, order=order) as run:
        assert run.run()
        ours = build_model(small.model, seed=9)
        scatter(ours, small.layout, run.model)
    plain = plain_loop(small)
    start = build_model(small.model, small.specification.run.seed)
    for (name, a), b, c in zip(
        ours.named_parameters(), plain.parameters(), start.parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=name)
        assert (b - c).abs().max() > 1e-3  # the loop did learn


def test_a_loop_of_ones_own_equals_a_plain_loop(specification: Spec) -> None:
    """With torch's own optimizer, through the same exchange."""
    document = specification(
        regions=ALONE,
        sync={"local_steps": 4},
        training={"local_steps_total": STEPS, "batch_size": BATCH},
        inner={"device": "cpu", "rewarm_steps": 0},
    )
    with joined(document) as ours:
        model = build_model(ours.prepared.settings, document.run.seed)
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        run = ours.join(model, torch.optim.AdamW(groups, betas=(0.9, 0.95)))
        for tokens, targets in run.batches():
            loss = model.loss(tokens, targets)
            loss.backward()
            run.step(loss)
    plain = layout_of(wanted := plain_loop(prepare(document)))
    for one, other in zip(ours.model.tensors, gather(wanted, plain).tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_the_paper_settings_are_not_what_a_single_worker_gets(prepared: Prepare) -> None:
    """What is chosen by itself learns far more than the paper's settings would."""
    losses = {}
    for name, sync in (("chosen", {}), ("paper", {"preset": "paper"})):
        small = prepared(
            run={"name": name, "directory": prepared().specification.run.directory / name},
            regions=ALONE,
            sync=sync,
            training={"local_steps_total": 300, "batch_size": BATCH},
        )
        with open_run(small, order="fixed") as run:
            assert run.run()
            model = build_model(small.model, seed=9)
            scatter(model, small.layout, run.model)
            losses[name] = validation_loss(model, small.dataset)
    assert losses["chosen"] < losses["paper"] - 0.2


def test_fields_that_the_user_set_win_over_the_chosen_preset(prepared: Prepare) -> None:
    sync = prepared(regions=ALONE, sync={"accumulation": 3}).specification.resolved_sync
    assert (sync.accumulation, sync.merge_weight, sync.root.rate) == (3, 1.0, 1.0)
