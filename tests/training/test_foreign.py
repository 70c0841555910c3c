"""Models that halos does not define: from a factory, and from a transformers configuration."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from pydantic import ValidationError
from torch import Tensor, nn

from halos.errors import UserError
from halos.training.data import Dataset
from halos.training.evaluate import validation_loss
from halos.training.export import export_model, load_exported
from halos.training.generate import generate
from halos.training.loss import context_of, logits_of, loss_of
from halos.training.model import ModelSettings, build_gpt, build_model
from halos.training.parameters import gather, layout_of, scatter

from .conftest import LENGTH, VOCABULARY

LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0}

MINE = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self, width, vocabulary=32):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.out(self.table(tokens) + self.frozen)

def tiny(width):
    return Tiny(width)

def words(): return "words"

number = 3
"""


def llama(**config: Any) -> ModelSettings:
    settings = ModelSettings(transformers="llama", config={**LLAMA, **config})
    return settings.for_data(VOCABULARY, LENGTH)


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "mine_of_tests.py").write_text(MINE)
    yield tmp_path
    sys.modules.pop("mine_of_tests", None)


def tiny(folder: Path, factory: str = "mine_of_tests:tiny", **arguments: Any) -> ModelSettings:
    settings = ModelSettings(factory=factory, arguments=arguments, folder=folder)
    return settings.for_data(VOCABULARY, LENGTH)


def flat(model: nn.Module) -> Tensor:
    return torch.cat(gather(model, layout_of(model)).tensors)


# ---------------------------------------------------------------- transformers


