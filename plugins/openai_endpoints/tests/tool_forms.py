"""Calls in the forms of all families, as their chat templates write them, and models that use these forms."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer

from tinsmith_checkpoints.huggingface import Json
from tinsmith_checkpoints.huggingface.tiny_tokenizer import train_tokenizer
from tinsmith_openai.texts import ModelText
from tinsmith_openai.tool_calls import FORMS, Form, marks_of

NAME: Final = "look_up"
SCHEMA: Final[dict[str, Json]] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "exact": {"type": ["boolean", "null"]},
        "options": {"$ref": "#/$defs/options"},
        "names": {"anyOf": [{"type": "array"}, {"type": "null"}]},
    },
    "$defs": {"options": {"type": "object"}},
}
TOOLS: Final = {NAME: SCHEMA, "stop": {}}

Arguments = dict[str, Json]
Write = Callable[[Arguments], str]
"""Writes one call as the family's template does."""

BAR, BLANK = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"


def deep(words: str) -> str:
    return f"<{BAR}{words.replace(' ', BLANK)}{BAR}>"


def as_json(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Json) -> str:
    return value if isinstance(value, str) else as_json(value)


def call_object(arguments: Arguments, *, names: str = "name arguments", more: str = "") -> str:
    name, key = names.split()
    return f'{{{more}"{name}": "{NAME}", "{key}": {as_json(arguments)}}}'


def tags(arguments: Arguments, *, around: str = "\n") -> str:
    values = "".join(
        f"<parameter={key}>{around}{plain(value)}{around}</parameter>\n" for key, value in arguments.items()
    )
    return f"<function={NAME}>\n{values}</function>"


def pairs(arguments: Arguments) -> str:
    values = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n" for key, value in arguments.items()
    )
    return f"<tool_call>{NAME}\n{values}</tool_call>"


def marked(arguments: Arguments) -> str:
    values = "".join(
        f'<{BAR}DSML{BAR}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{plain(value)}'
        f"</{BAR}DSML{BAR}parameter>\n"
        for key, value in arguments.items()
    )
    return f'<{BAR}DSML{BAR}invoke name="{NAME}">\n{values}</{BAR}DSML{BAR}invoke>\n'


def python(arguments: Arguments) -> str:
    return f"{NAME}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


QUOTE: Final = '<|"|>'


def gemma(arguments: Arguments, quote: str) -> str:
    def value_of(value: Json) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return f"{{{','.join(f'{quote}{key}{quote}:{value_of(each)}' for key, each in value.items())}}}"
        if isinstance(value, list):
            return f"[{','.join(map(value_of, value))}]"
        return as_json(value)

    return f"call:{NAME}{{{','.join(f'{key}:{value_of(value)}' for key, value in arguments.items())}}}"


def several(begin: str, write: Write, between: str = "", end: str = "") -> Callable[[list[Arguments]], str]:
    return lambda calls: begin + between.join(map(write, calls)) + end


