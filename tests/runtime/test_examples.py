"""The examples of the README, with their specifications, on a real driver; shortened."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from halos.specification import RunSpecification, load_specification
from halos.training.evaluate import validation_loss
from halos.training.model import build_model
from halos.training.parameters import scatter

from .joined import joined, side_by_side

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str, folder: Path, steps: int) -> tuple[ModuleType, RunSpecification]:
    """The example's module, and its specification as a run of ``steps`` local steps."""
    found = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    specification = load_specification(EXAMPLES / f"{name}.toml")
    document = specification.model_dump(by_alias=True, exclude_unset=True)
    document["training"] = {"batch_size": 16, "local_steps_total": steps}
    document["run"]["directory"] = folder
    document["inner"]["device"] = "cpu"
    return module, RunSpecification.model_validate(document)


def test_a_loop_and_a_module_of_ones_own(tmp_path: Path) -> None:
    module, specification = example("own_loop", tmp_path, steps=120)
    with joined(specification) as ours:
        loops = []
        for worker in ours.handovers:
            model = module.Recurrent(width=64)
            optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
            run = ours.join(model, optimizer, worker)
            loops.append(lambda run=run, model=model: module.train(run, model))
        side_by_side(loops)
    assert ours.ledger.credited.total == 120 * 16
    model = build_model(ours.prepared.settings, seed=9)
    scatter(model, ours.prepared.layout, ours.model)
    dataset = ours.data.dataset
    assert dataset is not None
    assert validation_loss(model, dataset, limit=64) < 5.4  # from 5.55


def test_a_model_of_transformers_on_data_of_ones_own(tmp_path: Path) -> None:
    module, specification = example("transformers_model", tmp_path, steps=120)
    with joined(specification) as ours:
        runs = [ours.join(worker=worker) for worker in ours.handovers]
        side_by_side([lambda run=run: module.train(run) for run in runs])
        assert all(run.finished for run in runs)
    assert ours.ledger.credited.total == 120 * 16
    model = build_model(ours.prepared.settings, seed=9)
    scatter(model, ours.prepared.layout, ours.model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    batch = module.Sums()[4785]
    assert bytes(batch["input_ids"].tolist()) == b"47+85=132"
    with torch.no_grad():
        loss = model(**{name: tensor[None] for name, tensor in batch.items()}).loss
    assert loss < 4.9  # from 5.55


@pytest.mark.parametrize("name", ["own_loop", "transformers_model"])
def test_every_example_says_how_it_is_started(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert f"halos coordinator examples/{name}.toml" in text
    assert f"python examples/{name}.py ADDRESS" in text
