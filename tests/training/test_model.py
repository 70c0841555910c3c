from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from halos.errors import UserError
from halos.training.model import PRESETS, ModelSettings, build_model, parameter_count

UNITS = {"m": 1e6, "b": 1e9}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_of_the_size_it_is_named_after(name: str) -> None:
    vocabulary = 256 if PRESETS[name].get("tied", True) else 50304
    settings = ModelSettings(preset=name).for_data(vocabulary, 64)
    named = float(name[:-1]) * UNITS[name[-1]]
    # "0.1m" says 0.12 million to one digit
    tolerance = 0.25 if name == "0.1m" else 0.15
    assert parameter_count(settings) == pytest.approx(named, rel=tolerance)


def test_the_papers_model_has_the_papers_size() -> None:
    settings = ModelSettings(preset="70m").for_data(50304, 1024)
    assert 4 * parameter_count(settings) == pytest.approx(281_706_496, rel=0.01)


def test_what_is_given_besides_a_preset_overrides_it() -> None:
    settings = ModelSettings(preset="0.4m", layers=5, tied=False)
    assert (settings.layers, settings.width, settings.tied) == (5, 128, False)
    assert ModelSettings.model_validate(settings.model_dump()) == settings


def test_sizes_left_out_follow_from_the_others() -> None:
    settings = ModelSettings(layers=1, heads=4, width=64)
    assert (settings.kv_heads, settings.ffn_width) == (4, 192)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"preset": "9m"}, "there is no '9m'; the presets are 0.1m, 0.4m"),
        ({"preset": ["9m"]}, "the presets are"),
        ({}, "layers: is missing; set it, or preset"),
        ({"layers": 2, "heads": 2}, "width: is missing"),
        ({"layers": 2, "heads": 3, "width": 64}, "not a multiple of 2 * heads"),
        ({"layers": 2, "heads": 4, "kv_heads": 3, "width": 64}, "heads (4) is not a multiple"),
        ({"preset": "0.1m", "layers": 0}, "greater than or equal to 1"),
        ({"preset": "0.1m", "depth": 3}, "Extra inputs"),
    ],
)
def test_sizes_that_make_no_model_are_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError) as error:
        ModelSettings.model_validate(given)
    assert says in str(error.value)


def test_a_model_too_small_for_its_data_is_refused() -> None:
    settings = ModelSettings(preset="0.1m", vocab_size=100, context=32)
    with pytest.raises(UserError, match=r"model\.vocab_size is 100, but the data needs 256"):
        settings.for_data(256, 32)
    with pytest.raises(UserError, match=r"model\.context is 32, but the data needs 64"):
        settings.for_data(100, 64)
    assert settings.for_data(50, 16) == settings


@pytest.mark.parametrize(
    "sizes",
    [{}, {"kv_heads": 1}, {"kv_heads": 2}, {"tied": False}, {"layers": 1, "rope_base": 100.0}],
)
def test_the_future_does_not_change_the_past(sizes: dict[str, object]) -> None:
    given = {"layers": 2, "heads": 4, "width": 32, "vocab_size": 50, "context": 16, **sizes}
    model = build_model(ModelSettings.model_validate(given), seed=0)
    tokens = torch.arange(3 * 12).view(3, 12) % 50
    logits = model(tokens)
    assert logits.shape == (3, 12, 50)
    changed = tokens.clone()
    changed[:, 7:] = 49
    again = model(changed)
    torch.testing.assert_close(again[:, :7], logits[:, :7], rtol=0, atol=1e-6)
    assert not torch.allclose(again[:, 7:], logits[:, 7:])
    torch.testing.assert_close(model(tokens[:, :5]), logits[:, :5], rtol=0, atol=1e-6)


def test_order_matters_and_only_distances_do() -> None:
    settings = ModelSettings(layers=2, heads=2, width=16, vocab_size=8, context=8)
    model = build_model(settings, seed=0)
    for parameter in model.parameters():
        parameter.data.mul_(3)
    logits = model(torch.tensor([[1, 2, 3]]))
    assert not torch.allclose(model(torch.tensor([[2, 1, 3]]))[0, -1], logits[0, -1], atol=1e-3)
    model.turns = model.turns[4:]
    torch.testing.assert_close(model(torch.tensor([[1, 2, 3]])), logits)


def test_a_compiled_model_turns_positions_alike(
    sizes: ModelSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = build_model(sizes, seed=0), torch.arange(8)[None]
    logits = model(tokens)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(model(tokens), logits)


def test_a_fresh_model_knows_nothing(sizes: ModelSettings) -> None:
    model = build_model(sizes, seed=0)
    tokens = torch.arange(16).view(2, 8)
    assert model.loss(tokens, tokens.flip(0)).item() == pytest.approx(math.log(32), abs=0.1)


def test_loss_is_the_mean_over_all_tokens(sizes: ModelSettings) -> None:
    model = build_model(sizes, seed=0)
    tokens, targets = torch.arange(16).view(2, 8), torch.arange(16, 32).view(2, 8)
    picked = model(tokens).log_softmax(-1).gather(-1, targets[..., None])
    torch.testing.assert_close(model.loss(tokens, targets), -picked.mean())


def test_parameters_come_from_the_seed_and_leave_other_chance_alone(sizes: ModelSettings) -> None:
    before = torch.get_rng_state()
    first, again, other = (build_model(sizes, seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.layers[0].qkv.weight, again.layers[0].qkv.weight)
    assert not torch.equal(first.layers[0].qkv.weight, other.layers[0].qkv.weight)
    assert float(first.layers[0].qkv.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert float(first.layers[1].ffn_out.weight.detach().std()) == pytest.approx(0.01, rel=0.1)


def test_a_sequence_longer_than_the_context_is_refused(sizes: ModelSettings) -> None:
    with pytest.raises(ValueError, match="9 tokens; the model's context is 8"):
        build_model(sizes, 0)(torch.zeros(1, 9, dtype=torch.int64))


def test_a_model_needs_to_know_its_data() -> None:
    with pytest.raises(ValueError, match="for_data"):
        build_model(ModelSettings(preset="0.1m"), 0)
