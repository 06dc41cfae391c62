"""Stop tokens, end of sequence, and stop strings found in the decoded tail against a search in the whole text."""

import json
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tinsmith.errors import ConfigError, UnsupportedError
from tinsmith.operations import SamplingParams
from tinsmith_checkpoints.huggingface.stopping import DecodedTail, StopRules
from tinsmith_checkpoints.huggingface.text_steps import TextSteps

CORPUS = [
    "the cat sat on the mat",
    "the end. The End\n\nSTOP",
    "ein Ei: \u00e4\u00f6\u00fc \u2014 \U0001f600 \u4f60\u597d",
] * 5


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level BPE of 300 entries: some characters span several tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 50, "seed": 0, **fields})  # type: ignore[arg-type]  # fields vary by test


def first_stop(rules: StopRules, tokens: list[int], asked: SamplingParams) -> tuple[int, str | None]:
    watch = rules.watch(asked)
    for number, token in enumerate(tokens, start=1):
        reason = watch.push(token)
        if reason is not None:
            return number, reason
    return len(tokens), None


def naive_first_stop(tokenizer: Tokenizer, tokens: list[int], strings: tuple[str, ...]) -> int | None:
    for number in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:number], skip_special_tokens=False)
        if any(string in text for string in strings):
            return number
    return None


@pytest.mark.parametrize(
    "strings", [("\n\n",), ("the mat",), ("\u00f6",), ("\U0001f600 \u4f60",), ("<|end|>",), ("xyzzy", "E")]
)
def test_the_tail_finds_what_the_whole_text_holds(tokenizer: Tokenizer, strings: tuple[str, ...]) -> None:
    rng = np.random.default_rng(1)
    pieces = [*CORPUS[:3], "<|end|>", *strings]
    for _ in range(60):
        text = " ".join(rng.choice(pieces, size=8))
        tokens = tokenizer.encode(text).ids
        random_tokens = [int(token) for token in rng.integers(0, 300, size=40)]
        for sequence in (tokens, random_tokens + tokens, random_tokens):
            tail = DecodedTail(tokenizer, strings)
            found = next((n for n, token in enumerate(sequence, start=1) if tail.push(token)), None)
            assert found == naive_first_stop(tokenizer, sequence, strings)


class Counting:
    """A tokenizer that remembers how much it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.id_to_token = tokenizer.id_to_token
        self.get_added_tokens_decoder = tokenizer.get_added_tokens_decoder
        self.lengths: list[int] = []
        self._tokenizer = tokenizer

    def decode(self, tokens: list[int], **options: bool) -> str:
        self.lengths.append(len(tokens))
        return self._tokenizer.decode(tokens, **options)


@pytest.mark.parametrize("spelled", ["a", "\u0122"], ids=["text", "bytes that are no character"])
def test_a_token_costs_the_same_at_any_length_of_text_and_string(tokenizer: Tokenizer, spelled: str) -> None:
    token = tokenizer.token_to_id(spelled)
    assert token is not None
    counting = Counting(tokenizer)
    tail = DecodedTail(counting, ("a" * 16_000 + "b",))  # type: ignore[arg-type]
    for _ in range(500):
        tail.push(token)
    assert len(counting.lengths) <= 1000
    assert max(counting.lengths) <= 16


def test_bytes_that_are_no_character_hold_up_no_text(tokenizer: Tokenizer) -> None:
    """All but the last of them are certain, and the text behind them comes at once."""
    byte = tokenizer.token_to_id("\u0122")
    steps = TextSteps(tokenizer, skip_special_tokens=False)
    tokens = [byte] * 100 + tokenizer.encode("the end").ids + [byte] * 9 + tokenizer.encode("\u00f6").ids
    so_far = list(accumulate(map(steps.add, tokens), initial=""))
    assert so_far[-1] == tokenizer.decode(tokens, skip_special_tokens=False)
    assert so_far[90].count("\ufffd") > 80
    assert so_far[100 + len(tokenizer.encode("the end").ids)].endswith("the end")


def test_ids_without_a_token_are_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ST").ids + [5000] * 30 + tokenizer.encode("OP").ids
    tail = DecodedTail(tokenizer, ("STOP",))
    assert [tail.push(token) for token in ids].index(True) == len(ids) - 1


def test_eos_stops_with_and_without_listed_tokens(tokenizer: Tokenizer) -> None:
    rules = StopRules({7}, tokenizer)
    assert first_stop(rules, [3, 7, 4], params()) == (2, "stop")
    assert first_stop(rules, [3, 7, 4], params(stop_tokens=(4,))) == (2, "stop")
    assert first_stop(rules, [3, 4, 7], params(stop_tokens=(4,))) == (2, "stop")
    assert first_stop(rules, [7, 7, 7], params(stop_at_eos=False)) == (3, None)


def test_the_length_limit_and_a_stop_on_the_last_token(tokenizer: Tokenizer) -> None:
    rules = StopRules({7}, tokenizer)
    assert first_stop(rules, [1, 2, 3], params(max_tokens=2)) == (2, "length")
    assert first_stop(rules, [1, 7], params(max_tokens=2)) == (2, "stop")


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(UnsupportedError, match=r"stop strings \['x'\] need the model's tokenizer.json"):
        StopRules({1}, None).watch(params(stop_strings=("x",)))


@pytest.mark.parametrize("described", ["<|end|>", {"content": "<|end|>", "special": True}])
def test_the_tokenizer_names_one_more_end(tmp_path: Path, tokenizer: Tokenizer, described: object) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert StopRules.of_model(tmp_path).tokenizer is None
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert StopRules.of_model(tmp_path).eos_tokens == {5}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": described}))
    assert StopRules.of_model(tmp_path).eos_tokens == {5, tokenizer.token_to_id("<|end|>")}


def test_the_generation_config_names_the_ends_before_the_config(tmp_path: Path) -> None:
    assert StopRules.of_model(tmp_path).eos_tokens == set()
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert StopRules.of_model(tmp_path).eos_tokens == {5, 6}
    (tmp_path / "generation_config.json").write_text("{}")
    assert StopRules.of_model(tmp_path).eos_tokens == {2}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config.json' cannot be read as JSON"):
        StopRules.of_model(tmp_path)
