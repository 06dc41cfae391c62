"""Renders the chat template of a model's tokenizer, as transformers does."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls  # noqa: N812 - a class
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinsmith import ConfigError, UserError
from tinsmith_checkpoints.huggingface import Json, special_tokens, tokenizer_config

_RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """Makes the text of a conversation."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raise ConfigError if the template cannot be compiled."""
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControls]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            msg = f"the chat template of the model's tokenizer cannot be compiled: {error}"
            raise ConfigError(msg) from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def of_model(cls, directory: Path) -> "ChatTemplate | None":
        """Read a Hugging Face directory's template; None if it has none."""
        config = tokenizer_config(directory)
        file = directory / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.exists() else _named(config.get("chat_template"))
        return None if source is None else cls(source, special_tokens(config))

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
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(values)
        except UserError:
            raise
        except Exception as error:  # a template is a program: unexpected input may make it fail in any way
            msg = f"the model's chat template cannot render these messages: {error}"
            raise UserError(msg) from error


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


def _named(templates: Json) -> str | None:
    """Return the template; of several, the default one."""
    if isinstance(templates, list):
        named = {each.get("name"): each.get("template") for each in templates if isinstance(each, dict)}
        templates = named.get("default")
    return templates if isinstance(templates, str) else None
