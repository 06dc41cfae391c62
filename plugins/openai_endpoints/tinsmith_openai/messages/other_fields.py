"""Fields of Anthropic's requests that have no effect here, as in `tinsmith_openai.other_fields`."""

from typing import Final

from tinsmith_openai.other_fields import OtherFields, meaningless, off, only

_CACHED: Final = meaningless("prefixes of prompts are always cached")
_LABEL: Final = meaningless("a label for the provider's records")
_NOTE: Final = meaningless("a note of the program that keeps the conversation")
_OTHER_MODELS: Final = off("the model that is named answers; ask for another one yourself")

OF_ALL: Final[OtherFields] = {"cache_control": _CACHED}

OF_REQUESTS: Final[OtherFields] = {
    **OF_ALL,
    "metadata": _LABEL,
    "user_profile_id": _LABEL,
    "workspace_id": _LABEL,
    "diagnostics": meaningless("usage says how many tokens came from the cache"),
    "service_tier": only("there is one tier", ("auto", "standard_only")),
    "speed": only("there is one speed", ("standard",)),
    "inference_geo": only("the server is where it is", ("global",)),
    "billing_policy": off("nothing is billed"),
    "fallbacks": _OTHER_MODELS,
    "fallback_credit_token": _OTHER_MODELS,
    "container": off("nothing is carried out here; send tools of your own"),
    "mcp_servers": off("nothing is carried out here; send tools of your own"),
    "thread": off("send the whole conversation"),
    "compaction": off("no conversation is shortened here; shorten it yourself"),
    "betas": off("send them as the header anthropic-beta, which is not read"),
}

OF_BLOCKS: Final[OtherFields] = {**OF_ALL, "citations": _NOTE, "caller": _NOTE, "toolset_name": _NOTE}

OF_TOOLS: Final[OtherFields] = {
    **OF_ALL,
    "strict": meaningless("arguments are read by the tool's schema, and not forced into it"),
    "eager_input_streaming": meaningless("the input of a call is sent as it is read"),
    "defer_loading": off("every tool is shown to the model"),
    "allowed_callers": only("the model calls tools itself", (["direct"], [])),
    "input_examples": off("write them into the description"),
}

OF_TOOL_CHOICES: Final[OtherFields] = {
    **OF_ALL,
    "disable_parallel_tool_use": off("a model calls as many tools as it likes; carry out the first call alone"),
}

OF_THINKING: Final[OtherFields] = {
    **OF_ALL,
    "budget_tokens": meaningless("max_tokens bounds thinking and answer together"),
    "display": meaningless("what was thought is shown whole"),
    "block_binding": _NOTE,
}

OF_OUTPUT: Final[OtherFields] = {
    **OF_ALL,
    "format": off("answers are text; describe the form in the prompt"),
    "task_budget": off("max_tokens bounds an answer"),
}
