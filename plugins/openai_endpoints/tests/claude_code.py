"""Requests of the shapes that Claude Code 2.1 sends, written by hand: it was run on a server, and its fields noted."""

from typing import Any, Final

HEADERS: Final = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,context-management-2025-06-27,mid-conversation-system-2026-04-07",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "user-agent": "claude-cli/2.1.0 (external, cli)",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
}
CACHED: Final = {"cache_control": {"type": "ephemeral"}}
SYSTEM: Final = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0"},
    {"type": "text", "text": "be an agent for the command line", **CACHED},
    {"type": "text", "text": "the directory is /home/ann", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
]
BASH: Final = {
    "name": "Bash",
    "description": "runs a command",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "what to run"},
            "timeout": {"type": "number"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
    "eager_input_streaming": True,
}
READ: Final = {
    "name": "Read",
    "description": "reads a file",
    "input_schema": {"type": "object"},
    "strict": True,
    **CACHED,
}
METADATA: Final = {"user_id": '{"device_id": "d", "account_uuid": "", "session_id": "s"}'}
REMINDER: Final = {"type": "text", "text": "<system-reminder>mind the weather</system-reminder>"}
LATE: Final = {"role": "system", "content": "agents that there are: none"}
MAIN: Final[dict[str, Any]] = {
    "model": "toy",
    "system": SYSTEM,
    "messages": [{"role": "user", "content": [REMINDER, {"type": "text", "text": "list the files", **CACHED}]}, LATE],
    "tools": [BASH, READ],
    "metadata": METADATA,
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
TURNS: Final = [
    *MAIN["messages"],
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "ls does it", "signature": ""},
            {"type": "redacted_thinking", "data": "b64"},
            {"type": "text", "text": "let me look"},
            {
                "type": "tool_use",
                "id": "toolu_1",
                "name": "Bash",
                "input": {"command": "ls"},
                "caller": {"type": "direct"},
            },
            {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt", "is_error": False},
            {
                "type": "tool_result",
                "tool_use_id": "toolu_2",
                "content": [{"type": "text", "text": "<tool_use_error>no file_path</tool_use_error>"}],
                "is_error": True,
                **CACHED,
            },
            REMINDER,
        ],
    },
]
SMALL: Final[dict[str, Any]] = {
    "model": "toy",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "name this"}],
    "system": [{"type": "text", "text": "you write titles"}],
    "metadata": METADATA,
    "temperature": 1,
}
TAKEN: Final[dict[str, dict[str, Any]]] = {
    "the first turn": {**MAIN, "max_tokens": 64},
    "a turn with results": {**MAIN, "messages": TURNS, "max_tokens": 64},
    "with a budget for thinking": {
        **MAIN,
        "max_tokens": 64,
        "thinking": {"type": "enabled", "budget_tokens": 31999, "display": "summarized"},
    },
    "without betas": {name: MAIN[name] for name in ("model", "system", "messages", "tools", "stream")}
    | {"max_tokens": 64},
    "a title": SMALL,
    "a title, streamed": {**SMALL, "stream": True, "tools": [], "thinking": {"type": "disabled"}},
    "is there a quota": {
        "model": "toy",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "quota"}],
        "metadata": METADATA,
    },
}
REFUSED: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "a title in a form": (
        {**SMALL, "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        "output_config.format",
    ),
    "a search of Anthropic's": (
        {**SMALL, "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]},
        "tools.0.type",
    ),
    "a tool that must be called": (
        {**SMALL, "tools": [BASH], "tool_choice": {"type": "tool", "name": "Bash"}},
        "tool_choice.type",
    ),
    "an image": (
        {
            **SMALL,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": "aGk="},
                        }
                    ],
                }
            ],
        },
        "'image'",
    ),
}