WRITTEN: Final[dict[str, tuple[str, Callable[[list[Arguments]], str]]]] = {
    "Hermes": ("Hermes", several("", lambda call: f"<tool_call>\n{call_object(call)}\n</tool_call>", "\n")),
    "Qwen3-Coder": ("Qwen3-Coder", several("", lambda call: f"<tool_call>\n{tags(call)}\n</tool_call>", "\n")),
    "Qwen3-Coder, JSON": ("Qwen3-Coder", several("", lambda call: f"<tool_call>\n{call_object(call)}\n</tool_call>")),
    "Qwen3-Coder, bare": ("Qwen3-Coder", several("", tags, "\n")),
    "Seed-OSS": ("Seed-OSS", several("", lambda call: f"<seed:tool_call>\n{tags(call, around='')}\n</seed:tool_call>")),
    "GLM": ("GLM", several("", pairs, "\n")),
    "DeepSeek V3": (
        "DeepSeek",
        several(
            deep("tool calls begin"),
            lambda call: (
                f"{deep('tool call begin')}function{deep('tool sep')}{NAME}\n```json\n{as_json(call)}\n```"
                f"{deep('tool call end')}"
            ),
            "\n",
            deep("tool calls end"),
        ),
    ),
    "DeepSeek V3.1": (
        "DeepSeek",
        several(
            deep("tool calls begin"),
            lambda call: f"{deep('tool call begin')}{NAME}{deep('tool sep')}{as_json(call)}{deep('tool call end')}",
            "",
            deep("tool calls end"),
        ),
    ),
    "DeepSeek V3.2": (
        "DeepSeek V3.2",
        several(f"<{BAR}DSML{BAR}function_calls>\n", marked, "", f"</{BAR}DSML{BAR}function_calls>"),
    ),
    "Kimi-K2": (
        "Kimi-K2",
        several(
            "<|tool_calls_section_begin|>",
            lambda call: (
                f"<|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>{as_json(call)}<|tool_call_end|>"
            ),
            "",
            "<|tool_calls_section_end|>",
        ),
    ),
    "Mistral": ("Mistral", several("[TOOL_CALLS][", call_object, ", ", "]")),
    "Mistral, newer": ("Mistral", several("", lambda call: f"[TOOL_CALLS]{NAME}[ARGS]{as_json(call)}")),
    "Mistral, with ids": (
        "Mistral",
        several("", lambda call: f"[TOOL_CALLS]{NAME}[CALL_ID]abcdefghi[ARGS]{as_json(call)}"),
    ),
    "Nemotron": ("Nemotron", several("<TOOLCALL>[", call_object, ", ", "]</TOOLCALL>")),
    "Command A": (
        "Command A",
        several(
            "<|START_ACTION|>[\n    ",
            lambda call: call_object(call, names="tool_name parameters", more='"tool_call_id": "0", '),
            ",\n    ",
            "\n]<|END_ACTION|>",
        ),
    ),
    "Command R": (
        "Command R",
        several(
            "Action:\n```json\n[\n", lambda call: call_object(call, names="tool_name parameters"), ",\n", "\n]\n```"
        ),
    ),
    "Phi": ("Phi", several("<|tool_call|>[", call_object, ", ", "]<|/tool_call|>")),
    "Phi, functools": ("Phi", several("functools[", call_object, ", ", "]")),
    "FunctionGemma": (
        "FunctionGemma",
        several("", lambda call: f"<start_function_call>{gemma(call, '<escape>')}<end_function_call>"),
    ),
    "Gemma 4": ("Gemma 4", several("", lambda call: f"<|tool_call>{gemma(call, QUOTE)}<tool_call|>")),
    "Granite": ("Granite", several("<|tool_call|>[", call_object, ", ", "]")),
    "Apriel": ("Apriel", several("<tool_calls>[", call_object, ", ", "]</tool_calls>")),
    "LFM2": ("LFM2", several("<|tool_call_start|>[", python, ", ", "]<|tool_call_end|>")),
    "OLMo 3": ("OLMo 3", several("<function_calls>\n", python, "\n", "\n</function_calls>")),
    "Llama": ("Llama", several("", lambda call: call_object(call, names="name parameters"), "; ")),
    "Llama, marked": ("Llama", several("<|python_tag|>", lambda call: call_object(call, names="name parameters"))),
    "Llama, Python": ("Llama", several("[", python, ", ", "]")),
    "gpt-oss": (
        "gpt-oss",
        several(
            "",
            lambda call: (
                f"<|start|>assistant<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>"
                f"{as_json(call)}<|call|>"
            ),
        ),
    ),
    "gpt-oss, recipient first": (
        "gpt-oss",
        several(
            " ",
            lambda call: f"to=functions.{NAME}<|channel|>commentary json<|message|>{as_json(call)}<|call|>",
            "<|start|>assistant ",
        ),
    ),
}


def form_named(name: str) -> Form:
    return next(form for form in FORMS if form.name == name)


TEMPLATE: Final = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}<|role|>{{ message.role }} {{ message.content or '' }}
{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|stop|>{% endfor %}
{%- if add_generation_prompt %}<|role|>assistant {% endif %}"""


def model_of(directory: Path, form: Form, tokenizer: Tokenizer) -> ModelText:
    """Return a model whose template shows this form. All its marks are special tokens, as in most families some are."""
    directory.mkdir()
    own = Tokenizer.from_str(tokenizer.to_str())
    marks = sorted(marks_of(form, None))
    own.add_special_tokens([AddedToken(mark, special=True) for mark in (*marks, "<|role|>", "<|stop|>")])
    own.save(str(directory / "tokenizer.json"))
    config = {"chat_template": f"{TEMPLATE}{{# {form.shown[0]} </think> #}}", "eos_token": "<|stop|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return ModelText("tiny", directory)


def byte_tokenizer() -> Tokenizer:
    return train_tokenizer("qwen3", 400)
