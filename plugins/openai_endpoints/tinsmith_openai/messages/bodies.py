"""The JSON bodies of Anthropic's requests, and the chats that they ask for.

A field that is neither here nor in `other_fields` is refused by name, unless it holds nothing.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tinsmith_checkpoints.huggingface import Json
from tinsmith_openai import bodies
from tinsmith_openai.bodies import MOST_MESSAGES, MOST_STOPS, Float, Int, Name, Seed, Stop, TopK
from tinsmith_openai.messages import other_fields
from tinsmith_openai.other_fields import OtherFields


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    other_fields: ClassVar[OtherFields] = other_fields.OF_BLOCKS


class TextBlock(_Body):
    type: Literal["text"]
    text: str


class ThinkingBlock(_Body):
    """What the model thought. Ours are not signed."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_Body):
    """What another model thought, which nobody here can read: it is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(_Body):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Json]


class ToolResultBlock(_Body):
    """Chat templates have no place for `is_error`: the model learns of an error by the text alone."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | list[TextBlock] = ""
    is_error: bool = False


class UserMessage(_Body):
    role: Literal["user"]
    content: (
        str | Annotated[list[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]], Field(min_length=1)]
    )


class AssistantMessage(_Body):
    role: Literal["assistant"]
    content: (
        str
        | list[Annotated[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")]]
    )


class SystemMessage(_Body):
    role: Literal["system"]
    content: str | list[TextBlock]


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class Tool(_Body):
    other_fields: ClassVar[OtherFields] = other_fields.OF_TOOLS

    type: Literal["custom"] = "custom"
    name: Name
    description: str | None = None
    input_schema: dict[str, Json]


class ToolChoice(_Body):
    other_fields: ClassVar[OtherFields] = other_fields.OF_TOOL_CHOICES

    type: Literal["auto", "none"]


class Thinking(_Body):
    """Whether the model is to think, if its template knows `enable_thinking`."""

    other_fields: ClassVar[OtherFields] = other_fields.OF_THINKING

    type: Literal["enabled", "adaptive", "disabled"]


class OutputConfig(_Body):
    """`effort` goes to the template as `reasoning_effort`."""

    other_fields: ClassVar[OtherFields] = other_fields.OF_OUTPUT

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class ContextManagement(_Body):
    """Which parts of a long conversation may be left out. None is: the answer says so."""

    edits: list[dict[str, Json]] = []


class CountTokensRequest(_Body):
    """What decides about a prompt."""

    other_fields: ClassVar[OtherFields] = other_fields.OF_REQUESTS

    model: Name
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] = []
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Json] = {}
    special_tokens_in_text: Literal["text", "tokens"] = "text"

    @model_validator(mode="after")
    def _ends_with_a_question(self) -> "CountTokensRequest":
        if self.messages[-1].role == "assistant":
            msg = "the last message is the assistant's, and continuing it is not offered; end with a user's message"
            raise ValueError(msg)
        return self

    def chat(self) -> bodies.ChatRequest:
        """Return the chat that this asks for."""
        return bodies.ChatRequest.model_validate({"model": self.model, **self._of_prompt()})

    def _of_prompt(self) -> dict[str, object]:
        begin = [] if self.system is None else [{"role": "system", "content": _text(self.system)}]
        return {
            "messages": [*begin, *(each for message in self.messages for each in _chat_messages(message))],
            "tools": [{"type": "function", "function": _function(tool)} for tool in self.tools],
            "tool_choice": self.tool_choice.type,
            "chat_template_kwargs": self._template_options(),
            "special_tokens_in_text": self.special_tokens_in_text,
        }

    def _template_options(self) -> dict[str, Json]:
        """Those of `chat_template_kwargs` win."""
        asked: dict[str, Json] = {}
        if self.thinking is not None:
            asked["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config.effort is not None:
            asked["reasoning_effort"] = self.output_config.effort
        return {**asked, **self.chat_template_kwargs}


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[Int, Field(ge=1)]
    temperature: Float = 1.0
    top_p: Float = 1.0
    top_k: TopK = -1
    stop_sequences: Annotated[list[Stop], Field(max_length=MOST_STOPS)] = []
    stream: bool = False
    seed: Seed = None
    return_token_ids: bool = False

    def chat(self) -> bodies.ChatRequest:
        return bodies.ChatRequest.model_validate(
            {
                **self._of_prompt(),
                **self.model_dump(include={"model", "max_tokens", "temperature", "top_p", "top_k", "stream", "seed"}),
                "stop": self.stop_sequences,
                "return_token_ids": self.return_token_ids,
            }
        )


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _function(tool: Tool) -> dict[str, Json]:
    described: dict[str, Json] = {} if tool.description is None else {"description": tool.description}
    return {"name": tool.name, **described, "parameters": tool.input_schema}


def _chat_messages(message: UserMessage | AssistantMessage | SystemMessage) -> Iterator[dict[str, object]]:
    """Yield the messages of a chat that say the same. The result of a tool is a message of its own."""
    if isinstance(message, UserMessage) and not isinstance(message.content, str):
        yield from _of_user(message.content)
        return
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    words = _text([each for each in message.content if isinstance(each, TextBlock)])
    calls = [
        {"id": each.id, "function": {"name": each.name, "arguments": json.dumps(each.input)}}
        for each in message.content
        if isinstance(each, ToolUseBlock)
    ]
    said: dict[str, object] = {"role": message.role, "content": words}
    if thought := "".join(each.thinking for each in message.content if isinstance(each, ThinkingBlock)):
        said["reasoning_content"] = thought
    yield {**said, "content": words or None, "tool_calls": calls} if calls else said


def _of_user(blocks: Iterable[TextBlock | ToolResultBlock]) -> Iterator[dict[str, object]]:
    said: list[TextBlock] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            said.append(block)
            continue
        if said:
            yield {"role": "user", "content": _text(said)}
            said = []
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
    if said:
        yield {"role": "user", "content": _text(said)}
