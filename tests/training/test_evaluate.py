from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from halos.errors import UserError
from halos.training.data import Dataset
from halos.training.evaluate import validation_loss
from halos.training.export import export_model, load_exported
from halos.training.generate import decode_bytes, encode_bytes, generate
from halos.training.model import GPT, LanguageModel, ModelSettings, build_model
from halos.training.parameters import gather, layout_of


@pytest.fixture
def model(sizes: ModelSettings) -> GPT:
    return build_model(sizes, seed=3)


def test_the_loss_is_the_mean_however_it_is_batched(model: GPT, dataset: Dataset) -> None:
    (x, y), *rest = dataset.validation_batches(100)
    assert not rest
    expected = pytest.approx(model.loss(x, y).item(), rel=1e-6)
    assert [validation_loss(model, dataset, n) for n in (1, 3, 10)] == [expected] * 3
    x, y = (t[[0, 2, 5, 7]] for t in (x, y))
    expected = pytest.approx(model.loss(x, y).item(), rel=1e-6)
    assert validation_loss(model, dataset, 3, limit=4) == expected
    with pytest.raises(UserError, match="limit is 0"):
        validation_loss(model, dataset, limit=0)


def test_evaluating_leaves_the_model_as_it_was(model: GPT, dataset: Dataset) -> None:
    for training in (True, False):
        model.train(training)
        validation_loss(model, dataset, limit=2)
        assert model.training is training
    assert all(p.grad is None for p in model.parameters())


class Counter(LanguageModel):
    """Knows that each token is followed by the next number; remembers how much it was shown."""

    context = 4

    def __init__(self) -> None:
        super().__init__()
        self.sharpness = torch.nn.Parameter(torch.tensor(2.0))
        self.shown: list[int] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.shown.append(tokens.shape[1])
        following = (tokens + 1) % 10
        return self.sharpness * torch.nn.functional.one_hot(following, 10).float()


def test_generation_goes_on_from_the_last_tokens_that_fit() -> None:
    counter = Counter()
    assert generate(counter, [5, 6], 6, temperature=0) == [7, 8, 9, 0, 1, 2]
    assert counter.shown == [2, 3, 4, 4, 4, 4]
    assert generate(counter, [5], 3, top_k=1) == [6, 7, 8]
    assert generate(counter, [5], 3, temperature=1e-30) == [6, 7, 8]
    assert generate(counter, [5], 0) == []


def test_chance_in_generation_comes_from_its_seed(model: GPT) -> None:
    before = torch.get_rng_state()
    first = generate(model, [1], 30, seed=1)
    assert first == generate(model, [1], 30, seed=1) != generate(model, [1], 30, seed=2)
    assert len(set(first)) > 5
    assert len(set(generate(model, [1], 30, top_k=2, seed=1))) < len(set(first))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("prompt", "more", "says"),
    [
        ([], {}, "prompt is empty"),
        ([1], {"temperature": -1.0}, "temperature is -1.0"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"top_k": 0}, "top_k is 0"),
    ],
)
def test_generation_out_of_range_is_refused(
    model: GPT, prompt: list[int], more: dict[str, float], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        generate(model, prompt, 1, **more)


def test_bytes_are_tokens() -> None:
    assert decode_bytes(encode_bytes("naïve → ok")) == "naïve → ok"
    assert decode_bytes([104, 105, 0xE2, 0x86]) == "hi\ufffd"


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_model_comes_back(tmp_path: Path, sizes: ModelSettings, tied: bool) -> None:
    settings = sizes.model_copy(update={"tied": tied})
    model = build_model(settings, seed=3)
    layout = layout_of(model)
    path = tmp_path / "new" / "exported"
    for _ in range(2):  # over an older one, too
        export_model(path, model, layout, settings)
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "model.safetensors"]
    loaded = load_exported(path)
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded(tokens), model(tokens))
    assert (loaded.head.weight is loaded.embedding.weight) is tied
    assert layout_of(loaded) == layout
    size = (path / "model.safetensors").stat().st_size
    assert size == pytest.approx(4 * layout.numel, abs=4000), "tied parameters are stored once"


def test_fragments_can_be_exported_as_they_are(
    tmp_path: Path, model: GPT, sizes: ModelSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halos.core.fragments.FRAGMENT_ELEMENTS", 1000)
    layout = layout_of(model)
    assert len(layout.fragments) > 5
    export_model(tmp_path, gather(model, layout), layout, sizes)
    tokens = torch.arange(8)[None]
    assert torch.equal(load_exported(tmp_path)(tokens), model(tokens))


def test_what_was_not_exported_cannot_be_loaded(
    tmp_path: Path, model: GPT, sizes: ModelSettings
) -> None:
    with pytest.raises(UserError, match="holds no exported model: No such file"):
        load_exported(tmp_path)
    export_model(tmp_path, model, layout_of(model), sizes)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    good, whole = config.read_text(), weights.read_bytes()

    weights.write_bytes(whole[:-10])
    with pytest.raises(UserError, match="damaged"):
        load_exported(tmp_path)
    weights.write_bytes(whole)
    for text, says in (
        ("{", "damaged"),
        ("[]", "not exported by halos"),
        (good.replace("halos-gpt-1", "other"), "not exported by halos"),
        (good.replace('"layers": 2', '"layers": 0'), "describes no model: Input should be"),
        (good.replace('"vocab_size": 32', '"vocab_size": null'), "describes no model: vocab_size"),
        (good.replace('"layers": 2', '"layers": 3'), "does not hold the parameters"),
    ):
        config.write_text(text)
        with pytest.raises(UserError, match=says):
            load_exported(tmp_path)
