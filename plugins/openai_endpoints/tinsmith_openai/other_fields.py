"""Fields of OpenAI's requests, and of vLLM's, that have no effect here.

Each is taken at the values that ask for nothing else than what is done, and refused by name at any other, with what to
do instead; or it has no meaning, and may hold anything. A test walks the fields that OpenAI's package and vLLM know,
and fails for one that is neither here nor in `bodies`.
"""

from collections.abc import Mapping
from typing import Final

from tinsmith import OtherField
from tinsmith_checkpoints.huggingface import Json

OtherFields = Mapping[str, OtherField]


def only(note: str, neutral: tuple[Json, ...] = ()) -> OtherField:
    """Make a field that may hold these values, or null."""
    return OtherField(note, neutral)


def off(note: str, neutral: tuple[Json, ...] = ()) -> OtherField:
    """Make a field that may hold nothing, in any form, or these values."""
    return OtherField(note, (False, 0, "", [], {}, *neutral))


def meaningless(note: str) -> OtherField:
    return OtherField(note, None)


_LOGITS: Final = "only temperature, top_k and top_p change what is drawn"
_FORMS: Final = "answers are text; describe the form in the prompt"
_CACHED: Final = meaningless("prefixes of prompts are always cached")
_LABEL: Final = meaningless("a label for the provider's records")
_MULTIMODAL: Final = off("models are of text")
_INNER: Final = off("a matter between parts of vLLM")
_SHOWN: Final = off("only token_ids and prompt_token_ids are added, by return_token_ids")

OF_SAMPLING: Final[OtherFields] = {
    # OpenAI's
    "frequency_penalty": off(_LOGITS),
    "presence_penalty": off(_LOGITS),
    "logit_bias": off(_LOGITS),
    "best_of": only("all that are drawn are returned; ask for more by n", (1,)),
    "service_tier": only("there is one tier", ("auto", "default")),
    "store": off("no answer is kept for later requests"),
    "user": _LABEL,
    "metadata": _LABEL,
    "safety_identifier": _LABEL,
    "prompt_cache_key": _CACHED,
    "prompt_cache_options": _CACHED,
    "prompt_cache_retention": _CACHED,
    # vLLM's
    "use_beam_search": off("samples are independent; ask for more by n"),
    "min_p": off(_LOGITS),
    "repetition_penalty": only(_LOGITS, (1,)),
    "length_penalty": meaningless("there is no beam search"),
    "watermarking": off(_LOGITS),
    "early_stopping": off("there is no beam search"),
    "include_stop_str_in_output": off("the text ends before a stop string; return_token_ids shows all that was drawn"),
    "ignore_eos": off("a sequence ends with the model's end"),
    "min_tokens": off("a sequence ends with the model's end"),
    "skip_special_tokens": only("texts have no special tokens; return_token_ids shows them", (True,)),
    "spaces_between_special_tokens": meaningless("texts have no special tokens"),
    "detokenize": only("answers have their text", (True,)),
    "truncate_prompt_tokens": only("no prompt is cut; shorten it", (-1,)),
    "truncation_side": meaningless("no prompt is cut"),
    "prompt_logprobs": only("send the prompt to /completions with echo and logprobs"),
    "logprob_token_ids": off("logprobs are of the likeliest tokens"),
    "allowed_token_ids": off(_LOGITS),
    "bad_words": off(_LOGITS),
    "structured_outputs": off(_FORMS),
    "guided_json": off(_FORMS),
    "guided_regex": off(_FORMS),
    "guided_choice": off(_FORMS),
    "guided_grammar": off(_FORMS),
    "guided_decoding_backend": off(_FORMS),
    "priority": only("tenants take turns", (0,)),
    "request_id": meaningless("the answer has an id of its own"),
    "session_id": meaningless("a conversation is known by its messages"),
    "return_tokens_as_token_ids": _SHOWN,
    "return_token_offsets": _SHOWN,
    "return_prompt_text": _SHOWN,
    "return_mm_kwargs": meaningless("models are of text"),
    "routed_experts_prompt_start": _INNER,
    "cache_salt": off("prefixes are cached by their tokens alone"),
    "kv_transfer_params": _INNER,
    "ec_transfer_params": _INNER,
    "vllm_xargs": _INNER,
    "repetition_detection": off("a sequence ends at max_tokens, a stop or the model's end"),
    "thinking_token_budget": only("max_tokens bounds thinking and answer together", (-1,)),
    "stream_interval": meaningless("tokens are sent as they come, together if they come within 20 ms"),
    "logits_processors": off(_LOGITS),
}

OF_COMPLETIONS: Final[OtherFields] = {
    **OF_SAMPLING,
    "suffix": off("text is continued, not filled in"),
    "prompt_embeds": off("prompts are text or tokens"),
    "add_special_tokens": only("texts are encoded with the model's special tokens; send tokens", (True,)),
    "response_format": only(_FORMS, ({"type": "text"},)),
}

OF_CHATS: Final[OtherFields] = {
    **OF_SAMPLING,
    "audio": _MULTIMODAL,
    "parallel_tool_calls": only("a model calls as many tools as it likes; carry out the first call alone", (True,)),
    "modalities": only("models are of text", (["text"],)),
    "functions": off("send tools"),
    "function_call": off("send tools and tool_choice", ("none", "auto")),
    "moderation": off("nothing is moderated"),
    "prediction": meaningless("a guess that would save time, and changes no answer"),
    "verbosity": only("say it in the prompt", ("medium",)),
    "web_search_options": off("a search is a tool of yours: send it in tools"),
    "include_reasoning": only("answers have all that the model says", (True,)),
    "echo": off("the messages are yours already"),
    "add_generation_prompt": only("a chat asks for an answer; send your own prompt to /completions", (True,)),
    "continue_final_message": off("send the prompt to /completions"),
    "add_special_tokens": off("the chat template writes them"),
    "documents": off("write them into a message"),
    "chat_template": off("chats use the template of the model; send your own prompt to /completions"),
    "media_io_kwargs": _MULTIMODAL,
    "mm_processor_kwargs": _MULTIMODAL,
}

OF_STREAM_OPTIONS: Final[OtherFields] = {
    "include_obfuscation": off("events are not padded"),
    "continuous_usage_stats": off("the last event has the usage: include_usage"),
}

_NOTE: Final = meaningless("a note of the program that keeps the conversation")

OF_MESSAGES: Final[OtherFields] = {
    "audio": _MULTIMODAL,
    "function_call": off("send tool_calls"),
    "refusal": off("send it as content"),
    "annotations": _NOTE,
    "cache_control": _CACHED,
    "provider_specific_fields": _NOTE,
    "reasoning": off("send reasoning_content"),
    "reasoning_details": off("send reasoning_content"),
    "thinking_blocks": off("send reasoning_content"),
    "id": _NOTE,
    "status": _NOTE,
}

OF_PARTS: Final[OtherFields] = {"cache_control": _CACHED, "prompt_cache_breakpoint": _CACHED, "annotations": _NOTE}

OF_CALLS: Final[OtherFields] = {
    "index": meaningless("calls come in their order"),
    "caller": _NOTE,
    "provider_specific_fields": _NOTE,
}

OF_TOOLS: Final[OtherFields] = {"cache_control": _CACHED, "defer_loading": off("every tool is shown to the model")}
