"""What a specification says, and what follows from it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from coordinator.init import TEMPLATE
from halos.core.equations import OuterSettings
from halos.core.topology import ServerPlace, Topology, WorkerPlace
from halos.errors import UserError
from halos.reading import known_names, settings_in
from halos.specification import (
    OuterTable,
    RunSpecification,
    SyncTable,
    children_of,
    load_specification,
    resolve_sync,
)
from halos.wire.frames import Codecs
from halos.wire.link import LinkSettings
from halos.wire.settings import WireTable


def specification(**sections: Any) -> RunSpecification:
    given = {"run": {"name": "test"}, "regions": [{"name": "us", "workers": 2}]} | sections
    return RunSpecification.model_validate(given)


# ---------------------------------------------------------------- the presets of [sync]


def tree(*workers: int) -> Topology:
    regions = [{"name": f"r{i}", "workers": count} for i, count in enumerate(workers)]
    return specification(regions=regions).topology


FOUR, ONE = tree(4, 4, 4, 4), tree(1)


def test_the_papers_settings() -> None:
    sync = resolve_sync(SyncTable(preset="paper"), FOUR)
    assert (sync.local_steps, sync.accumulation, sync.merge_weight) == (8, 32, 0.25)
    assert sync.in_flight == "drop"
    assert sync.local == OuterSettings(rate=0.2, momentum=0.9, momentum_delay=16, momentum_share=0)
    assert sync.root == OuterSettings(rate=0.15, momentum=0.5, momentum_delay=2, momentum_share=0)
    assert sync.local.scaled_rate == pytest.approx(3.2)


def test_fast_is_what_a_run_starts_from() -> None:
    assert resolve_sync(SyncTable(), FOUR) == resolve_sync(SyncTable(preset="fast"), FOUR)


@pytest.mark.parametrize(
    ("workers", "local", "root"),
    [
        ((4, 4, 4, 4), 0.375, 0.25),
        ((1, 3, 8), 0.375, 1 / 3),
        ((2, 0, 2), 0.75, 0.5),
        ((6,), 0.25, 1.0),
    ],
)
def test_a_mean_rate_is_shared_by_the_children(
    workers: tuple[int, ...], local: float, root: float
) -> None:
    sync = resolve_sync(SyncTable(preset="fast"), tree(*workers))
    assert sync.local.rate == pytest.approx(local)
    assert sync.root.rate == pytest.approx(root)


def test_servers_and_workers_of_a_deeper_tree_are_children_alike() -> None:
    run = specification(
        regions=[
            {"name": "eu", "workers": 1},
            {"name": "rack", "workers": 3, "parent": "eu"},
            {"name": "empty", "workers": 0, "parent": "rack"},
        ],
        root={"workers": 1},
    )
    assert children_of(run.topology) == {"root": 2, "eu": 2, "rack": 3}


def test_a_rate_takes_the_place_of_the_presets_mean_rate_and_the_other_way_round() -> None:
    table = SyncTable(preset="fast", local=OuterTable(rate=0.3))
    assert resolve_sync(table, FOUR).local.rate == 0.3
    table = SyncTable(preset="paper", local=OuterTable(mean_rate=1.0))
    assert resolve_sync(table, FOUR).local == OuterSettings(
        rate=0.25, momentum=0.9, momentum_delay=16
    )


def test_both_rates_at_once_are_a_mistake() -> None:
    with pytest.raises(ValidationError, match="mean_rate: 1 is given beside rate"):
        OuterTable(rate=0.5, mean_rate=1.0)


def test_one_worker_in_all_is_single() -> None:
    sync = resolve_sync(SyncTable(), ONE)
    assert (sync.accumulation, sync.merge_weight, sync.in_flight) == (1, 1.0, "carry")
    assert sync.local == sync.root == OuterSettings(rate=1, momentum=0, momentum_delay=1)


def test_the_preset_named_is_taken_whatever_the_number_of_workers() -> None:
    paper, single = (SyncTable(preset=name) for name in ("paper", "single"))
    assert resolve_sync(paper, ONE) == resolve_sync(paper, FOUR)
    assert resolve_sync(single, FOUR) == resolve_sync(SyncTable(), ONE)


@pytest.mark.parametrize("topology", [ONE, FOUR])
def test_what_the_user_set_wins_and_the_rest_is_the_presets(topology: Topology) -> None:
    table = SyncTable(accumulation=3, **{"global": OuterTable(momentum=0.7)})
    preset = resolve_sync(SyncTable(), topology)
    expected = preset.model_copy(
        update={"accumulation": 3, "root": preset.root.model_copy(update={"momentum": 0.7})}
    )
    assert resolve_sync(table, topology) == expected


def test_setting_a_value_of_the_preset_again_changes_nothing() -> None:
    again = SyncTable(preset="paper", in_flight="drop", merge_weight=0.25)
    assert resolve_sync(again, FOUR) == resolve_sync(SyncTable(preset="paper"), FOUR)


# ---------------------------------------------------------------- the tree


def test_workers_are_numbered_within_their_server() -> None:
    run = specification(
        regions=[{"name": "us", "workers": 2}, {"name": "eu", "workers": [1.0, 0.5]}],
        root={"workers": 1},
    )
    assert run.topology.workers == (
        WorkerPlace("root/0", "root", 1.0),
        WorkerPlace("us/0", "us", 1.0),
        WorkerPlace("us/1", "us", 1.0),
        WorkerPlace("eu/0", "eu", 1.0),
        WorkerPlace("eu/1", "eu", 0.5),
    )


def test_servers_come_after_their_parents() -> None:
    run = specification(
        regions=[
            {"name": "rack", "workers": 1, "parent": "row"},
            {"name": "row", "parent": "us"},
            {"name": "us"},
            {"name": "eu", "workers": 1, "parent": "root"},
        ]
    )
    assert run.topology.servers == (
        ServerPlace("root", None),
        ServerPlace("us", "root"),
        ServerPlace("eu", "root"),
        ServerPlace("row", "us"),
        ServerPlace("rack", "row"),
    )


def test_all_workers_may_sit_at_the_root() -> None:
    run = specification(regions=[], root={"workers": [0.5, 1]})
    assert run.topology.servers == (ServerPlace("root", None),)
    assert [worker.name for worker in run.topology.workers] == ["root/0", "root/1"]


# ---------------------------------------------------------------- emulated links


def test_no_link_is_emulated_unless_the_file_says_so() -> None:
    assert specification().link_of("us") is None
    assert specification(link={}).link_of("us") is None


def test_every_region_has_the_runs_link_but_for_what_it_says_itself() -> None:
    run = specification(
        link={"rate_mbps": 100, "rtt_ms": 80},
        regions=[
            {"name": "us", "workers": 1},
            {"name": "eu", "link": {"rate_mbps": 50, "rtt_ms": 120}},
            {"name": "ap", "link": {"rtt_ms": 200}},
        ],
    )
    assert run.link_of("us") == LinkSettings(rate_mbps=100, rtt_ms=80)
    assert run.link_of("eu") == LinkSettings(rate_mbps=50, rtt_ms=120)
    assert run.link_of("ap") == LinkSettings(rate_mbps=100, rtt_ms=200)
    assert run.link_of("root") is None


def test_a_link_of_one_region_alone() -> None:
    run = specification(
        regions=[{"name": "us", "workers": 1}, {"name": "eu", "link": {"rate_mbps": 5}}]
    )
    assert run.link_of("us") is None
    assert run.link_of("eu") == LinkSettings(rate_mbps=5)


# ---------------------------------------------------------------- how much


def test_length_in_local_steps() -> None:
    run = specification(training={"local_steps_total": 100, "batch_size": 4})
    assert run.total_samples(dataset_samples=7) == 400
    assert run.global_batch == 8
    assert run.iterations(dataset_samples=7) == 50


def test_length_in_epochs() -> None:
    run = specification(training={"epochs": 1.5, "global_batch": 100})
    assert run.total_samples(dataset_samples=1001) == 1502
    assert run.iterations(dataset_samples=1001) == 16


def test_one_epoch_unless_said_otherwise() -> None:
    assert specification().total_samples(dataset_samples=1001) == 1001


def test_the_papers_run() -> None:
    run = specification(
        regions=[{"name": f"r{region}", "workers": 4} for region in range(4)],
        training={"local_steps_total": 98_304, "batch_size": 64},
    )
    assert (run.global_batch, run.iterations(dataset_samples=10**9)) == (1024, 6144)


def test_the_schedule_is_as_long_as_the_run() -> None:
    run = specification(training={"local_steps_total": 2 * 6144}, inner={"learning_rate": 0.5})
    inner = run.inner_for(dataset_samples=1)
    assert (inner.total_iterations, inner.warmup_iterations) == (6144, 300)
    assert inner.learning_rate == 0.5
    short = specification(training={"local_steps_total": 2}).inner_for(dataset_samples=1)
    assert (short.total_iterations, short.warmup_iterations) == (1, 0)


def test_a_schedule_that_the_user_set_stays() -> None:
    run = specification(inner={"total_iterations": 50, "warmup_iterations": 7})
    inner = run.inner_for(dataset_samples=10**6)
    assert (inner.total_iterations, inner.warmup_iterations) == (50, 7)


def test_a_warm_up_longer_than_the_run() -> None:
    run = specification(training={"local_steps_total": 20}, inner={"warmup_iterations": 11})
    with pytest.raises(UserError, match=r"^\[inner\] warmup_iterations: 11 .* at most 10,"):
        run.inner_for(dataset_samples=1)


# ---------------------------------------------------------------- the file


def test_paths_start_at_the_files_folder(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = '[run]\nname = "a"\n{}\n[root]\nworkers = 1\n[data]\ndtype = "uint8"\nvocab_size = 9\n'
    text += 'train = "train.bin"\nvalidation = "/elsewhere/v.bin"\n'
    path.write_text(text.format(""))
    run = load_specification(path)
    assert run.run.directory == tmp_path / "runs" / "a"
    assert run.data.train == tmp_path / "train.bin"
    assert run.data.validation == Path("/elsewhere/v.bin")
    path.write_text(text.format('directory = "out"'))
    assert load_specification(path).run.directory == tmp_path / "out"


def test_a_specification_survives_being_written_down() -> None:
    run = specification(sync={"global": {"rate": 0.3}}, training={"epochs": 2})
    assert RunSpecification.model_validate_json(run.model_dump_json()) == run
    again = RunSpecification.model_validate(run.model_dump())
    assert again == run
    assert again.inner_for(dataset_samples=5000) == run.inner_for(dataset_samples=5000)
    assert again.inner_for(dataset_samples=5000).total_iterations == 625


def test_a_specification_does_not_change() -> None:
    with pytest.raises(ValidationError):
        specification().run.seed = 1  # type: ignore[misc]


# ---------------------------------------------------------------- what `halos init` writes


def test_the_template_sets_nothing_but_defaults(tmp_path: Path) -> None:
    written = load_specification(TEMPLATE)
    regions = [("us", 3), ("eu", 3), ("ap", 2)]
    expected = RunSpecification.model_validate(
        {
            "run": {"name": "first", "directory": TEMPLATE.parent / "runs/first"},
            "regions": [{"name": name, "workers": workers} for name, workers in regions],
            "training": {"epochs": 1.0},
        }
    )
    assert written == expected


COMMENTED = re.compile(r"^# (\w+ = .*)$", re.MULTILINE)


def test_the_template_names_every_field() -> None:
    text = COMMENTED.sub(r"\1", TEMPLATE.read_text())
    # Both lengths and two regions' fields are now there, so it is TOML but no specification.
    missing = list(unnamed(RunSpecification, tomllib.loads(text), ""))
    assert missing == []


def unnamed(owner: type[BaseModel], table: Any, path: str) -> Iterator[str]:
    for name in known_names(owner):
        below = settings_in(owner, name)
        if name not in table:
            yield f"{path}{name}"
        elif below is not None:
            value = table[name][-1] if isinstance(table[name], list) else table[name]
            yield from unnamed(below, value, f"{path}{name}.")


@pytest.mark.parametrize("line", COMMENTED.findall(TEMPLATE.read_text()))
def test_what_the_template_leaves_commented_out_is_right(tmp_path: Path, line: str) -> None:
    text = TEMPLATE.read_text().replace(f"# {line}", line, 1)
    field = line.partition(" ")[0]
    if field == "local_steps_total":  # stands in place of the other
        text = text.replace("epochs = 1.0", "")
    if field in ("train", "validation"):  # stand together, in place of the built-in text
        text = re.sub(r"^# (train|validation) =", r"\1 =", text, flags=re.MULTILINE)
        text = text.replace('dataset = "python-stdlib"', "")
    if field in ("samples", "name"):  # stand together, with dataset = "own"
        text = re.sub(r"^# (samples|name) =", r"\1 =", text, flags=re.MULTILINE)
        text = text.replace('dataset = "python-stdlib"', 'dataset = "own"')
    for kind, beside in (("transformers", "config"), ("factory", "arguments|folder")):
        if re.fullmatch(f"{kind}|{beside}", field):  # stand together, in place of the built-in one
            text = re.sub(f"^# ({kind}|{beside}) =", r"\1 =", text, flags=re.MULTILINE)
            text = re.sub(
                r"^(preset|tied|rope_base) = (?!\"paper).*$", "", text, flags=re.MULTILINE
            )
    path = tmp_path / "run.toml"
    path.write_text(text)
    load_specification(path)


def test_the_template_shows_the_values_of_fast(tmp_path: Path) -> None:
    text = TEMPLATE.read_text()
    start, end = text.index("[sync]"), text.index("[membership]")
    path = tmp_path / "run.toml"
    shown = COMMENTED.sub(r"\1", text[start:end]).replace("\nrate = ", "\n# rate = ")
    path.write_text(text[:start] + shown + text[end:])
    run = load_specification(path)
    assert run.resolved_sync == resolve_sync(SyncTable(preset="fast"), run.topology)


@pytest.mark.parametrize(
    ("preset", "codecs"),
    [
        ("fast", Codecs(workers="bf16", up="int4+zstd", models="fp32", differences="int8")),
        ("paper", Codecs()),
        ("single", Codecs()),
    ],
)
def test_links_that_come_with_a_preset(preset: str, codecs: Codecs) -> None:
    run = specification(sync={"preset": preset})
    assert run.resolved_wire.codecs == codecs
    exact = specification(sync={"preset": preset}, wire={"workers": "fp32"})
    assert exact.resolved_wire.codecs == replace(codecs, workers="fp32")


@pytest.mark.parametrize(
    ("wire", "up", "down"),
    [
        ({}, ("fp32", False), ("fp32", False)),
        ({"uplink": "int4+ef+zstd"}, ("int4+zstd", True), ("fp32", False)),
        ({"uplink": "int4+zstd+ef"}, ("int4+zstd", True), ("fp32", False)),
        ({"uplink": "bf16+ef", "downlink": "bf16"}, ("bf16", True), ("bf16", False)),
        ({"uplink": "topk", "downlink": "int8-delta"}, ("topk", False), ("int8", True)),
        ({"downlink": "int8+zstd-delta"}, ("fp32", False), ("int8+zstd", True)),
    ],
)
def test_links_between_servers(
    wire: dict[str, str], up: tuple[str, bool], down: tuple[str, bool]
) -> None:
    table = WireTable(**wire)  # type: ignore[arg-type]
    assert (table.up, table.down) == (up, down)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("uplink", "int5"),
        ("uplink", "ef"),
        ("uplink", ""),
        ("uplink", "bf16+zstd"),
        ("uplink", "int4+ef+ef"),
        ("uplink", "int8-delta"),
        ("downlink", "int8"),
        ("downlink", "int8+ef"),
        ("downlink", "-delta"),
        ("workers", "int8"),
    ],
)
def test_links_that_there_are_not(field: str, value: str) -> None:
    with pytest.raises(ValidationError, match=r"give one of|give fp32|Input should be"):
        WireTable(**{field: value})  # type: ignore[arg-type]
