"""How programs tell that a conversation is too long: what they look for in the answer's error, as their code says.

Each looks at the status first, which must be 400.
"""

import re
from dataclasses import dataclass
from typing import Final

OPENAI: Final = "openai"
ANTHROPIC: Final = "anthropic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    program: str  # with the release that was read
    form: str  # of the endpoint that it calls
    code: str | None = None  # compared with error.code
    text: str | None = None  # found in the message
    ignores_case: bool = True
    kinds: tuple[str, ...] = ("prompt", "answer")  # whether the prompt alone is too long, or together with the answer

    def finds(self, error: dict[str, str | None]) -> bool:
        if self.code is not None and error.get("code") != self.code:
            return False
        flags = re.IGNORECASE if self.ignores_case else re.NOFLAG
        return self.text is None or re.search(self.text, error["message"] or "", flags) is not None


TOO_LONG: Final = (
    Looks(program="LiteLLM 1.110.2, openai/", form=OPENAI, text="this model's maximum context length is"),
    Looks(
        program="LiteLLM 1.110.2, anthropic/",
        form=ANTHROPIC,
        text="prompt is too long|exceed context limit|this model's maximum context length is",
    ),
    Looks(program="Inspect 0.3.285, openai-api/", form=OPENAI, code="context_length_exceeded"),
    Looks(program="Inspect 0.3.285, vllm/", form=OPENAI, text="maximum context length", ignores_case=False),
    Looks(program="Inspect 0.3.285, sglang/", form=OPENAI, text="context length", ignores_case=False),
    Looks(
        program="Inspect 0.3.285, anthropic/",
        form=ANTHROPIC,
        text="prompt is too long|input length and `max_tokens` exceed context limit",
    ),
    Looks(
        program="verifiers 0.4.0, compaction",
        form=OPENAI,
        text="context_length_exceeded|maximum context length|reduce the length of the messages|prompt is too long",
    ),
    Looks(program="OpenAI Agents SDK 0.24.0, by openai 3.57.0", form=OPENAI, code="context_length_exceeded"),
    Looks(
        program="OpenHands, Cline and others that read the numbers",
        form=OPENAI,
        text=r"maximum context length is (\d+) tokens\. However, you requested (?:at least )?(\d+) tokens",
        ignores_case=False,
    ),
    Looks(
        program="Claude Code, which compacts",
        form=ANTHROPIC,
        text=r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",
        kinds=("prompt",),
    ),
    Looks(
        program="Claude Code, which asks again for fewer tokens",
        form=ANTHROPIC,
        text=r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)",
        ignores_case=False,
        kinds=("answer",),
    ),
)
