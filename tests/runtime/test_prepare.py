"""What each role makes of a specification."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halos.core.topology import ROOT
from halos.errors import UserError
from halos.runtime.prepare import (
    PreparedData,
    identity_of,
    outer_settings,
    prepare,
    prepare_data,
    prepare_model,
    replica_of,
    server_settings,
)
from halos.specification import RunSpecification, load_specification
from halos.training.data import open_dataset

from .conftest import Spec

OWN = {"dataset": "own", "samples": 40, "name": "numbers"}
FACTORY = """
from torch import nn

def layer(width):
    return nn.Linear(width, width)
"""


def test_the_parts_are_those_of_the_whole(specification: Spec) -> None:
    document = specification()
    whole, model, data = prepare(document), prepare_model(document), prepare_data(document)
    assert whole.identity == identity_of(document, model.layout, data.name)
    assert (whole.model, whole.layout) == (model.settings, model.layout)
    assert all(map(torch.equal, whole.start.tensors, model.start().tensors))
    assert (data.samples, data.sequence_length) == (whole.dataset.samples, 16)
    assert whole.server_settings() == server_settings(document)
    for server in (ROOT, "us"):
        assert whole.outer_settings(server) == outer_settings(document, server)
    assert server_settings(document).leasing.local_steps_of["us/1"] == 1


def test_a_factory_is_looked_for_beside_the_specification(tmp_path: Path) -> None:
    (tmp_path / "factory_of_prepare.py").write_text(FACTORY)
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nname = "a"\n[root]\nworkers = 1\n[data]\ndataset = "own"\nname = "x"\nsamples = 9\n'
        '[model]\nfactory = "factory_of_prepare:layer"\narguments = { width = 3 }\n'
    )
    specification = load_specification(path)
    assert specification.model.folder == tmp_path
    made = prepare_model(RunSpecification.model_validate_json(specification.model_dump_json()))
    assert [p.shape for p in made.layout.parameters] == [(3, 3), (3,)]


def test_data_of_a_loop_is_known_by_its_name_and_number(specification: Spec) -> None:
    data = prepare_data(specification(data=OWN))
    assert (data.name, data.samples, data.dataset) == ("numbers/40", 40, None)
    assert data.sequence_length == 1
    assert sorted(data.order.indices(range(40))) == list(range(40))
    again = RunSpecification.model_validate(specification(data=OWN).model_dump(by_alias=True))
    assert prepare_data(again).name == data.name
    with pytest.raises(UserError, match=r'\[data\] dataset: is "own"'):
        open_dataset(again.data)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ('dataset = "own"\nname = "x"', '[data] samples: is missing, and dataset = "own" needs it'),
        ('dataset = "own"\nsamples = 3', '[data] name: is missing, and dataset = "own" needs it'),
        ("samples = 3", '[data] samples: goes with dataset = "own"; remove it, or set that'),
        ('dataset = "owned"', "for data that your loop brings 'own'"),
        ('dataset = "own"\nname = "x"\nsamples = 0', "[data] samples: 0 is not allowed; give a"),
    ],
)
def test_mistakes_about_data_of_a_loop(tmp_path: Path, data: str, says: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\nname = "a"\n[root]\nworkers = 1\n[data]\n{data}\n')
    with pytest.raises(UserError) as error:
        load_specification(path)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            'factory = "a.b"',
            '[model] factory: "a.b" is not allowed; give "package.module:function"',
        ),
        ('factory = "a:b"\nheads = 2', "[model] heads: does not go with factory"),
        ('transformers = "llama"\nconfig = 3', "[model] config: 3 is not allowed; give a table"),
        ('preset = "2m"\n[model.config]\na = 1', "[model] config: goes with transformers"),
    ],
)
def test_mistakes_about_models(tmp_path: Path, model: str, says: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[run]\nname = "a"\n[root]\nworkers = 1\n[model]\n{model}\n')
    with pytest.raises(UserError) as error:
        load_specification(path)
    assert says in str(error.value)


def test_token_files_may_be_called_own(specification: Spec, tokens: tuple[Path, Path]) -> None:
    own = tokens[0].rename(tokens[0].with_name("own.bin"))
    data: dict[str, Any] = {"train": own, "validation": tokens[1], "dtype": "uint8"}
    document = specification(data=data | {"vocab_size": 256})
    assert prepare_data(document).name.startswith("own@")
    again = RunSpecification.model_validate_json(document.model_dump_json(by_alias=True))
    assert prepare_data(again).name == prepare_data(document).name


def test_running_averages_are_spoken_of_when_a_model_joins(
    specification: Spec, caplog: pytest.LogCaptureFixture
) -> None:
    document = specification(data=OWN)
    data: PreparedData = prepare_data(document)
    with caplog.at_level(logging.WARNING):
        replica_of(document, data, nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert "running averages of 1 stay each worker's own" in caplog.text
