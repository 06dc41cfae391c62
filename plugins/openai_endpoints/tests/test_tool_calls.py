"""What models say, in the form of each family: read whole, and in pieces cut anywhere."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_forms import NAME, TOOLS, WRITTEN, Arguments, form_named

from tinsmith_checkpoints.huggingface import Json
from tinsmith_openai.tool_calls import FORMS, Form, Marks, Reading, Said, ToolCall, form_of, reasoning_of
from tinsmith_openai.tool_calls.arguments import converted, types_of
from tinsmith_openai.tool_calls.python_literals import python_value

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False).filter(lambda number: not number.is_integer())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=4,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": WORDS,
        "count": st.integers(),
        "share": NUMBERS,
        "exact": st.booleans() | st.none(),
        "options": st.dictionaries(WORDS, VALUES, max_size=2),
        "names": st.lists(VALUES, max_size=2) | st.none(),
    },
)


def reading(form: Form | None, *, reasoning: Marks | None = None, in_reasoning: bool = False) -> Reading:
    return Reading(
        form=form,
        reasoning=reasoning,
        in_reasoning=in_reasoning,
        tools=TOOLS,
        make_id=lambda choice, call: f"call_{choice}_{call}",
    )


def read_at_every_cut(how: Reading, text: str) -> Said:
    """Return what was said, and check that it is the same in two pieces and one character at a time."""
    whole = how.read(0, text)
    for at in range(len(text)):
        reader = how.reader(0)
        begun = reader.add(text[:at])
        told = Said()
        for event in [*begun, *reader.add(text[at:]), *reader.end()]:
            told.add(event)
        assert told == reader.said == whole, (text[:at], text[at:])
    reader = how.reader(0)
    for character in text:
        reader.add(character)
    reader.end()
    assert reader.said == whole
    return whole


def calls_of(said: Said) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in said.calls]


@pytest.mark.parametrize("case", WRITTEN)
@settings(max_examples=3, deadline=None, derandomize=True, database=None)
@given(arguments=st.lists(ARGUMENTS, min_size=1, max_size=2))
def test_calls_are_read_as_they_are_written(case: str, arguments: list[Arguments]) -> None:
    family, write = WRITTEN[case]
    text = write(arguments)
    said = read_at_every_cut(reading(form_named(family)), text)
    assert calls_of(said) == [(NAME, each) for each in arguments], text
    assert (said.content, said.reasoning) == ("", "")
    assert all(call.has_object for call in said.calls)


def test_every_form_is_written_somewhere_and_found_by_what_templates_show() -> None:
    assert {family for family, _ in WRITTEN.values()} == {form.name for form in FORMS}
    for form in FORMS:
        for mark in form.shown:
            found = form_of(f"{{% for tool in tools %}}{{{{ tool | tojson }}}}{{% endfor %}} write {mark} like this")
            assert found is form, mark
    assert form_of("{{ tools }}") is None


EXAMPLE: Final[Arguments] = {"text": "a <b> é", "count": 3}


def written(case: str, *arguments: Arguments) -> tuple[Form, str]:
    family, write = WRITTEN[case]
    return form_named(family), write(list(arguments or (EXAMPLE,)))


THINK: Final = ("<think>", "</think>")
MARKED: Final = [case for case in WRITTEN if "Llama" not in case and "gpt-oss" not in case] + ["Llama, marked"]


@pytest.mark.parametrize("case", MARKED)
def test_text_around_calls_and_a_mention_of_their_mark_stay(case: str) -> None:
    form, call = written(case)
    mark = next(mark for mark in form.calls if call.startswith(mark))
    said = read_at_every_cut(reading(form), f"I could use {mark} here.\n\n{call}\n")
    assert calls_of(said) == [(NAME, EXAMPLE)]
    assert said.content == f"I could use {mark} here."


@pytest.mark.parametrize("case", [case for case in WRITTEN if "gpt-oss" not in case])
@pytest.mark.parametrize("in_reasoning", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_call_that_is_only_thought_of_is_none(case: str, in_reasoning: bool, known: bool) -> None:
    """`known`: the model's template has reasoning. Otherwise it stays where it is, and no call either."""
    form, call = written(case)
    begin = "" if in_reasoning else "<think>"
    how = reading(form, reasoning=THINK if known else None, in_reasoning=in_reasoning)
    thought = f"{begin}\nShould I? {call} Yes.\n</think>\n\n"
    said = read_at_every_cut(how, f"{thought}{call}")
    assert calls_of(said) == [(NAME, EXAMPLE)], "the one outside"
    assert said.reasoning == (f"Should I? {call} Yes." if known else "")
    assert said.content == ("" if known else thought.rstrip())
    assert not how.read(0, f"{begin}\nShould I? {call}").calls, "the end of the answer before the end of the thought"


