"""Who gets which devices and how much of them: on machines that are described here, with backends of a few lines."""

import json
import stat
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

import tinsmith
from tinsmith.backend import AnyBackendSpec, AnySamplerSpec
from tinsmith.commands import cli
from tinsmith.commands.load_settings import load_settings
from tinsmith.errors import ConfigError
from tinsmith.figures import MemoryPlan
from tinsmith.host import host_memory
from tinsmith.placement.machine import Machine, this_machine
from tinsmith.placement.plan import as_told, make_plan, with_placement
from tinsmith.placement.report import lines_of, memory_of
from tinsmith.plugins.loading import Plugins
from tinsmith.processes import serve
from tinsmith.processes.assembly import make_trainer
from tinsmith.processes.engine import run_engine
from tinsmith.processes.engine_child import SUPERVISED
from tinsmith.settings import ModelSettings, PluginSection, Settings
from tinsmith_checkpoints.huggingface import known_config

GIB = 1 << 30
CARD = 100 * GIB  # of which 92 are to be had


class Wants(tinsmith.BackendConfig):
    count: int | None = None  # of devices
    least: int = 0  # GiB of all its devices together, which share it
    asleep: int | None = 2  # GiB of each
    on_host: bool = False


class Faulty(Wants):
    fault: str = "set it right"


class Stranger(tinsmith.BackendConfig):
    devices: str = "own"  # means something of its own
    memory: str = "own"


def demand(config: Wants, model: object, placement: tinsmith.Placement) -> tinsmith.Demand:
    each = config.least * GIB // max(1, len(placement.devices))
    asleep = None if config.asleep is None else config.asleep * GIB
    return tinsmith.Demand(
        num_devices=config.count,
        on_host=config.on_host and not placement.devices,
        least_bytes=each,
        asleep_bytes=asleep,
        fixed={"weights": each},
    )


def demand_as_told(config: Wants, model: object, placement: tinsmith.Placement) -> tinsmith.Demand:
    return tinsmith.Demand(layout="samples as well" if placement.samples else "only trains")


def demand_nothing(config: Faulty, model: object, placement: tinsmith.Placement) -> tinsmith.Demand:
    raise ConfigError(config.fault)


def refuse(config: object, context: tinsmith.BackendContext) -> tinsmith.TrainingBackend:
    raise Made(config, context)


class Made(Exception):  # noqa: N818
    def __init__(self, config: object, context: tinsmith.BackendContext) -> None:
        self.config, self.context = config, context


class Offers:
    @tinsmith.hookimpl
    def tinsmith_register_backends(self) -> list[AnyBackendSpec]:
        return [
            tinsmith.BackendSpec(name="learns", config=Wants, create=refuse, demand=demand, needs_model_path=False),
            tinsmith.BackendSpec(
                name="faulty", config=Faulty, create=refuse, demand=demand_nothing, needs_model_path=False
            ),
            tinsmith.BackendSpec(
                name="asks", config=Wants, create=refuse, demand=demand_as_told, needs_model_path=False
            ),
            tinsmith.BackendSpec(name="stranger", config=Stranger, create=refuse, needs_model_path=False),
        ]

    @tinsmith.hookimpl
    def tinsmith_register_samplers(self) -> AnySamplerSpec:
        return tinsmith.SamplerSpec(name="draws", config=Wants, create=refuse, demand=demand)  # type: ignore[arg-type]


PLUGINS = Plugins.load(extra=[Offers()])
ROOT = Path(__file__).parents[2]


def a_model(backend: object = None, sampler: object = None, name: str = "m", *, turns: bool = False) -> ModelSettings:
    sections = {"turns": {"enabled": turns}, "backend": {"plugin": "learns", **(backend or {})}}  # type: ignore[dict-item]
    if sampler is not None:
        sections["sampler"] = {"plugin": "draws", **sampler}  # type: ignore[dict-item]
    return ModelSettings.model_validate({"name": name, **sections})


def cards(number: int, size: int | None = CARD) -> Machine:
    return Machine(devices=tuple(map(str, range(number))), device_bytes=size)


