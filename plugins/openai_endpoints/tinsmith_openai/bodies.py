"""The JSON bodies of requests.

A field that is neither here nor in `other_fields` is refused by name, unless it holds nothing.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from tinsmith_checkpoints.huggingface import Json
from tinsmith_openai import other_fields
from tinsmith_openai.other_fields import OtherFields

_MOST_PROMPTS = 1024
MOST_STOPS = 256
MOST_MESSAGES = 8192
"""Reading a list of them holds Python's lock from its first to its last."""

Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Float = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(lambda value: 1.0 if value is None else value)]
"""A temperature or a share of the probability. Both APIs take null for the default, which is 1."""
Seed = Annotated[Int | None, AfterValidator(lambda seed: None if seed == -1 else seed)]
"""None: the server draws one. Clients write null or, as for other servers, -1: a group of samples must not be one."""
TopK = Annotated[Int, AfterValidator(lambda top_k: top_k or -1)]
"""Both 0 and -1 stand for all tokens."""
Name = Annotated[str, Field(max_length=1024)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _without_strict(function: dict[str, Json]) -> dict[str, Json]:
    """Leave out what forces arguments into a schema: here they are not forced, and no template knows the word."""
    return {name: value for name, value in function.items() if name != "strict"}


class StreamOptions(_Body):
    other_fields: ClassVar[OtherFields] = other_fields.OF_STREAM_OPTIONS

    include_usage: bool = False


class SamplingBody(_Body):
    """What both kinds of requests share."""

    model: Name
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    temperature: Float = 1.0
    top_p: Float = 1.0
    top_k: TopK = -1
    n: Annotated[Int, Field(ge=1)] = 1
    seed: Seed = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] = []
    stop_token_ids: Annotated[list[Token], Field(max_length=MOST_STOPS)] = []
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def streams_by_token(self) -> bool:
        """Whether text is sent while it is drawn. Answers that need whole choices are sent when these have ended."""
        return self.stream and not self.return_token_ids

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionRequest(SamplingBody):
    other_fields: ClassVar[OtherFields] = other_fields.OF_COMPLETIONS

    prompt: (
        str
        | Tokens
        | Annotated[list[str], Field(max_length=_MOST_PROMPTS, fail_fast=True)]
        | Annotated[list[Tokens], Field(max_length=_MOST_PROMPTS, fail_fast=True)]
    )
    logprobs: Annotated[Int, Field(ge=0)] | None = None
    echo: bool = False

    @property
    def streams_by_token(self) -> bool:
        return super().streams_by_token and self.logprobs is None and not self.echo and self.max_tokens != 0

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return each prompt, text or tokens."""
        prompt: Any = self.prompt  # Any: the four forms differ in their first element
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)


class Function(_Body):
    name: Name
    arguments: str  # JSON


class ToolCall(_Body):
    other_fields: ClassVar[OtherFields] = other_fields.OF_CALLS

    id: Name
    type: Literal["function"] = "function"
    function: Function


class TextPart(_Body):
    other_fields: ClassVar[OtherFields] = other_fields.OF_PARTS

    type: Literal["text"] = "text"
    text: str


class Message(_Body):
    """One message. Which fields count for which role is up to the model's chat template."""

    other_fields: ClassVar[OtherFields] = other_fields.OF_MESSAGES

    type: Literal["text"] = "text"  # says nothing; some releases of lm-eval send it
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    name: Name | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Name | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        """A template would drop such a message, or write the word None."""
        if self.content is None and not self.tool_calls:
            msg = "content is missing; only a message of the assistant with tool_calls needs none"
            raise ValueError(msg)
        return self

    @property
    def text(self) -> str | None:
        return self.content if isinstance(self.content, str | None) else "".join(part.text for part in self.content)


class Tool(_Body):
    other_fields: ClassVar[OtherFields] = other_fields.OF_TOOLS

    type: Literal["function"]
    function: Annotated[dict[str, Json], AfterValidator(_without_strict)]


class ResponseFormat(_Body):
    type: Literal["text"]


class ChatRequest(SamplingBody):
    other_fields: ClassVar[OtherFields] = other_fields.OF_CHATS

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Int, Field(ge=0)] = 0
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: dict[str, Json] = {}
    special_tokens_in_text: Literal["text", "tokens"] = "text"

    @property
    def template_options(self) -> dict[str, Json]:
        """What the template reads, if it knows the names. Those of `chat_template_kwargs` win."""
        effort = self.reasoning_effort
        asked = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return {**asked, **self.chat_template_kwargs}

    @property
    def streams_by_token(self) -> bool:
        return super().streams_by_token and not self.logprobs

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            msg = "top_logprobs needs logprobs; set it to true"
            raise ValueError(msg)
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            msg = "max_tokens and max_completion_tokens are the same, and differ; send one of them"
            raise ValueError(msg)
        return self
