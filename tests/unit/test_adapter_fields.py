"""Every field that PEFT writes into an adapter_config.json has a status, and so has each value that matters."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import syntax_trees

from tinsmith_checkpoints.huggingface.adapter_fields import ADAPTER_CONFIG_FIELDS, refusals, unattached

PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"]}
OF_ANOTHER_BASE = {"olora", "pissa", "pissa_niter_[number of iters]", "corda", "loftq"}
FIELDS = ADAPTER_CONFIG_FIELDS.fields


def source_of(module: str) -> ast.Module:
    """Parse a module of the installed PEFT, whose import would take longer than all tests of this file."""
    spec = importlib.util.find_spec("peft")
    assert spec is not None
    assert spec.origin is not None
    return syntax_trees.tree_of(Path(spec.origin).parent / module)


def body_of(module: str, name: str) -> list[ast.stmt]:
    return next(
        each.body for each in ast.walk(source_of(module)) if isinstance(each, ast.ClassDef) and each.name == name
    )


def fields_of(module: str, name: str) -> Iterator[str]:
    for each in body_of(module, name):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id


def constants_of(module: str, name: str) -> set[str]:
    values = (each.value for each in body_of(module, name) if isinstance(each, ast.Assign))
    return {each.value for each in values if isinstance(each, ast.Constant)}


def literals_of(field: str) -> set[object]:
    [annotation] = [
        each.annotation
        for each in body_of("tuners/lora/config.py", "LoraConfig")
        if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == field
    ]
    return {each.value for each in ast.walk(annotation) if isinstance(each, ast.Constant)}


def test_every_field_of_peft_has_a_status_and_no_other_has_one() -> None:
    known = {
        *fields_of("tuners/lora/config.py", "LoraConfig"),
        *fields_of("config.py", "PeftConfig"),
        *fields_of("config.py", "PeftConfigMixin"),
    }
    assert len(known) > 40
    assert FIELDS.keys() == known


def test_what_peft_writes_by_default_is_taken() -> None:
    defaults = {"layers_pattern": None, "rank_pattern": {}, "megatron_core": "megatron.core", "qalora_group_size": 16}
    assert list(refusals({**PLAIN, **defaults, "init_lora_weights": True, "bias": "none", "use_dora": False})) == []


def test_every_way_to_initialise_is_taken_or_needs_another_base_model() -> None:
    known = literals_of("init_lora_weights")
    assert known > OF_ANOTHER_BASE
    for value in known | {True, False}:
        why = list(refusals({**PLAIN, "init_lora_weights": value}))
        assert bool(why) == (value in OF_ANOTHER_BASE), value
        assert not why or f"init_lora_weights is {value!r}: " in why[0]


@pytest.mark.parametrize("value", ["lora_ga", "pissa_niter_4", "PISSA", "OLoRA", "", 1, 0])
def test_a_way_to_initialise_that_no_row_has_is_refused(value: object) -> None:
    assert "init_lora_weights" in next(refusals({**PLAIN, "init_lora_weights": value}))


@pytest.mark.parametrize(
    ("field", "taken"), [("peft_type", {"LORA"}), ("task_type", {"CAUSAL_LM"}), ("bias", {"none"})]
)
def test_every_other_value_of_a_list_is_refused(field: str, taken: set[str]) -> None:
    classes = {"peft_type": "PeftType", "task_type": "TaskType"}
    known = constants_of("utils/peft_types.py", classes[field]) if field in classes else literals_of(field)
    assert len(known) > 2
    assert {value for value in known if not list(refusals({**PLAIN, field: value}))} == taken


@pytest.mark.parametrize("field", sorted(name for name, field in FIELDS.items() if field.status == "only"))
def test_a_field_that_would_change_the_adapter_is_refused_by_name(field: str) -> None:
    for value in (True, 1, "something", ["something"], {"something": 1}):
        if not FIELDS[field].takes(value):
            assert any(why.startswith(f"{field} is {value!r}: ") for why in refusals({**PLAIN, field: value})), value
    assert not FIELDS[field].takes({"something": 1})


@pytest.mark.parametrize("field", sorted(name for name, field in FIELDS.items() if field.status == "no meaning"))
def test_a_field_without_meaning_may_hold_anything(field: str) -> None:
    for value in (None, True, 1, "something", {"something": 1}):
        assert list(refusals({**PLAIN, field: value})) == []


def test_an_unknown_field_is_refused_by_name_unless_it_holds_nothing() -> None:
    assert list(refusals({**PLAIN, "use_newest": False, "newest_config": None})) == []
    [why] = refusals({**PLAIN, "use_newest": True})
    assert why.startswith("use_newest is True: ")


@pytest.mark.parametrize(
    "wrong",
    [
        {"r": True},
        {"r": 0},
        {"lora_alpha": "8"},
        {"lora_alpha": 1e9},
        {"use_rslora": "yes"},
        {"lora_alpha": 1e6, "use_rslora": True},
        {"target_modules": {"q_proj": 1}},
        {"exclude_modules": [1]},
        {"layers_to_transform": ["0"]},
        {"layers_to_transform": True},
        {"rank_pattern": {"q_proj": 2}},
        {"alpha_pattern": {"q_proj": 2}},
        {"alpha_pattern": [1]},
    ],
)
def test_a_malformed_value_is_refused_by_name(wrong: dict[str, Any]) -> None:
    [why] = refusals({**PLAIN, **wrong})
    assert any(name in why for name in wrong)


def test_patterns_that_say_the_same_for_all_modules_are_taken() -> None:
    assert list(refusals({**PLAIN, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 8}})) == []


@pytest.mark.parametrize(
    ("more", "module", "field"),
    [
        ({}, "model.layers.3.self_attn.q_proj", None),
        ({}, "lm_head", None),
        ({}, "model.layers.3.self_attn.k_proj", "target_modules"),
        ({"target_modules": ["proj"]}, "model.layers.3.self_attn.q_proj", "target_modules"),
        ({"target_modules": None}, "model.layers.3.self_attn.k_proj", None),
        ({"target_modules": "all-linear"}, "model.layers.3.self_attn.k_proj", None),
        ({"target_modules": "all-linear"}, "lm_head", "target_modules"),
        ({"target_modules": "(a+)+$"}, f"model.layers.3.{'a' * 60}.q_proj", None),
        ({"exclude_modules": ["layers.3.self_attn.q_proj"]}, "model.layers.3.self_attn.q_proj", "exclude_modules"),
        ({"layers_to_transform": 3}, "model.layers.3.self_attn.q_proj", None),
        ({"layers_to_transform": [0, 1]}, "model.layers.3.self_attn.q_proj", "layers_to_transform"),
        ({"layers_to_transform": [0]}, "lm_head", "layers_to_transform"),
        ({"layers_to_transform": []}, "lm_head", None),
    ],
)
def test_a_module_that_peft_would_leave_out_is_found(more: dict[str, Any], module: str, field: str | None) -> None:
    why = unattached({**PLAIN, **more}, module)
    assert why is None if field is None else str(why).startswith(field)
