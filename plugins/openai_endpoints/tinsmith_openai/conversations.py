"""From a conversation to the tokens of its prompt, and back from sampled tokens to a message."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith import UserError
from tinsmith_checkpoints.huggingface import Json, check_depth
from tinsmith_openai.answers import Object
from tinsmith_openai.bodies import ChatRequest, Message, ToolCall
from tinsmith_openai.texts import ModelText
from tinsmith_openai.transcripts import Digests, Transcripts, digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A request's messages, and the tokens of its prompt."""

    messages: Sequence[Object]  # as templates read them
    tools: Sequence[Json]
    options: Object
    tokens: list[int]
    digests: Digests
    of_all: Json
    known: bytes | None  # the digest of the message up to which the tokens were kept
    num_known: int  # tokens up to there


def read_conversation(text: ModelText, kept: Transcripts, tenant: str, body: ChatRequest) -> Conversation:
    """Make the prompt. Raise UserError if the template refuses the messages. Takes long for long ones."""
    messages = [_for_template(text, message) for message in body.messages]
    tools: list[Json] = [] if body.tool_choice == "none" else [tool.model_dump() for tool in body.tools]
    options = dict(body.chat_template_kwargs)
    of_all: Json = [text.base_model, tools, options]
    names = digests(of_all, [_as_sent(message) for message in body.messages])

    def render(number: int, *, add_generation_prompt: bool) -> str:
        return text.template.render(
            messages[:number], tools=tools, options=options, add_generation_prompt=add_generation_prompt
        )

    whole = render(len(messages), add_generation_prompt=True)
    tokens, known, num_known = None, None, 0
    for at in reversed([at for at, message in enumerate(body.messages) if message.role == "assistant"]):
        before = kept.tokens(tenant, names[at])
        if before is None:
            continue
        tail = _tail(text, whole, render(at + 1, add_generation_prompt=False), before[-1])
        if tail is not None:
            tokens, known, num_known = [*before, *text.encode(tail, special=False)], names[at], len(before)
            break
    if tokens is None:
        tokens = text.encode(whole, special=False)
    return Conversation(
        messages=messages,
        tools=tools,
        options=options,
        tokens=tokens,
        digests=names,
        of_all=of_all,
        known=known,
        num_known=num_known,
    )


def keep_answer(
    kept: Transcripts, tenant: str, asked: Conversation, body: ChatRequest, answer: Object, tokens: Sequence[int]
) -> None:
    """Remember the tokens of an answer, after its prompt's."""
    said = Message.model_validate(answer)
    name = digests(asked.of_all, [*(_as_sent(message) for message in body.messages), _as_sent(said)])[-1]
    kept.keep(tenant, name, parent=asked.known, tokens=[*asked.tokens[asked.num_known :], *tokens])


def _tail(text: ModelText, whole: str, until: str, end: int) -> str | None:
    """Return the text behind the token that ended a turn; None if the template has changed the text before it."""
    mark = text.piece(end)
    at = until.rfind(mark)
    return whole[at + len(mark) :] if at >= 0 and whole.startswith(until) else None


def _as_sent(message: Message) -> Json:
    """Return the message in the one form that stands for all ways to send it."""
    sent: Json = {**message.model_dump(exclude_none=True, exclude_defaults=True), "content": message.text or ""}
    return sent


def _for_template(text: ModelText, message: Message) -> Object:
    """Return the message as templates expect it: text in one piece, the arguments of calls as objects.

    Most templates would drop a message of the developer, OpenAI's later name for the system.
    """
    given: Object = message.model_dump(exclude_none=True, exclude={"type"})
    given["content"] = message.text
    if message.role == "developer" and message.role not in text.template.source:
        given["role"] = "system"
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
