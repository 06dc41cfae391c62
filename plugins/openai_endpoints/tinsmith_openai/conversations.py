"""From a conversation to the tokens of its prompt, and back from sampled tokens to a message."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np

from tinsmith import TokenArray, UserError
from tinsmith_checkpoints.huggingface import Json, check_depth
from tinsmith_openai.answers import Object
from tinsmith_openai.bodies import ChatRequest, Message, ToolCall
from tinsmith_openai.reading import reading_of
from tinsmith_openai.refusals import TooLongError
from tinsmith_openai.text_work import Asker
from tinsmith_openai.texts import ModelText
from tinsmith_openai.tool_calls import Reading
from tinsmith_openai.transcripts import Digests, Transcripts, canonical_arguments, digests

_MOST_BEGINNINGS: Final = 16
"""Kept turns with which a prompt is compared. Each is rendered, and a template that changes an earlier turn, as some
drop what was thought, mostly changes all turns behind it as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A request's messages, and the tokens of its prompt."""

    messages: Sequence[Object]  # as templates read them
    tools: Sequence[Json]
    options: Object
    tokens: TokenArray
    digests: Digests
    of_all: Json
    known: bytes | None  # the digest of the message up to which the tokens were kept
    num_known: int  # tokens up to there
    reading: Reading


def read_conversation(
    text: ModelText, kept: Transcripts, tenant: str, body: ChatRequest, *, window: int, asker: Asker
) -> Conversation:
    """Make the prompt. Takes long for long ones.

    Raise UserError if the template refuses the messages, and TooLongError if they do not fit into a context of `window`
    tokens. Most that do not fit are refused before anything is made of them.
    """
    _refuse_long(text, body, window)
    messages = [_for_template(text, message, is_first=at == 0) for at, message in enumerate(body.messages)]
    tools: list[Json] = [] if body.tool_choice == "none" else [tool.model_dump() for tool in body.tools]
    if tools:
        text.template.check_tools()
    options = body.template_options
    of_all: Json = [text.base_model, tools, options, body.special_tokens_in_text]
    names = digests(of_all, [_as_sent(message) for message in body.messages])

    shown: Any = [messages, tools, options]  # Any: as these are
    if body.special_tokens_in_text == "text":
        shown = text.special_tokens.quoted(shown)

    def render(number: int, *, add_generation_prompt: bool) -> str:
        asker.check()
        rendered = text.template.render(
            shown[0][:number], tools=shown[1], options=shown[2], add_generation_prompt=add_generation_prompt
        )
        text.refuse_long(len(text.special_tokens.unquoted(rendered)), window)
        return rendered

    whole = render(len(messages), add_generation_prompt=True)
    tokens, known, num_known = None, None, 0
    for at in _kept_turns(kept, tenant, body, names):
        before = kept.tokens(tenant, names[at]) or []
        tail = _tail(text, whole, render(at + 1, add_generation_prompt=False), before[-1]) if before else None
        if tail is not None and len(before) < window:
            more = text.encode(tail, special=False, window=window, asker=asker)
            tokens, known, num_known = np.concatenate([np.array(before, np.int32), more]), names[at], len(before)
            if len(tokens) > window:
                raise TooLongError(num_prompt=len(tokens), max_context_tokens=window)
            break
    if tokens is None:
        tokens = text.encode(whole, special=False, window=window, asker=asker)
    return Conversation(
        messages=messages,
        tools=tools,
        options=options,
        tokens=tokens,
        digests=names,
        of_all=of_all,
        known=known,
        num_known=num_known,
        reading=reading_of(text.template, tools, whole),
    )


def _refuse_long(text: ModelText, body: ChatRequest, window: int) -> None:
    """A message takes a token or more: templates mark where each begins."""
    if len(body.messages) > window:
        raise TooLongError(num_prompt=len(body.messages), max_context_tokens=window, at_least=True)
    text.refuse_long(sum(map(len, _texts(body))), window)


def _texts(body: ChatRequest) -> Iterator[str]:
    for message in body.messages:
        if isinstance(message.content, list):
            yield from (part.text for part in message.content)
        else:
            yield message.content or ""
        yield message.reasoning_content or ""
        yield from (call.function.arguments for call in message.tool_calls or ())


def _kept_turns(kept: Transcripts, tenant: str, body: ChatRequest, names: Digests) -> list[int]:
    """Return which turns of the assistant are kept, the last ones first."""
    said = (at for at in reversed(range(len(names))) if body.messages[at].role == "assistant")
    return list(islice((at for at in said if kept.has(tenant, names[at])), _MOST_BEGINNINGS))


def keep_answer(
    kept: Transcripts, tenant: str, asked: Conversation, body: ChatRequest, answer: Object, tokens: Sequence[int]
) -> None:
    """Remember the tokens of an answer, after its prompt's. Some clients will repeat it without its reasoning."""
    said = Message.model_validate(answer)
    before = [_as_sent(message) for message in body.messages]
    more = [*asked.tokens[asked.num_known :].tolist(), *tokens]
    for form in [said, *([said.model_copy(update={"reasoning_content": None})] if said.reasoning_content else [])]:
        kept.keep(tenant, digests(asked.of_all, [*before, _as_sent(form)])[-1], parent=asked.known, tokens=more)


def _tail(text: ModelText, whole: str, until: str, end: int) -> str | None:
    """Return the text behind the token that ended a turn; None if the template has changed the text before it."""
    mark = text.piece(end)
    at = until.rfind(mark)
    return whole[at + len(mark) :] if at >= 0 and whole.startswith(until) else None


def _as_sent(message: Message) -> Json:
    """Return the message in the one form that stands for all ways to send it.

    Clients send fields that hold nothing, or leave them out, and write the arguments of calls anew.
    """
    sent: Object = {**message.model_dump(exclude={"type"}), "content": message.text}
    sent["tool_calls"] = [
        [call.id, call.function.name, canonical_arguments(call.function.arguments)] for call in message.tool_calls or ()
    ]
    return {name: value for name, value in sent.items() if value}


def _for_template(text: ModelText, message: Message, *, is_first: bool) -> Object:
    """Return the message as templates expect it: text in one piece, the arguments of calls as objects.

    Most templates would drop a message of the developer, OpenAI's later name for the system. Many refuse or drop one of
    the system's that is not the first, as Claude Code sends them: it is then the user's.
    """
    given: Object = message.model_dump(exclude_none=True, exclude={"type"})
    given["content"] = message.text
    if message.role == "developer" and not text.template.knows(message.role):
        given["role"] = "system"
    if given["role"] == "system" and not is_first and not text.template.shows_late_system:
        given["role"] = "user"
    calls: list[Json] = [
        {**call.model_dump(), "function": {"name": call.function.name, "arguments": _arguments(call)}}
        for call in message.tool_calls or ()
    ]
    if calls:
        given["tool_calls"] = calls
    return given


def _arguments(call: ToolCall) -> Json:
    """Return the arguments of a call as an object, or as they were sent if they are none."""
    sent = call.function.arguments
    try:
        check_depth(sent.encode())
    except ValueError as error:
        msg = f"the arguments of the call of {call.function.name!r} cannot be read: {error}; flatten them"
        raise UserError(msg) from error
    try:
        parsed = json.loads(sent)
    except ValueError:
        return sent
    return parsed if isinstance(parsed, dict) else sent
