"""Train a byte-level BPE tokenizer on a small built-in text, with a family's special tokens and chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from tokenizers.trainers import BpeTrainer

from tinsmith_checkpoints.errors import UserError

_SPECIAL_TOKENS: Final[dict[str, dict[str, str]]] = {
    "qwen3": {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|end_of_text|>"},
}
_OTHER_TOKENS: Final = {"qwen3": ["<|im_start|>"], "llama": ["<|start_header_id|>", "<|end_header_id|>"]}
_CHAT_TEMPLATES: Final = {
    "qwen3": (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama": (
        "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
        "{{ message['content'] }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
}
_SENTENCES: Final = """\
The quick brown fox jumps over the lazy dog. A model learns from examples, one small step at a time.
English words become Pig Latin when the first letter moves to the end and is followed by ay.
What is the answer? It is forty two. How many? One two three four five six seven eight nine ten.
Please write a short story about the moon, the river and the people who live in the old stone house.
def main(): return [number + 1 for number in range(10) if number % 2 == 0]
User: Hello, can you help me? Assistant: Yes, of course. What would you like to know about science?
"""
_ONSETS: Final = (
    "b",
    "br",
    "c",
    "ch",
    "d",
    "f",
    "g",
    "gr",
    "h",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "r",
    "s",
    "st",
    "t",
    "w",
    "",
)
_VOWELS: Final = ("a", "e", "i", "o", "u", "ea", "ou")
_CODAS: Final = ("", "", "n", "r", "s", "t", "ng", "l", "ck")
_MIN_VOCAB_SIZE: Final = 300  # 256 bytes, the special tokens, and a few merges


def special_tokens(family: str) -> dict[str, str]:
    """Return the special tokens, keyed by their role in tokenizer_config.json."""
    return _SPECIAL_TOKENS[family]


def chat_template(family: str) -> str:
    return _CHAT_TEMPLATES[family]


def train_tokenizer(family: str, vocab_size: int) -> Tokenizer:
    """Return a tokenizer of exactly `vocab_size` tokens, special ones first. Raise UserError if that is too small."""
    if vocab_size < _MIN_VOCAB_SIZE:
        msg = f"vocab_size is {vocab_size}; a byte-level tokenizer needs at least {_MIN_VOCAB_SIZE}"
        raise UserError(msg)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.post_processor = ByteLevelProcessor(trim_offsets=False)
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*dict.fromkeys((*_SPECIAL_TOKENS[family].values(), *_OTHER_TOKENS[family]))],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(num_words=4 * vocab_size), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        msg = f"vocab_size is {vocab_size}; the built-in text yields {tokenizer.get_vocab_size()} tokens at most"
        raise UserError(msg)
    return tokenizer


def _corpus(num_words: int) -> Iterator[str]:
    """Yield real sentences, weighted, then made-up pronounceable words, frequent ones first (Zipf)."""
    for _ in range(50):
        yield _SENTENCES
    rng = np.random.default_rng(0)
    for rank in range(num_words):
        syllables = "".join(
            str(rng.choice(part)) for _ in range(rng.integers(1, 4)) for part in (_ONSETS, _VOWELS, _CODAS)
        )
        yield f" {syllables}" * (1 + 200 // (rank + 1))
