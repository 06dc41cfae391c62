"""Renders the chat template of a model's tokenizer, as transformers does."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError, UndefinedError, nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls  # noqa: N812 - a class
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinsmith import ConfigError, UserError
from tinsmith_checkpoints.huggingface import Json, special_tokens, tokenizer_config
from tinsmith_openai.tool_calls import form_of, marks_of, reasoning_of

_TOOLS_NAMES: Final = ("tools", "xml_tools")  # the second one is SmolLM3's
_LATE: Final = "said later"
Messages = list[Mapping[str, Json]]

_RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ToolsError(UserError):
    """The model's chat template has no place for tools, or its calls could not be read."""

    field = "tools"


class ChatTemplate:
    """Makes the text of a conversation. A model may have a template of its own for conversations with tools."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, for_tools: str | None = None) -> None:
        """Raise ConfigError if a template cannot be compiled."""
        self.source = source
        self.tools_source = source if for_tools is None else for_tools
        self.form = form_of(self.tools_source)
        """How the model writes calls; None if nobody here can read them."""
        self.reasoning = reasoning_of(self.tools_source)
        self.marks = marks_of(self.form, self.reasoning)
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._for_tools = environment.from_string(self.tools_source)
            names = {each.name for each in environment.parse(self.tools_source).find_all(nodes.Name)}
        except TemplateError as error:
            msg = f"the chat template of the model's tokenizer cannot be compiled: {error}"
            raise ConfigError(msg) from error
        self._tools_name = next((name for name in _TOOLS_NAMES if name in names), None)

    @classmethod
    def of_model(cls, directory: Path) -> "ChatTemplate | None":
        """Read a Hugging Face directory's templates; None if it has none."""
        config = tokenizer_config(directory)
        templates = _files(directory) or _named(config.get("chat_template"))
        if (source := templates.get("default")) is None:
            return None
        return cls(source, special_tokens(config), for_tools=templates.get("tool_use"))

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        *,
        tools: Sequence[Json],
        options: Mapping[str, Json],
        add_generation_prompt: bool,
    ) -> str:
        """Return the text. Raise UserError if the template refuses the conversation."""
        if reserved := sorted(_RESERVED & options.keys()):
            msg = f"chat_template_kwargs: {', '.join(reserved)} may not be set there"
            raise UserError(msg)
        values: dict[str, Any] = {
            **self._special_tokens,
            **options,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if tools:
            values[self._tools_name or "tools"] = tools
        template = self._for_tools if tools else self._template
        given = self._with_thoughts(messages)
        try:
            return self._rendered(template, values, given)
        except UserError:
            raise
        except Exception as error:  # a template is a program: unexpected input may make it fail in any way
            msg = f"the model's chat template cannot render these messages: {error}"
            raise UserError(msg) from error

    @cached_property
    def shows_late_system(self) -> bool:
        """Whether the system may say something after the user."""
        said = [{"role": "user", "content": "hello"}, {"role": "system", "content": _LATE}]
        try:
            return _LATE in self.render(said, tools=[], options={}, add_generation_prompt=True)
        except UserError:
            return False

    def _rendered(self, template: Template, values: Mapping[str, Any], messages: Messages) -> str:
        failed: Exception | None = None
        for change in _WAYS:
            try:
                return template.render({**values, "messages": change(messages)})
            except (TypeError, UndefinedError) as error:  # perhaps the template expects them in another way
                failed = failed or error
        assert failed is not None
        raise failed

    def knows(self, role: str) -> bool:
        return role in self.source and role in self.tools_source

    def _with_thoughts(self, messages: Sequence[Mapping[str, Json]]) -> Messages:
        """Give reasoning the name by which the template knows it. gpt-oss takes none beside text before a call."""
        if "reasoning_content" in self.tools_source or ".thinking" not in self.tools_source:
            return list(messages)
        return [
            {**message, "thinking": thought}
            if (thought := message.get("reasoning_content"))
            and not (message.get("content") and "tool_calls" in message)
            else message
            for message in messages
        ]

    def check_tools(self) -> None:
        """Raise ToolsError if the template does not show tools, or nobody could read the calls that it asks for."""
        if self._tools_name is None:
            msg = (
                "tools: the chat template of this model does not show them to the model; describe them in a message, "
                "or put a template that does so into the model's directory as additional_chat_templates/tool_use.jinja"
            )
            raise ToolsError(msg)
        if self.form is None:
            msg = (
                "tools: the chat template of this model asks for calls in a form that this server does not read; "
                "describe the tools in a message, and read the calls from the text of the answer"
            )
            raise ToolsError(msg)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControls]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


class _Generation(Extension):
    """`{% generation %}` marks what an assistant says; for a text it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja's signature

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - as templates call it
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    msg = f"the model's chat template refuses these messages: {message}"
    raise UserError(msg)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _files(directory: Path) -> dict[str, str]:
    """Return the templates in files of their own, by name. If there are any, transformers reads no others."""
    files = {file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (default := directory / "chat_template.jinja").exists():
        files["default"] = default
    return {name: file.read_text(encoding="utf-8") for name, file in files.items()}


def _named(templates: Json) -> dict[str, str]:
    """Return the templates of tokenizer_config.json, by name."""
    if isinstance(templates, str):
        return {"default": templates}
    found: dict[str, str] = {}
    for each in templates if isinstance(templates, list) else ():
        if isinstance(each, dict) and isinstance(name := each.get("name"), str):
            found[name] = str(each.get("template"))
    return found


def _as_they_are(messages: Messages) -> Messages:
    return messages


def _with_texts(messages: Messages) -> Messages:
    """Some templates look into what a message says although it only calls tools, such as those of Qwen3 and gpt-oss."""
    return [{**message, "content": ""} if message.get("content") is None else message for message in messages]


def _with_text_arguments(messages: Messages) -> Messages:
    """Some templates join the arguments of calls to text, such as those of DeepSeek."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _with_both(messages: Messages) -> Messages:
    return _with_text_arguments(_with_texts(messages))


_WAYS: Final = (_as_they_are, _with_texts, _with_text_arguments, _with_both)
"""In which a template may expect messages, the usual one first."""


def _with_text(call: Any) -> dict[str, Any]:  # Any: a call as `conversations` makes it
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