def test_the_channels_of_gpt_oss_are_reasoning_and_text() -> None:
    form, call = written("gpt-oss")
    thought = f"<|channel|>analysis<|message|>Call functions.{NAME}?<|end|>"
    preamble = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    said = read_at_every_cut(reading(form), f"{thought}{preamble}{call}")
    assert (said.reasoning, said.content, calls_of(said)) == (
        f"Call functions.{NAME}?",
        "I look.",
        [(NAME, EXAMPLE)],
    )
    said = read_at_every_cut(
        reading(form), f"{thought}<|start|>assistant<|channel|>final<|message|>It is <b>.<|return|>"
    )
    assert (said.reasoning, said.content, said.calls) == (f"Call functions.{NAME}?", "It is <b>.", [])


@pytest.mark.parametrize("case", WRITTEN)
def test_a_call_that_breaks_off_is_not_complete(case: str) -> None:
    """Whatever was cut off: nobody can take the arguments for an object, unless they had all come."""
    form, call = written(case)
    for at in range(len(call)):
        for found in reading(form).read(0, call[:at]).calls:
            assert not found.has_object or json.loads(found.arguments) == EXAMPLE, call[:at]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("Hermes", '<tool_call>{"name": </tool_call>'),
        ("Hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("Hermes", "<tool_call>look_up</tool_call>"),
        ("Hermes", '{"name": "look_up", "arguments": {}}'),
        ("Hermes", " a\n"),
        ("Llama", '{"name": "other", "parameters": {}}'),
        ("Llama", '{"a": 1}'),
        ("Llama", 'So: {"name": "look_up", "parameters": {}}'),
        ("Llama, Python", "[other(a=1)]"),
        ("Llama, Python", "[look_up](https://example.org)"),
        ("Command R", 'Action: ```json\n[{"tool_name": "directly_answer", "parameters": {}}]\n```'),
        ("GLM", "<tool_call>other</tool_call>"),
        ("Qwen3-Coder", "Write <function=look_up> to look up."),
        ("Mistral", "[TOOL_CALLS] is a mark"),
        ("Phi, functools", "import functools\nfunctools.cache"),
    ],
)
def test_what_cannot_be_read_as_a_call_stays_text(case: str, text: str) -> None:
    form, _ = written(case)
    said = read_at_every_cut(reading(form), text)
    assert (said.content, said.calls) == (text, [])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"arguments": {"a": 1.0},  "name": "f"}', '{"a": 1.0}'),
        ('{"name": "f", "arguments": {"a":1.0}}', '{"a":1.0}'),  # as the model has written them
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": "}]"}, "id": "x"}', '{"a": "}]"}'),
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),  # a bracket is forgotten
        ('{"type": "function", "name": "f", "parameters": {}}', "{}"),
    ],
)
def test_json_may_be_written_in_several_ways(text: str, arguments: str) -> None:
    (call,) = read_at_every_cut(reading(form_named("Hermes")), f"<tool_call>{text}</tool_call>").calls
    assert call == ToolCall(name="f", arguments=arguments, id="call_0_0")


def test_the_ids_of_calls_are_the_models_own_where_it_writes_some() -> None:
    ids = {}
    for case in WRITTEN:
        form, text = written(case)
        (call,) = reading(form).read(0, text).calls
        ids[case] = call.id
    assert {case: found for case, found in ids.items() if found != "call_0_0"} == {
        "Kimi-K2": f"functions.{NAME}:0",
        "Mistral, with ids": "abcdefghi",
    }


