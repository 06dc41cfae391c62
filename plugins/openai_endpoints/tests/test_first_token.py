"""The benchmark of streams, at a small scale."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from first_token import MODEL, Bench, Drawn, measure, report
from openai_served import toy_model

from tinsmith.testing.harness import running_server

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # what the SDK leaves open is its business

TOKENS = 6


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    model = toy_model(tmp_path / "toy").model_copy(update={"name": MODEL})
    with running_server(tmp_path / "data", models=[model]) as server:
        bench = Bench(server.url, tokens=TOKENS)
        yield bench
        bench.close()


def test_every_way_draws_the_same_tokens(bench: Bench) -> None:
    found = measure(bench, 2)
    assert {name: len(drawn) for name, drawn in found.items()} == {
        "SDK": 2,
        "SDK, one token": 2,
        "completions": 2,
        "chat": 2,
    }
    assert all(isinstance(each.said, list) and len(each.said) == TOKENS for each in found["SDK"])
    texts = {each.said for name in ("completions", "chat") for each in found[name]}
    assert [len(str(text)) for text in texts] == [TOKENS], "a token of the toy is a character"
    assert len(report(found, TOKENS)) == 8


def test_ratios_are_of_one_round_each() -> None:
    def drawn(*came_s: float) -> Drawn:
        return Drawn("", came_s)

    found = {
        "SDK": [drawn(10.0), drawn(20.0)],
        "SDK, one token": [drawn(4.0), drawn(8.0)],
        "completions": [drawn(2.0, 5.0), drawn(4.0, 10.0)],
        "chat": [drawn(4.0, 10.0), drawn(8.0, 20.0)],
    }
    ratios = {name: middle for name, (_, middle, _) in report(found, 4).items()}
    assert ratios == {
        "completions: first token / SDK's whole sample": 0.2,
        "completions: first token / SDK's sample of one": 0.5,
        "completions: last token / SDK's whole sample": 0.5,
        "completions: between tokens / SDK's": 0.5,
        "chat: first token / SDK's whole sample": 0.4,
        "chat: first token / SDK's sample of one": 1.0,
        "chat: last token / SDK's whole sample": 1.0,
        "chat: between tokens / SDK's": 1.0,
    }