@pytest.mark.parametrize(("kind", "config"), [("llama", LLAMA), ("gpt2", GPT2)])
def test_a_model_of_transformers_is_a_function_of_settings_and_seed(
    kind: str, config: dict[str, Any]
) -> None:
    settings = ModelSettings(transformers=kind, config=config).for_data(VOCABULARY, LENGTH)
    before = torch.get_rng_state()
    one, same, other = (build_model(settings, seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(flat(one), flat(same))
    assert not torch.equal(flat(one), flat(other))
    assert one(torch.zeros(1, LENGTH, dtype=torch.int64)).logits.shape == (1, LENGTH, VOCABULARY)
    assert (one.config.vocab_size, context_of(one)) == (VOCABULARY, LENGTH)


def test_its_loss_is_that_of_the_tokens_one_further(dataset: Dataset) -> None:
    """Equal to what the model computes itself, given what it calls labels."""
    model = build_model(llama(max_position_embeddings=64), seed=1)
    tokens, targets = dataset.batch([0, 1, 2])
    whole = torch.cat((tokens, targets[:, -1:]), dim=1)
    expected = model(input_ids=whole, labels=whole).loss
    torch.testing.assert_close(loss_of(model)(tokens, targets), expected)
    assert validation_loss(model, dataset, limit=3) == pytest.approx(3.5, abs=0.2)


def test_it_generates_and_its_context_moves_on() -> None:
    model = build_model(llama(), seed=1)
    first = generate(model, [1], 3 * LENGTH, seed=1)
    assert first == generate(model, [1], 3 * LENGTH, seed=1)
    assert len(first) == 3 * LENGTH


@pytest.mark.parametrize("more", [{}, {"tie_word_embeddings": True}, {"dtype": "bfloat16"}])
def test_it_is_exported_for_transformers(tmp_path: Path, more: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    settings = llama(**more)
    model, layout = build_model(settings, seed=1), layout_of(build_model(settings, seed=1))
    for _ in range(2):
        export_model(tmp_path / "one", model, layout, settings)
    export_model(tmp_path / "other", gather(model, layout), layout, settings)
    tokens = torch.arange(LENGTH)[None]
    for name in ("one", "other"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
        assert layout_of(loaded) == layout
        left = sorted(p.name for p in (tmp_path / name).iterdir())
        assert left == ["config.json", "generation_config.json", "model.safetensors"]
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert (config["model_type"], config["use_cache"]) == ("llama", True)
    assert model.config.use_cache is False
    with pytest.raises(UserError, match="load it by AutoModelForCausalLM"):
        load_exported(tmp_path / "one")


def test_tied_and_half_precision_parameters_travel_once() -> None:
    model = build_model(llama(tie_word_embeddings=True, dtype="bfloat16"), seed=1)
    first = layout_of(model).parameters[0]
    assert first.names == ("model.embed_tokens.weight", "lm_head.weight")
    assert {p.dtype for p in layout_of(model).parameters} == {"bfloat16"}
    layout = layout_of(model)
    other = build_model(llama(tie_word_embeddings=True, dtype="bfloat16"), seed=2)
    scatter(other, layout, gather(model, layout))
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert torch.equal(flat(other), flat(model))


@pytest.mark.parametrize(
    ("kind", "config", "says"),
    [
        ("lama", {}, r'transformers: there is no model type "lama"; did you mean .*llama'),
        ("vit", {}, '"vit" is no causal language model'),
        ("llama", {"hiden_size": 3}, r"hiden_size: llama models have no such .* hidden_size"),
        ("llama", {"hidden_size": "wide"}, r"\[model.config\] does not make a llama model: .*int"),
        ("llama", {**LLAMA, "hidden_size": 33}, "does not make a llama model: .*33"),
    ],
)
def test_a_configuration_that_makes_no_model_is_one_sentence(
    kind: str, config: dict[str, Any], says: str
) -> None:
    settings = ModelSettings(transformers=kind, config=config).for_data(VOCABULARY, LENGTH)
    with pytest.raises(UserError, match=says) as error:
        build_model(settings, 0)
    assert "\n" not in str(error.value)


def test_it_must_have_room_for_the_data() -> None:
    small = ModelSettings(transformers="llama", config={"vocab_size": 7})
    with pytest.raises(UserError, match=r"model\.config\.vocab_size is 7, but the data needs 32"):
        small.for_data(VOCABULARY, LENGTH)
    short = ModelSettings(transformers="llama", config={"max_position_embeddings": 4})
    with pytest.raises(UserError, match=r"max_position_embeddings is 4, but the data needs 8"):
        short.for_data(VOCABULARY, LENGTH)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "transformers":
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match='install halos with its extra "hf"'):
        build_model(llama(), 0)


# ---------------------------------------------------------------- a factory


def test_a_factory_is_found_in_its_folder(mine: Path) -> None:
    before = list(sys.path)
    one, same, other = (build_model(tiny(mine, width=4), seed) for seed in (1, 1, 2))
    assert sys.path == before
    assert torch.equal(flat(one), flat(same)) and torch.equal(one.frozen, same.frozen)
    assert not torch.equal(flat(one), flat(other))
    assert [p.names[0] for p in layout_of(one).constants] == ["frozen"]


def test_a_model_without_a_loss_is_evaluated_and_goes_on(mine: Path, dataset: Dataset) -> None:
    model = build_model(tiny(mine, width=4), seed=1)
    x, y = next(dataset.validation_batches(100))
    expected = F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    assert validation_loss(model, dataset, 3) == pytest.approx(expected, rel=1e-6)
    assert len(generate(model, [1], 20)) == 20


def test_a_factorys_model_is_exported_with_its_constants(mine: Path) -> None:
    settings = tiny(mine, width=4)
    model = build_model(settings, seed=5)
    export_model(mine / "out", model, layout_of(model), settings)
    loaded = load_exported(mine / "out")
    tokens = torch.arange(LENGTH)[None]
    assert torch.equal(loaded(tokens), model(tokens))
    fragments = gather(model, layout_of(model))
    with pytest.raises(ValueError, match="lack the model's constants"):
        export_model(mine / "out", fragments, layout_of(model), settings)


@pytest.mark.parametrize(
    ("factory", "arguments", "says"),
    [
        ("mine_of_test:tiny", {}, "there is no module mine_of_test in "),
        ("mine_of_tests.deeper:tiny", {}, "there is no module mine_of_tests.deeper in "),
        ("mine_of_tests:tinny", {}, "has no function tinny; did you mean tiny"),
        ("mine_of_tests:number", {}, "has no function number"),
        ("mine_of_tests:tiny", {"with": 3}, r"\[model.arguments\] do not fit mine_of_tests:tiny"),
        ("mine_of_tests:words", {}, "returns str; it is to return a torch.nn.Module"),
    ],
)
def test_a_factory_that_makes_no_model_is_one_sentence(
    mine: Path, factory: str, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        build_model(tiny(mine, factory, **arguments), 0)


def test_what_goes_wrong_inside_a_factory_keeps_its_traceback(mine: Path) -> None:
    (mine / "mine_that_fails.py").write_text("import no_such_module_at_all")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        build_model(tiny(mine, "mine_that_fails:tiny"), 0)
    with pytest.raises(TypeError):
        build_model(tiny(mine, width="wide"), 0)


# ---------------------------------------------------------------- settings and answers


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"factory": "a"}, "package.module:function"),
        ({"factory": "a:b", "transformers": "llama"}, "does not go with"),
        ({"factory": "a:b", "layers": 2}, "layers: does not go with factory"),
        ({"transformers": "llama", "preset": "2m"}, "preset: does not go with transformers"),
        ({"preset": "2m", "config": {"a": 1}}, "config: goes with transformers"),
        ({"preset": "2m", "arguments": {"a": 1}}, "arguments: goes with factory"),
    ],
)
def test_settings_of_two_kinds_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ModelSettings.model_validate(given)


@pytest.mark.parametrize(
    "settings",
    [llama(), tiny(Path("/nowhere"), width=3), ModelSettings(preset="2m").for_data(9, 9)],
)
def test_settings_survive_being_written_down(settings: ModelSettings) -> None:
    assert ModelSettings.model_validate(settings.model_dump(mode="json")) == settings
    assert ModelSettings.model_validate_json(settings.model_dump_json()) == settings


def test_logits_are_found_in_what_a_model_returns(sizes: ModelSettings) -> None:
    logits = torch.zeros(1, 2, 3)
    assert logits_of(logits) is logits_of({"logits": logits}) is logits
    with pytest.raises(UserError, match=r"forward returns tuple without logits; .* loss\(tokens"):
        logits_of((logits,))
    model = build_gpt(sizes, 0)
    assert loss_of(model) == model.loss
    model.loss = nn.CrossEntropyLoss()  # a criterion is not the model's own loss
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    assert loss_of(model)(tokens, tokens).ndim == 0