def test_nesting_and_half_characters_are_no_errors() -> None:
    deep_list = "[" * 100_000
    text = f'<tool_call>{{"arguments": {{"a": {deep_list}{"]" * 100_000}}}, "name": "f"}}</tool_call>'
    assert reading(form_named("Hermes")).read(0, text).content == text
    (call,) = reading(form_named("Hermes")).read(0, f'<tool_call>{{"name": "f", "arguments": {deep_list}').calls or [
        None
    ]
    assert call is None
    (call,) = reading(form_named("Hermes")).read(0, r'<tool_call>{"name": "\ud800", "arguments": {}}').calls
    assert call.name.encode()
    assert python_value(deep_list) is None


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "null"}]}]}, {"string", "null"}),
        ({"$ref": "#/$defs/mode"}, {"string"}),
        ({"const": "a"}, {"string"}),
        ({"enum": [1, 2]}, set()),
        ({"$ref": "#/$defs/absent"}, set()),
        ({"$ref": "#/$defs/itself"}, set()),
        ({"description": "anything"}, set()),
        (None, set()),
    ],
)
def test_a_schema_says_which_types_it_allows(schema: Json, types: set[str]) -> None:
    itself: Json = {"anyOf": [{"$ref": "#/$defs/itself"}] * 3 + [{"type": "integer"}]}
    whole: dict[str, Json] = {"$defs": {"mode": {"enum": ["fast", "slow"]}, "itself": itself}}
    assert types_of(schema, whole) == types


@pytest.mark.parametrize("begins", ["{", '{"a', "", "<|tool_call_begin|>", "f<arg_key>"])
@pytest.mark.parametrize("case", ["Hermes", "Kimi-K2", "DeepSeek V3", "GLM", "Qwen3-Coder", "Mistral", "Llama, marked"])
def test_marks_without_calls_are_read_only_so_often(case: str, begins: str) -> None:
    """Many of them took the square of their number: minutes, for an answer that repeats one."""
    form, _ = written(case)
    text = (next(iter(form.calls)) + begins) * 4000
    said = reading(form).read(0, text)
    assert said.content == text or 0 < len(said.calls) < 4000


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"integer"}, 5),
        ("5.0", {"integer"}, 5),
        ("5.5", {"integer"}, "5.5"),
        ("5", {"number"}, 5),
        ("1e3", {"number"}, 1000.0),
        ("1e999", {"number"}, "1e999"),
        ("NaN", {"number"}, "NaN"),
        ("many", {"integer", "null"}, "many"),
        ("null", {"integer", "null"}, None),
        ("null", {"integer"}, "null"),
        ("True", {"boolean"}, True),
        ("yes", {"boolean"}, "yes"),
        ("[1, 2]", {"array"}, [1, 2]),
        ("['a', True]", {"array"}, ["a", True]),
        ("{'a': (1, None)}", {"object"}, {"a": [1, None]}),
        ("[1, 2]", {"object"}, "[1, 2]"),
        ("5", {"string"}, "5"),
        ("null", {"string"}, "null"),
        ("5", {"string", "integer"}, 5),
        (" x ", {"string", "integer"}, " x "),
        ("{", set(), "{"),
        ('{"a": 1}', set(), {"a": 1}),
        ("null", set(), None),
        ("Infinity", set(), "Infinity"),
    ],
)
def test_arguments_become_what_the_schema_says(text: str, types: set[str], value: Json) -> None:
    found = converted(text, frozenset(types))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("mark", ["<think>", "<seed:think>", "[THINK]", "<|START_THINKING|>"])
def test_reasoning_is_found_by_what_templates_show(mark: str) -> None:
    end = re.sub(r"^(\W+)(?:START)?", lambda found: found[1] + ("END" if "START" in mark else "/"), mark)
    assert reasoning_of(f"{{{{ '{mark}' + message.reasoning_content + '{end}' }}}}") == (mark, end)
    assert reasoning_of("{{ message.content }}") is None
    assert reasoning_of("<|channel>thought {{ thinking }} <channel|>") == ("<|channel>thought", "<channel|>")


def test_reasoning_and_text_without_calls() -> None:
    how = reading(None, reasoning=THINK)
    expected: Mapping[str, tuple[str, str]] = {
        "<think>\nwell\n</think>\n\nyes\n": ("well", "yes\n"),
        "<think>\n\n</think>\n\nyes": ("", "yes"),
        "\n<think>well": ("well", ""),
        f"{'word ' * 9000}\n <think>well": ("well", f"{'word ' * 9000}\n "),
        f"{'word ' * 9000} <think>well": ("", f"{'word ' * 9000} <think>well"),
        "Write <think> first.": ("", "Write <think> first."),
        " as it is \n": ("", " as it is \n"),
        "a</think>b": ("", "a</think>b"),
    }
    for text, (reasoning, content) in expected.items():
        said = read_at_every_cut(how, text) if len(text) < 1000 else how.read(0, text)
        assert (said.reasoning, said.content) == (reasoning, content), text
    said = read_at_every_cut(reading(None, reasoning=THINK, in_reasoning=True), "well\n</think>\n\nyes")
    assert (said.reasoning, said.content) == ("well", "yes")
