"""How methods are asked for."""

from __future__ import annotations

import pytest

from halos.errors import UserError
from halos.simulation.environment import Environment
from halos.simulation.methods import METHODS, DiLoCo, Servers, method_of
from halos.specification import PRESETS


@pytest.mark.parametrize("name", METHODS)
def test_every_name_is_a_method_and_says_what_it_is(name: str) -> None:
    assert method_of(name).name == name
    assert METHODS[name]


def test_paper_is_the_preset() -> None:
    assert method_of("paper").settings == Servers.of(PRESETS["paper"])


def test_parameters_come_on_top() -> None:
    method = method_of("halos:k=4:alpha=0.5:in_flight=carry:up=int4")
    assert method.name == "halos:k=4:alpha=0.5:in_flight=carry:up=int4"
    expected = {"k": 4, "alpha": 0.5, "in_flight": "carry", "up": "int4"}
    assert method.settings == Servers.of(PRESETS["paper"]).model_copy(update=expected)


def test_a_rate_takes_the_place_of_the_mean_rate_of_a_preset() -> None:
    topology = Environment.load("paper-4x4").tree()
    fast = method_of("fast").settings
    varied = method_of("fast:local_rate=0.125").settings
    assert isinstance(fast, Servers) and isinstance(varied, Servers)
    assert fast.resolved(topology).local.rate == 0.375
    assert varied.resolved(topology).local.rate == 0.125
    assert varied.resolved(topology).root == fast.resolved(topology).root


def test_parameters_of_other_families() -> None:
    assert method_of("diloco:h=8").settings == DiLoCo(h=8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dilco", "method dilco: there is no such method; did you mean diloco?"),
        ("x", "method x: there is no such method; there are fast, paper"),
        ("halos:k", 'method halos:k: "k" sets nothing; give it as k=VALUE'),
        ("fast:", "method fast:: nothing stands after a colon; remove the colon"),
        ("fast:k=2:k=3", "method fast:k=2:k=3: k is there twice; set it once"),
        ("halos:k=0", 'method halos:k=0: k: "0" is not allowed; give a whole number of at least 1'),
        ("halos:kk=3", "method halos:kk=3: kk: no such field; "),
        ("halos:up=int3", 'method halos:up=int3: up: "int3" is not allowed; give'),
        ("diloco:k=3", "method diloco:k=3: k: no such field; "),
    ],
)
def test_a_mistake_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        method_of(text)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