def placed(machine: Machine, *models: ModelSettings) -> list[tuple[str, int | None]]:
    """Return the devices of each component, and GiB of each."""
    settings = Settings(models=models)
    plan = make_plan(settings, PLUGINS, machine, [model.name for model in models])
    return [
        (",".join(p.placement.devices), p.placement.memory_bytes and p.placement.memory_bytes // GIB)
        for p in plan  # of all that there is
    ]


def test_what_starts_with_no_setting_on_one_card_and_on_eight() -> None:
    pair = a_model({"least": 20}, {"least": 10})
    assert placed(cards(1), pair) == [("0", 20 + 31), ("0", 10 + 31)]  # the rest of 92 is halved
    assert placed(cards(2), pair) == [("0", 92), ("1", 92)]
    assert placed(cards(8), pair) == [("0,1,2,3", 92), ("4,5,6,7", 92)]
    assert placed(cards(3), pair) == [("0,1", 92), ("2", 92)]
    assert placed(cards(8), a_model({"least": 20})) == [("0,1,2,3,4,5,6,7", 92)]


def planned_memory(machine: Machine, *models: ModelSettings, of: str = "m") -> MemoryPlan | None:
    """Return what the engine of a model tells, once the plan of all models is written into their sections."""
    settings = Settings(models=models)
    plan = make_plan(settings, PLUGINS, machine, [model.name for model in models])
    return memory_of(as_told(with_placement(settings, plan), PLUGINS, of))


def test_an_engine_tells_what_the_plan_gave_it_on_all_of_its_devices() -> None:
    pair = a_model({"least": 20}, {"least": 10})
    both = (("trainer: weights", 20 * GIB), ("sampler: weights", 10 * GIB))
    assert planned_memory(cards(3), pair) == MemoryPlan(both, 30 * GIB, 3 * 92 * GIB, ("0", "1", "2"))
    assert planned_memory(cards(1), pair) == MemoryPlan(both, 30 * GIB, 92 * GIB, ("0",))
    alone = a_model({"least": 20, "devices": ["1"], "memory": "30GiB"})
    assert planned_memory(cards(2), alone) == MemoryPlan((("weights", 20 * GIB),), 20 * GIB, 30 * GIB, ("1",))
    assert planned_memory(cards(2), alone, a_model(name="other"), of="m") == planned_memory(cards(2), alone)


def test_what_takes_turns_is_not_planned_twice() -> None:
    """In turn, each may take all but what the other one keeps."""
    plan = planned_memory(cards(2), a_model({"least": 60}, {"least": 50, "asleep": 3}, turns=True))
    assert plan is not None
    assert [size // GIB for _, size in plan.parts] == [60, 50]
    assert (plan.total, plan.limit) == (60 * GIB, 2 * (92 - 2) * GIB)


def test_nothing_is_planned_of_what_was_told_nothing() -> None:
    settings = Settings(models=(a_model({"least": 20}), a_model({"plugin": "stranger"}, name="s")))
    assert [memory_of(as_told(settings, PLUGINS, name)) for name in ("m", "s")] == [None, None]


@pytest.mark.parametrize(("sampler", "told"), [(None, "samples as well"), ({}, "only trains")])
def test_a_trainer_is_told_whether_it_samples(sampler: object, told: str) -> None:
    settings = Settings(models=(a_model({"plugin": "asks"}, sampler),))
    plan = make_plan(settings, PLUGINS, cards(1), ["m"])
    assert plan[0].demand.layout == told
    with pytest.raises(Made) as made:
        make_trainer(settings.models[0], PLUGINS, settings.data_dir, lambda *_: None, samples=sampler is None)
    assert made.value.context.placement.samples is (sampler is None)


def test_settings_choose_to_split_or_to_share() -> None:
    assert placed(cards(8), a_model({}, {"count": 2})) == [("0,1,2,3,4,5", 92), ("6,7", 92)]
    assert placed(cards(8), a_model({"devices": 8}, {"devices": 8})) == [("0,1,2,3,4,5,6,7", 46)] * 2
    assert placed(cards(4), a_model({"devices": ["3"]}, {"devices": ["0", "1"]})) == [("3", 92), ("0,1", 92)]
    assert placed(cards(4), a_model({"devices": [0, 1]}, {})) == [("0,1", 92), ("2,3", 92)]
    assert placed(cards(2), a_model({"devices": ["1"], "memory": "70GiB"}, {"devices": ["1"]})) == [
        ("1", 70),
        ("1", 22),
    ]


def test_two_models_get_devices_of_their_own_if_there_are_enough() -> None:
    models = a_model({}, {}, name="a"), a_model({}, {}, name="b")
    assert placed(cards(4), *models) == [("0", 92), ("1", 92), ("2", 92), ("3", 92)]
    assert placed(cards(1), *models) == [("0", 23)] * 4


def test_who_takes_turns_has_all_but_what_the_other_one_keeps() -> None:
    """The same devices for both, however many there are, and the maximum of their demands instead of the sum."""
    pair = a_model({"least": 60}, {"least": 50, "asleep": 3}, turns=True)
    assert placed(cards(1), pair) == [("0", 92 - 3), ("0", 92 - 2)]
    assert placed(cards(2), pair) == [("0,1", 92 - 3), ("0,1", 92 - 2)]
    assert placed(cards(4), a_model({"devices": ["2"]}, {}, turns=True)) == [("2", 90), ("2", 90)]
    assert placed(cards(4), a_model({}, {"count": 3}, turns=True)) == [("0,1,2", 90), ("0,1,2", 90)]
    other = a_model({"least": 10}, name="other")
    assert placed(cards(1), a_model({"least": 40}, {"least": 50}, turns=True), other) == [
        ("0", 52 + 15 - 2),  # 52 is what the sampler must have beside a trainer that sleeps; 30 are left for two
        ("0", 52 + 15 - 2),
        ("0", 10 + 15),
    ]
    by_hand = a_model({"memory": "70GiB"}, {"least": 80}, turns=True)
    assert placed(cards(1), by_hand) == [("0", 70), ("0", 90)]


@pytest.mark.parametrize(
    ("backend", "sampler", "told"),
    [
        (
            {"devices": ["0"]},
            {"devices": ["1"]},
            "turns are for devices that both use, but backend learns of 'm' asks for devices 0 and sampler draws of "
            "'m' asks for devices 1; give both the same `devices`, or disable the turns",
        ),
        ({"count": 1}, {"count": 2}, "backend learns of 'm' asks for 1 and sampler draws of 'm' asks for 2"),
        ({"count": 0}, {}, "backend learns of 'm' asks for none of this machine and sampler draws of 'm' asks for any"),
        ({}, {"asleep": None}, "sampler draws of 'm' cannot sleep, but turns of the model are enabled"),
        (
            {"least": 91, "devices": 1},
            {"devices": 1},
            "needs at least 93.0 GiB: backend learns of 'm' by turns with sampler draws of 'm' 93.0 GiB",
        ),
        ({"memory": "91GiB"}, {"devices": 1}, "needs at least 93.0 GiB"),
    ],
)
def test_turns_that_cannot_work_are_refused(backend: object, sampler: object, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        placed(cards(2), a_model(backend, sampler, turns=True))
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("number", "backend", "sampler", "told"),
    [
        (
            1,
            {"least": 60},
            {"least": 50},
            "device 0 has 92.0 GiB to give, and what is to run on it needs at least 110.0 GiB: backend learns of 'm' "
            "60.0 GiB and sampler draws of 'm' 50.0 GiB; 2 such devices would do",
        ),
        (1, {"least": 300}, None, "needs at least 300.0 GiB: backend learns of 'm' 300.0 GiB; 4 such devices would do"),
        (2, {"least": 300, "count": 1}, None, "no number of such devices would do with these settings"),
        (2, {"devices": ["0"], "least": 99}, {}, "let fewer share a device, or leave out `devices`"),
        (
            8,
            {"memory": "1GiB", "least": 16},
            None,
            "of 'm': memory is 1.0 GiB; it needs at least 2.0 GiB of each device",
        ),
        (2, {"devices": 3}, None, "backend learns of 'm' asks for 3 devices; this machine has 0, 1"),
        (2, {"devices": ["2"]}, None, "backend learns of 'm' asks for devices 2; this machine has 0, 1"),
        (2, {"count": 4}, None, "asks for 4 devices; this machine has 0, 1"),
        (2, {"devices": 2, "count": 1}, None, "devices gives it 2, its other settings ask for 1"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would_fit(
    number: int, backend: object, sampler: object, told: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        placed(cards(number), a_model(backend, sampler))
    assert told in str(refused.value)


def test_a_card_on_which_both_fit_in_turn_is_not_said_to_be_too_small() -> None:
    told = r"2 such devices would do, or these by turns \(`turns: \{enabled: true\}` of the model\)"
    with pytest.raises(ConfigError, match=told):
        placed(cards(1), a_model({"least": 60}, {"least": 50}))
    for fits_neither_way in ({"least": 91}, {"least": 60, "asleep": None}):
        with pytest.raises(ConfigError, match=r"would do$"):
            placed(cards(1), a_model(fits_neither_way, {"least": 50}))


def test_memory_that_nobody_knows_is_divided_by_hand() -> None:
    assert placed(cards(2, None), a_model({}, {})) == [("0", None), ("1", None)]
    with pytest.raises(ConfigError, match="share device 0, whose memory is not known: set `memory` for each"):
        placed(cards(1, None), a_model({}, {}))
    assert placed(cards(1, None), a_model({"memory": 5 * GIB}, {"memory": "6GiB"})) == [("0", 5), ("0", 6)]


def test_without_a_gpu_only_what_is_set_is_assigned() -> None:
    assert placed(Machine(), a_model({"least": 3}, {})) == []
    assert placed(Machine(), a_model({"least": 3, "memory": "4GiB"}, {})) == [("", 4), ("", None)]
    with pytest.raises(ConfigError, match="this machine has none"):
        placed(Machine(), a_model({"devices": 1}))
    with pytest.raises(ConfigError, match=r"memory is 4.0 GiB; it needs at least 5.0 GiB"):
        placed(Machine(), a_model({"least": 5, "memory": "4GiB"}))


def host(size: int) -> Machine:
    return Machine(host_bytes=size * GIB)


ELSEWHERE = Machine(devices=("0", "1"), device_bytes=CARD, others_alike=True)


def test_devices_elsewhere_are_given_whole_and_not_more() -> None:
    """What a component needs was added to the whole of a card: 122 of 92 GiB."""
    assert placed(ELSEWHERE, a_model({"count": 0, "least": 30}, {})) == [("", 92), ("0,1", 92)]
    both = a_model({"count": 0, "least": 30}, {"count": 0}, turns=True)
    assert placed(ELSEWHERE, both) == [("", 90), ("", 90)], "each keeps 2 GiB in its sleep"
    with pytest.raises(ConfigError, match=r"a device elsewhere for backend learns of 'm' has 92\.0 GiB to give"):
        placed(ELSEWHERE, a_model({"count": 0, "memory": "93GiB"}))


_SECTION = st.fixed_dictionaries(
    {"least": st.integers(0, 60), "count": st.sampled_from([None, 0, 0, 1, 2]), "on_host": st.booleans()},
    optional={"memory": st.integers(1, 110).map(lambda size: f"{size}GiB"), "asleep": st.none() | st.integers(0, 9)},
)
_MODEL = st.builds(a_model, _SECTION, st.none() | _SECTION, st.sampled_from("abc")) | st.builds(
    a_model, _SECTION, _SECTION, st.sampled_from("abc"), turns=st.just(True)
)
_MACHINE = st.builds(
    lambda devices, size, alike, host: replace(cards(devices, size), others_alike=alike, host_bytes=host),
    st.integers(0, 4),
    st.sampled_from([CARD, CARD, None]),
    st.booleans(),
    st.sampled_from([CARD, None]),
)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(_MACHINE, st.lists(_MODEL, min_size=1, max_size=3, unique_by=lambda model: model.name))
def test_nobody_is_given_more_than_there_is(machine: Machine, models: list[ModelSettings]) -> None:
    """No component of a plan has more than its device, and the components on a device have no more than it together."""
    try:
        plan = make_plan(Settings(models=tuple(models)), PLUGINS, machine, [model.name for model in models])
    except ConfigError:
        hypothesis.reject()
    taken: dict[str, dict[object, int]] = {}
    for each in plan:
        size, component = each.placement.memory_bytes, each.component
        if each.is_elsewhere and machine.others_alike and machine.usable_bytes:
            assert size is not None
            assert each.demand.least_bytes <= size <= machine.usable_bytes
        for device in each.placement.devices or (("host",) if each.on_host else ()):
            users = taken.setdefault(device, {})
            user = component.index if component.by_turns else (component.index, component.role)
            users[user] = max(users.get(user, 0), size or 0)
    for device, users in taken.items():
        has = machine.usable_host_bytes if device == "host" else machine.usable_bytes
        assert has is None or sum(users.values()) <= has, (device, users)


def test_a_sampler_on_devices_that_workers_may_have_is_warned_of() -> None:
    def warnings(backend: object, sampler: object) -> list[str]:
        settings = Settings(models=(a_model(backend, sampler),))
        return [line for line in lines_of(make_plan(settings, PLUGINS, ELSEWHERE, ["m"])) if "warning" in line]

    memory = {"memory": "40GiB"}
    told = (
        "warning: the launcher of backend learns of 'm' chooses its devices; if they are of this machine, sampler "
        "draws of 'm' takes memory of the same: set `memory` for all of them"
    )
    assert warnings({"count": 0}, {}) == warnings({"count": 0, **memory}, {}) == [told]
    assert warnings({"count": 0, **memory}, memory) == warnings({}, {}) == warnings({"count": 0}, None) == []


def test_what_computes_on_the_cpu_divides_the_machines_memory() -> None:
    learns, draws = {"least": 20, "on_host": True}, {"least": 10, "on_host": True}
    assert placed(host(100), a_model(learns)) == [("", 92)]
    assert placed(host(100), a_model(learns, draws)) == [("", 20 + 31), ("", 10 + 31)]
    assert placed(host(100), a_model(learns, draws, turns=True)) == [("", 90), ("", 90)]
    assert placed(host(100), a_model({**learns, "memory": "50GiB"}, draws)) == [("", 50), ("", 42)]
    assert placed(host(100), a_model(learns, {"least": 10})) == [("", 92)], "the other one says nothing of a CPU"
    assert placed(cards(1), a_model(learns)) == [("0", 92)], "a card is better"
    assert placed(Machine(), a_model(learns)) == [], "nothing is known"
    settings = Settings(models=(a_model(learns, draws), a_model(learns, name="other")))
    once = with_placement(settings, make_plan(settings, PLUGINS, host(100), ["m", "other"]))
    for model in ("m", "other"):
        assert with_placement(once, make_plan(once, PLUGINS, host(100), [model])) == once, "as the engine does"


def test_a_machine_with_too_little_memory_is_told_so_with_figures() -> None:
    told = (
        r"this machine, or its container, has 25\.0 GiB of memory and 23\.0 GiB to give, and what is to run on "
        r"it needs at least 30\.0 GiB: backend learns of 'm' 20\.0 GiB and sampler draws of 'm' 10\.0 GiB; give it"
    )
    with pytest.raises(ConfigError, match=told):
        placed(host(25), a_model({"least": 20, "on_host": True}, {"least": 10, "on_host": True}))


def test_the_engine_finds_its_devices_in_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(models=(a_model({"least": 7}, {}),))
    plan = make_plan(settings, PLUGINS, cards(2), ["m"])
    assert next(lines_of(plan)) == "backend learns of 'm': devices 0, 92.0 GiB of each"
    (model,) = with_placement(settings, plan).models
    again = Settings.model_validate_json(Settings(models=(model,)).model_dump_json()).models[0]
    assert again == model
    monkeypatch.setattr("tinsmith.processes.assembly.this_machine", lambda: cards(2))
    with pytest.raises(Made) as made:
        make_trainer(again, PLUGINS, settings.data_dir.at(tmp_path), lambda *_: None, samples=False)
    given = made.value.context.placement
    assert given == tinsmith.Placement(devices=("0",), memory_bytes=92 * GIB, device_bytes=CARD, samples=False)
    assert given.share == 0.92
    assert made.value.config == Wants(least=7)


def test_a_backend_that_knows_nothing_of_it_keeps_its_own_settings(tmp_path: Path) -> None:
    options = {"plugin": "stranger", "devices": "mine", "memory": "too"}
    model = ModelSettings(name="m", backend=PluginSection.model_validate(options))
    settings = Settings(models=(model,))
    assert make_plan(settings, PLUGINS, cards(1), ["m"]) == []
    with pytest.raises(Made) as made:
        make_trainer(model, PLUGINS, settings.data_dir.at(tmp_path), lambda *_: None, samples=False)
    assert made.value.config == Stranger(devices="mine", memory="too")
    assert made.value.context.placement == tinsmith.Placement(samples=False)


def test_an_engine_that_cannot_work_as_configured_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It stopped the server, though on a machine without GPUs the engine alone failed."""
    broken = tmp_path / "config.json"
    broken.write_text("{")
    files = ModelSettings.model_validate({"name": "files", "path": tmp_path, "backend": {"plugin": "learns"}})
    faulty, sound = a_model({"plugin": "faulty"}, name="faulty"), a_model({"least": 7}, name="sound")
    settings = Settings(models=(faulty, sound, files))
    monkeypatch.setattr("tinsmith.processes.serve.this_machine", lambda: cards(2))
    monkeypatch.setattr("tinsmith.processes.engine.this_machine", lambda: cards(2))
    placed_settings = serve.assign_devices(settings, PLUGINS)
    assert placed_settings.models[1].backend.options()["devices"] == ["0", "1"]  # type: ignore[union-attr]
    assert placed_settings.models[0] == faulty
    assert "not placed: backend faulty of 'faulty': set it right" in caplog.text
    assert f"not placed: '{broken}' cannot be read" in caplog.text
    monkeypatch.setenv(SUPERVISED, "")
    with pytest.raises(ConfigError, match="backend faulty of 'faulty': set it right"):
        run_engine(placed_settings, "faulty", PLUGINS)


def test_what_the_server_has_placed_an_engine_places_alike() -> None:
    settings = Settings(models=(a_model({"least": 20}, {"least": 10}), a_model({}, {"count": 1}, name="other")))
    turns = a_model({"least": 20}, {"least": 10}, name="turns", turns=True)
    settings = settings.model_copy(update={"models": (*settings.models, turns)})
    for machine in (cards(1), cards(2), cards(8)):
        plan = make_plan(settings, PLUGINS, machine, ["m", "other", "turns"])
        once = with_placement(settings, plan)
        for model in ("m", "other", "turns"):
            assert with_placement(once, make_plan(once, PLUGINS, machine, [model])) == once


def test_a_mistake_in_a_section_is_told_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "tinsmith.yaml"
    file.write_text("models:\n- name: m\n  backend: {plugin: learns, devices: [], memory: much, least: 1}\n")
    with pytest.raises(ConfigError) as refused:
        load_settings(PLUGINS, file=file, environ={}, flags=())
    for key in ("devices", "memory"):
        assert f"{file}:3: models.0.backend.{key}" in str(refused.value)
    assert "2 problems" in str(refused.value)


def test_the_machine_is_what_cuda_will_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\nprintf '81559\\n81559\\n'\n")
    driver.chmod(driver.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr("tinsmith.placement.machine.host_memory", lambda: 7)
    assert this_machine({}, tmp_path) == Machine(devices=("0", "1"), device_bytes=81559 << 20, host_bytes=7)
    assert this_machine({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path).devices == ("1",)
    assert this_machine({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == Machine(host_bytes=7)
    assert this_machine({"CUDA_VISIBLE_DEVICES": "MIG-1"}, tmp_path).device_bytes is None
    driver.write_text("#!/bin/sh\nexit 9\n")
    assert this_machine({}, tmp_path).device_bytes is None


# tinsmith plan


def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *typed: str) -> tuple[int, str]:
    """Run the command with the backends above. Return its exit code and all that it prints."""
    monkeypatch.setattr(cli.Plugins, "load", lambda: PLUGINS)
    monkeypatch.setattr(sys, "argv", ["tinsmith", "plan", *typed])
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    with pytest.raises(SystemExit) as exited:
        cli.app()
    out, err = capsys.readouterr()
    return int(exited.value.code or 0), out + err


COMMON = ("--backend", "learns", "--sampler", "draws", "--memory", "100GiB")


def test_a_well_known_model_needs_no_files(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = plan(monkeypatch, capsys, "Qwen3-8B", *COMMON, "--cards", "2", "--models.0.backend.least", "30")
    assert code == 0, out
    assert "2 devices of 100.0 GiB" in out
    assert "backend learns of 'Qwen3-8B': devices 0, 92.0 GiB of each" in out
    assert [line.split() for line in out.splitlines() if line.startswith("  ")][:2] == [
        ["weights", "30.0", "GiB"],
        ["left", "62.0", "GiB"],
    ]


def test_a_plan_tells_of_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed = "--cards", "1", "--models.0.turns.enabled", "true", "--models.0.backend.least", "80"
    code, out = plan(monkeypatch, capsys, "Qwen3-8B", *COMMON, *typed)
    assert code == 0, out
    assert "backend learns of 'Qwen3-8B': devices 0, 90.0 GiB of each in its turn, 2.0 GiB asleep" in out
    assert "sampler draws of 'Qwen3-8B': devices 0, 90.0 GiB of each in its turn, 2.0 GiB asleep" in out


def test_a_directory_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(known_config("Qwen3-4B")))
    code, out = plan(monkeypatch, capsys, str(tmp_path), *COMMON, "--cards", "1")
    assert code == 0, out
    assert f"sampler draws of '{tmp_path}': devices 0, 46.0 GiB of each" in out


def test_a_plan_for_a_cpu_tells_of_the_machines_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It was empty, and the exit code 0. The container's limit counts, which is far below the machine's memory."""
    limit = tmp_path / "cgroup" / "pod" / "memory.max"
    limit.parent.mkdir(parents=True)
    limit.write_text(f"{1 << 30}\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/pod/server\n")
    limited = partial(host_memory, tmp_path, tmp_path / "cgroup")
    monkeypatch.setattr("tinsmith.placement.machine.host_memory", limited)
    typed = "Qwen3-8B", "--backend", "learns", "--models.0.backend.on_host", "true"
    code, out = plan(monkeypatch, capsys, *typed, "--memory", "50GiB", "--models.0.backend.least", "30")
    assert code == 0, out
    assert "no GPU, 50.0 GiB of memory, models in training: 1" in out
    assert "backend learns of 'Qwen3-8B': the CPU, 46.0 GiB of memory" in out
    assert [line.split() for line in out.splitlines() if line.startswith("  ")] == [
        ["weights", "30.0", "GiB"],
        ["left", "16.0", "GiB"],
    ]
    code, out = plan(monkeypatch, capsys, *typed, "--models.0.backend.least", "30")
    assert code == 2
    assert "has 1.0 GiB of memory and 0.9 GiB to give" in " ".join(out.split())


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (("Qwen3-8B", *COMMON[:2], "--cards", "0"), "report no demand on a CPU; for a machine with GPUs"),
        (
            ("nobody/knows-it", *COMMON, "--cards", "1"),
            "'nobody/knows-it' is not on this machine and is not a well-known",
        ),
        (("Qwen3-8B", *COMMON[:4], "--cards", "1", "--memory", "much"), "--memory: 'much' is not a size"),
        (("--cards", "1", "--memory", "9GiB"), "no model to plan for"),
        (("Qwen3-8B", *COMMON, "--cards", "1", "--models.0.backend.least", "150"), "4 such devices would do"),
    ],
)
def test_what_cannot_be_planned_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: tuple[str, ...], told: str
) -> None:
    code, out = plan(monkeypatch, capsys, *typed)
    assert code == 2
    assert told in " ".join(out.split())


def test_the_page_shows_the_configurations_that_are_planned() -> None:
    page = (ROOT / "docs" / "how-to" / "use-several-gpus.md").read_text()
    shown = [yaml.safe_load(block.partition("```")[0]) for block in page.split("```yaml\n")[1:]]
    for file in sorted((ROOT / "deploy" / "gpus").glob("*.yaml")):
        assert yaml.safe_load(file.read_text()) in shown, file.name
