"""The fields of tokenizer.json, tokenizer_config.json and generation_config.json."""

from typing import Final

from tinsmith_checkpoints.huggingface.fields import OFF, FileFields, honoured, no_meaning, only

_LIBRARY: Final = honoured("by the library `tokenizers`")
_COMPONENT: Final = honoured("by the library `tokenizers`; what that ignores in it is refused by name")
_NEVER_CUT: Final = no_meaning("a text is neither cut nor padded; transformers switches this off, too, unless asked")

TOKENIZER_FIELDS: Final = FileFields(
    "tokenizer.json",
    {
        "version": only("1.0", otherwise="no other version is known"),
        "model": honoured("see the next table"),
        "added_tokens": _COMPONENT,
        "normalizer": _COMPONENT,
        "pre_tokenizer": _COMPONENT,
        "post_processor": _COMPONENT,
        "decoder": _COMPONENT,
        "truncation": _NEVER_CUT,
        "padding": _NEVER_CUT,
    },
)

TOKENIZER_MODEL_FIELDS: Final = FileFields(
    "model of tokenizer.json",
    {
        "type": only(*("BPE", "WordPiece", "WordLevel", "Unigram"), otherwise="no other kind is known"),
        "dropout": only(None, 0.0, otherwise="with it, a text has other tokens each time; set it to null"),
        **dict.fromkeys(
            (
                *("vocab", "merges", "unk_token", "unk_id", "continuing_subword_prefix", "end_of_word_suffix"),
                *("fuse_unk", "byte_fallback", "ignore_merges", "max_input_chars_per_word"),
            ),
            _LIBRARY,
        ),
    },
)

ADDED_TOKEN_FIELDS: Final = FileFields(
    "added_tokens of tokenizer.json",
    dict.fromkeys(("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"), _LIBRARY),
)

_SPECIAL: Final = honoured("transformers' way: a token that tokenizer.json lacks is added; chat templates see its text")
_SPECIAL_TOKENS: Final = ("bos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OF_THE_FILE: Final = no_meaning("tokenizer.json decides; transformers does not read it beside that file, either")
_OF_BATCHES: Final = no_meaning("a text is neither cut nor padded")
_OF_LOADING: Final = no_meaning("how transformers finds and makes the tokenizer")
_OF_SLOW: Final = no_meaning("of tokenizers without tokenizer.json, which are not read")

TOKENIZER_CONFIG_FIELDS: Final = FileFields(
    "tokenizer_config.json",
    {
        "chat_template": honoured("`default` and `tool_use`, unless chat_template.jinja stands beside it"),
        "eos_token": honoured("ends a sequence; else as other special tokens"),
        **dict.fromkeys((*_SPECIAL_TOKENS, "added_tokens_decoder"), _SPECIAL),
        **dict.fromkeys(
            ("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"), _SPECIAL
        ),
        "split_special_tokens": honoured("true: special tokens in a text are read as text"),
        "clean_up_tokenization_spaces": no_meaning(
            "answers are decoded by tokenizer.json alone; transformers ignores it for BPE, too"
        ),
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": only(
            *OFF, otherwise="answers are decoded by tokenizer.json alone"
        ),
        "fix_mistral_regex": only(
            *OFF, otherwise="load the tokenizer with it in transformers, and save it: tokenizer.json is then mended"
        ),
        **dict.fromkeys(
            ("add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case", "strip_accents", "trim_offsets"),
            _OF_THE_FILE,
        ),
        "tokenize_chinese_chars": _OF_THE_FILE,
        "model_max_length": no_meaning("the context window is the model's"),
        "max_len": no_meaning("the context window is the model's"),
        **dict.fromkeys(
            (
                *("padding_side", "truncation_side", "pad_to_multiple_of", "pad_token_type_id", "truncation"),
                *("padding", "max_length", "stride", "truncation_strategy", "model_input_names"),
                *("tokenizer_truncation", "tokenizer_padding"),
            ),
            _OF_BATCHES,
        ),
        **dict.fromkeys(
            (
                *("tokenizer_class", "processor_class", "auto_map", "name_or_path", "tokenizer_file", "vocab_file"),
                *("merges_file", "special_tokens_map_file", "use_fast", "from_slow", "backend", "is_local", "verbose"),
                *("local_files_only", "init_inputs", "gguf_file", "device_map", "cache_dir", "revision", "errors"),
                *("tokenizer_object", "vocab", "merges", "unk_id", "post_processor", "tokenizer", "files_loaded"),
                *("_json_padding", "_json_truncation", "_spm_precompiled_charsmap"),
            ),
            _OF_LOADING,
        ),
        **dict.fromkeys(
            ("legacy", "sp_model_kwargs", "spaces_between_special_tokens", "use_default_system_prompt"), _OF_SLOW
        ),
        "response_schema": no_meaning("tool calls are found as the chat template writes them"),
        "response_template": no_meaning("tool calls are found as the chat template writes them"),
    },
)

_REQUESTS: Final = no_meaning("a request says how it is sampled; without a word of it, from what the model computes")
_RUNNING: Final = no_meaning("how transformers computes and what it returns")
_BEAMS: Final = no_meaning("of beams and assistants, which there are none of")

GENERATION_CONFIG_FIELDS: Final = FileFields(
    "generation_config.json",
    {
        "eos_token_id": honoured("a number, or several: each ends a sequence, unless `ignore_eos`"),
        **dict.fromkeys(
            (
                *("do_sample", "temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff"),
                *("eta_cutoff", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time"),
                *("stop_strings", "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size"),
                *("encoder_no_repeat_ngram_size", "bad_words_ids", "force_words_ids", "forced_bos_token_id"),
                *("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
                *("exponential_decay_length_penalty", "guidance_scale", "token_healing", "watermarking_config"),
                *("renormalize_logits", "remove_invalid_values", "num_return_sequences", "constraints"),
                *("penalty_alpha", "dola_layers"),
            ),
            _REQUESTS,
        ),
        **dict.fromkeys(
            (
                *("num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping"),
                *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight"),
                *("assistant_lookbehind", "is_assistant", "max_matching_ngram_size", "num_assistant_tokens"),
                *("num_assistant_tokens_schedule", "prompt_lookup_num_tokens", "speculation_type", "target_lookbehind"),
                *("use_mtp", "low_memory"),
            ),
            _BEAMS,
        ),
        **dict.fromkeys(
            (
                *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
                *("compile_config", "disable_compile", "continuous_batching_config", "output_attentions"),
                *("output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
                *("transformers_version", "_from_model_config", "_commit_hash", "generation_kwargs"),
            ),
            _RUNNING,
        ),
        **dict.fromkeys(
            ("bos_token_id", "pad_token_id", "decoder_start_token_id", "force_bos_token_to_be_generated"),
            no_meaning("no token is put before or behind a request's own"),
        ),
    },
)
