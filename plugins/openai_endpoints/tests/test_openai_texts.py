"""Chat templates, tool calls and transcripts, without a server."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from openai_served import encoded, prompt_of, write_model
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback
from tokenizers.models import BPE
from transformers.utils.chat_template_utils import render_jinja_template

from tinsmith import UserError
from tinsmith_checkpoints.huggingface import Json
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_checkpoints.huggingface.tiny_tokenizer import chat_template
from tinsmith_openai.answers import chat_message, finished_text
from tinsmith_openai.bodies import ChatRequest
from tinsmith_openai.chat_template import ChatTemplate, ToolsError
from tinsmith_openai.conversations import keep_answer
from tinsmith_openai.growing_text import GrowingText
from tinsmith_openai.texts import ModelText
from tinsmith_openai.transcripts import Transcripts

HARD = """\
{%- set ns = namespace(first=true) %}
{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if tools and ns.first %}{{ tools | tojson(indent=2) }}{{ {'b': '<é>', 'a': 1} | tojson }}
    {%- set ns.first = false %}{% endif %}
    {% generation %}<{{ message.role }}>{{ message.content.split('x')[-1].strip() }}{{ eos_token }}{% endgeneration %}

{% endfor %}
{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}
{% if add_generation_prompt %}<assistant>{% endif %}"""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "required": ["<a>"]}}}


@pytest.mark.parametrize("source", [chat_template("qwen3"), chat_template("llama"), HARD])
@pytest.mark.parametrize("more", [{}, {"enable_thinking": False}])
def test_a_template_says_what_transformers_says(source: str, more: dict[str, bool]) -> None:
    messages = [{"role": role, "content": f"x  {role} & <b> é "} for role in ("system", "user", "skip", "assistant")]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = render_jinja_template(
        [messages], tools=[TOOL], chat_template=source, add_generation_prompt=True, **special, **more
    )
    template = ChatTemplate(source, special)
    assert template.render(messages, tools=[TOOL], options=more, add_generation_prompt=True) == expected


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safe|append"),
        ("{{ nothing.of.it }}", "undefined"),
    ],
)
def test_a_template_that_refuses_or_goes_astray_is_the_callers_error(source: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        ChatTemplate(source, {}).render([], tools=[], options={}, add_generation_prompt=True)


def model_with(directory: Path, templates: object, files: Mapping[str, str]) -> ChatTemplate:
    directory.mkdir()
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    for name, source in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(source)
    template = ChatTemplate.of_model(directory)
    assert template is not None
    return template


NAMED = [
    {"name": "default", "template": "plain"},
    {"name": "tool_use", "template": "{{ tools | length }} tools, <tool_call>"},
    {"name": "rag", "template": "documents"},
]


@pytest.mark.parametrize(
    ("templates", "files", "said"),
    [
        (NAMED, {}, ["plain", "1 tools, <tool_call>"]),
        (NAMED, {"chat_template.jinja": "{{ tools }}<tool_call>"}, ["None<tool_call>", None]),
        (
            None,
            {
                "chat_template.jinja": "plain",
                "additional_chat_templates/tool_use.jinja": "{{ tools | length }} tools, <tool_call>",
                "additional_chat_templates/rag.jinja": "documents",
            },
            ["plain", "1 tools, <tool_call>"],
        ),
        ("{{ xml_tools | length }} tools, <tool_call>", {}, ["0 tools, <tool_call>", "1 tools, <tool_call>"]),
    ],
)
def test_tools_are_shown_by_the_template_for_tools(
    tmp_path: Path, templates: object, files: dict[str, str], said: list[str | None]
) -> None:
    template = model_with(tmp_path / "model", templates, files)
    for expected, tools in zip(said, ([], [TOOL]), strict=True):
        if expected is not None:
            assert template.render([], tools=tools, options={}, add_generation_prompt=True) == expected


@pytest.mark.parametrize(
    ("templates", "match"),
    [
        ("no tools in {{ messages | length }} messages", "does not show them"),
        ("{{ tools }} in a form of its own", "a form that this server does not read"),
        ([{"name": "default", "template": "{{ tools }}<tool_call>"}, {"name": "tool_use", "template": "-"}], "show"),
    ],
)
def test_tools_that_a_template_does_not_show_or_nobody_can_read_are_refused(
    tmp_path: Path, templates: object, match: str
) -> None:
    template = model_with(tmp_path / "model", templates, {})
    with pytest.raises(ToolsError, match=f"^tools: the chat template .*{match}") as refused:
        template.check_tools()
    assert refused.value.field == "tools"


JOINS = "{% for call in message.tool_calls %}{{ call.function.name + call.function.arguments }}{% endfor %}"
LOOKS = "{% if 'content' in message and 'x' in message.content %}x{% endif %}"
OBJECT = "{{ message.tool_calls[0].function.arguments.a }}{{ message.content is none }}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (OBJECT, "éTrue"),
        (JOINS, 'add{"a": "é"}'),
        (LOOKS + OBJECT, "éFalse"),
        ("{{ message.content[:1] }}" + OBJECT, "éFalse"),
        (LOOKS + JOINS, 'add{"a": "é"}'),
        ("{{ message.thinking }}", "well"),
        ("{{ message.thinking }}{{ message.reasoning_content }}", "well"),
    ],
)
def test_a_template_gets_messages_in_the_way_that_it_expects(source: str, expected: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
    message: dict[str, Json] = {"role": "assistant", "content": None, "reasoning_content": "well", "tool_calls": [call]}
    said = ChatTemplate("{% set message = messages[0] %}" + source, {}).render(
        [message], tools=[], options={}, add_generation_prompt=False
    )
    assert said == expected


def test_a_template_takes_no_other_messages() -> None:
    with pytest.raises(UserError, match="chat_template_kwargs: messages"):
        ChatTemplate("", {}).render([], tools=[], options={"messages": []}, add_generation_prompt=True)


def test_a_transcript_keeps_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    """Through 30 turns that call a tool: arguments come back as other text, and a character has other tokens."""
    text, kept = ModelText("toy", write_model(tmp_path / "toy")), Transcripts()
    messages: list[dict[str, object]] = [{"role": "user", "content": "go"}]
    transcript: list[int] = []
    for turn in range(30):
        body = ChatRequest.model_validate({"model": "toy", "messages": messages, "tools": [TOOL]})
        asked = prompt_of(text, kept, "ann", body)
        assert asked.tokens.tolist()[: len(transcript)] == transcript
        assert text.decode(asked.tokens.tolist()[len(transcript) :]).endswith("[assistant] ")
        said = encoded(text, f'<tool_call>{{"arguments":{{"a":{turn}}},   "name":"add"}}</tool_call><end>')
        transcript = [*asked.tokens.tolist(), *said]
        answer = chat_message(asked.reading.read(0, text.decode(said)))
        keep_answer(kept, "ann", asked, body, answer, said)
        for tenant in ("bob", "ann"):
            later = ChatRequest.model_validate({"model": "toy", "messages": [*messages, answer], "tools": [TOOL]})
            found = prompt_of(text, kept, tenant, later).tokens.tolist()[: len(transcript)]
            assert (found == transcript) is (tenant == "ann"), "what is kept is its tenant's"
        messages += [answer, {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "ok"}]


def test_room_for_transcripts_is_taken_from_the_oldest_and_from_the_ends() -> None:
    kept = Transcripts(tenant_tokens=10)
    kept.keep("ann", b"1", parent=None, tokens=[1, 2, 3, 4])
    kept.keep("ann", b"2", parent=b"1", tokens=[5, 6, 7, 8])
    kept.keep("bob", b"3", parent=None, tokens=[1] * 10)
    assert kept.tokens("ann", b"2") == [1, 2, 3, 4, 5, 6, 7, 8]
    kept.keep("ann", b"4", parent=b"1", tokens=[9, 10, 11])
    assert kept.tokens("ann", b"2") is None
    assert kept.tokens("ann", b"4") == [1, 2, 3, 4, 9, 10, 11]
    assert kept.tokens("bob", b"3") == [1] * 10
    assert kept.tokens("bob", b"4") is None


def test_bytes_of_tokens_make_up_the_text_although_characters_are_divided(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", TinyShape(num_layers=1, hidden_size=16))
    text, said = ModelText("tiny", tmp_path / "model"), "naïve 漢字 🫖!\n"
    tokens = encoded(text, said)
    assert any("\N{REPLACEMENT CHARACTER}" in text.piece(token) for token in tokens)
    assert b"".join(text.bytes_of(token) or b"" for token in tokens).decode() == said


def test_bytes_of_sentencepiece(tmp_path: Path) -> None:
    """It has a token for each byte, in which a character that is not in the vocabulary is written."""
    words = {"<unk>": 0, "a": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    tokenizer = Tokenizer(BPE(words, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = ByteFallback()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = ModelText("tiny", tmp_path)
    assert b"".join(text.bytes_of(token) or b"" for token in encoded(text, "aé")) == "aé".encode()


@pytest.mark.parametrize("source", ["{{ messages[0].role }}", "{{ messages[0].role }}{# developer #}"])
def test_a_developers_words_are_the_systems_where_a_template_knows_no_developer(tmp_path: Path, source: str) -> None:
    directory = write_model(tmp_path / "toy")
    (directory / "chat_template.jinja").write_text(source)
    body = ChatRequest.model_validate({"model": "toy", "messages": [{"role": "developer", "content": "hi"}]})
    text = ModelText("toy", directory)
    expected = "developer" if "developer" in source else "system"
    assert text.decode(prompt_of(text, Transcripts(), "ann", body).tokens.tolist()) == expected


FIRST_ALONE = """\
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('the system comes first') }}{% endif -%}
<{{ message.role }}>{{ message.content }}
{%- endfor %}"""
HOISTED = """\
{%- if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}
{%- for message in messages if message.role != 'system' %}<{{ message.role }}>{{ message.content }}{% endfor %}"""
ANYWHERE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(("source", "late"), [(FIRST_ALONE, "user"), (HOISTED, "user"), (ANYWHERE, "system")])
def test_a_late_word_of_the_systems_is_the_users_where_it_would_be_lost(tmp_path: Path, source: str, late: str) -> None:
    """Claude Code sends some. A first one stays where it is."""
    directory = write_model(tmp_path / "toy")
    (directory / "chat_template.jinja").write_text(source)
    said = [("system", "a"), ("user", "b"), ("system", "c"), ("developer", "d")]
    messages = [{"role": role, "content": content} for role, content in said]
    body = ChatRequest.model_validate({"model": "toy", "messages": messages})
    prompt = prompt_of(ModelText("toy", directory), Transcripts(), "ann", body)
    assert ModelText("toy", directory).decode(prompt.tokens.tolist()) == f"<system>a<user>b<{late}>c<{late}>d"


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_growing_text_is_the_beginning_of_the_whole(tmp_path: Path, family: str) -> None:
    """Random tokens, so many characters are never complete; with and without stop strings that half of them meet."""
    write_tiny_model(tmp_path / family, TinyShape(family=family, num_layers=1, hidden_size=16))
    text, rng = ModelText("tiny", tmp_path / family), np.random.default_rng(1)
    for _ in range(100):
        tokens = rng.integers(0, 512, 40).tolist()
        whole = text.decode(tokens)
        start = int(rng.integers(0, len(whole)))
        for stops in ((), (whole[start : start + 3],), (whole[start : start + 5] + "x", "yy")):
            growing, said = GrowingText(text, [stop for stop in stops if stop]), ""
            expected = finished_text(text, tokens, [stop for stop in stops if stop])
            for at in range(0, len(tokens), 3):
                said += growing.add(tokens[at : at + 3])
                assert expected.startswith(said), (expected, said)
            kept = len(expected) - len(said)
            assert kept <= max([len(stop) for stop in stops], default=0) + 3, "what is certain is said"
