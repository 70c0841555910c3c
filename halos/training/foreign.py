"""Models that others define: those of transformers by their configuration, and of any function."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halos.errors import UserError
from halos.training.model_settings import POSITIONS, ModelSettings

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def build_foreign(settings: ModelSettings, seed: int) -> nn.Module:
    """The module of ``settings.transformers`` or ``settings.factory``, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if settings.transformers is not None:
            return transformers_model(settings).cpu()
        return factory_model(settings).cpu()


# ---------------------------------------------------------------- transformers


def transformers_model(settings: ModelSettings) -> nn.Module:
    """A causal language model made from its configuration alone; downloads nothing."""
    transformers = load_transformers()
    kind = settings.transformers
    if kind not in transformers.CONFIG_MAPPING:
        raise UserError(
            f'[model] transformers: there is no model type "{kind}"'
            f"{_suggest(str(kind), transformers.CONFIG_MAPPING)}"
        )
    config_class = transformers.CONFIG_MAPPING[kind]
    if config_class not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f'[model] transformers: "{kind}" is no causal language model; give one')
    try:
        config = config_class(**config_values(settings, config_class()))
        model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # each of its models refuses values in its own way
        reason = " ".join(str(error).split())
        raise UserError(f"[model.config] does not make a {kind} model: {reason}") from error
    module: nn.Module = model
    return module


def config_values(settings: ModelSettings, default: Any) -> dict[str, Any]:
    """What the user set, with vocabulary and context as the data needs where he did not.

    ``default`` is a configuration of the same type. Raises ``UserError`` for a name that it does
    not know, which transformers would take without a word.
    """
    aliases = default.attribute_map
    known = {*default.to_dict(), *aliases, "attn_implementation"} - {"transformers_version"}
    for name in settings.config:
        if name not in known:
            raise UserError(
                f"[model.config] {name}: {settings.transformers} models have no such value"
                f"{_suggest(name, known)}"
            )
    chosen = {aliases.get(name, name): value for name, value in settings.config.items()}
    filled: dict[str, Any] = {"vocab_size": settings.vocab_size}
    if hasattr(default, "use_cache"):
        filled["use_cache"] = False  # of no use in training
    if getattr(default, POSITIONS, None) is not None:
        filled[aliases.get(POSITIONS, POSITIONS)] = settings.context
    vocabulary = chosen.get("vocab_size", settings.vocab_size)
    for token in SPECIAL_TOKENS:  # its tokenizer's, which has another vocabulary
        number = getattr(default, token, None)
        if isinstance(number, int) and vocabulary is not None and number >= vocabulary:
            filled[token] = None
    return filled | chosen


def load_transformers() -> Any:
    """The library, or one sentence on how to get it."""
    try:
        import transformers
    except ImportError:
        raise UserError(
            '[model] transformers: is not installed; install halos with its extra "hf"'
        ) from None
    return transformers


# ---------------------------------------------------------------- a function of anybody's


def factory_model(settings: ModelSettings) -> nn.Module:
    """What the function of ``settings.factory`` returns for ``settings.arguments``."""
    places = [p for p in (settings.folder, Path.cwd()) if p is not None]
    with importable_from(places):
        function = find_function(str(settings.factory), places)
        try:
            inspect.signature(function).bind(**settings.arguments)
        except TypeError as error:
            raise UserError(f"[model.arguments] do not fit {settings.factory}: {error}") from None
        made = function(**settings.arguments)
    if not isinstance(made, nn.Module):
        raise UserError(
            f"[model] factory: {settings.factory} returns {type(made).__name__}; it is to return "
            "a torch.nn.Module"
        )
    return made


def find_function(factory: str, places: list[Path]) -> Callable[..., object]:
    """Import "package.module:function". Raises ``UserError`` if it is not there."""
    name, _, function = factory.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and needs another that is not
        where = " or ".join(str(place) for place in places)
        raise UserError(
            f'[model] factory: "{factory}": there is no module {error.name} in {where}, nor is it '
            "installed"
        ) from None
    found = getattr(module, function, None)
    if not callable(found):
        raise UserError(
            f'[model] factory: "{factory}": {module.__file__} has no function {function}'
            f"{_suggest(function, [n for n in vars(module) if not n.startswith('_')])}"
        )
    called: Callable[..., object] = found
    return called


@contextmanager
def importable_from(places: list[Path]) -> Iterator[None]:
    """Modules in these folders can be imported within, before others of the same name."""
    before = list(sys.path)
    sys.path[:0] = [str(place) for place in places]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def _suggest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=2)
    return f"; did you mean {' or '.join(close)}?" if close else ""
