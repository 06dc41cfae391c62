"""The chat page in a browser: two checkpoints answer side by side, each with its own text, while it is drawn."""

from collections.abc import Callable, Iterator

import httpx
import pytest
import tinker
from browser import Browser
from openai_served import Patient, PatientBackends, checkpoint, toy_model, train_to_say

from tinsmith.testing.harness import RunningServer, running_server

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # what the SDK leaves open is its business


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("chat")
    models = [toy_model(directory / "toy", plugin="patient")]
    with running_server(directory / "data", models=models, extra_plugins=[PatientBackends()]) as server:
        yield server
        Patient.may_end.set()  # or the engine could not stop


def test_the_page_is_public_and_whole(server: RunningServer) -> None:
    for path in ("/chat", "/chat/chat.css", "/chat/chat.js"):
        answer = httpx.get(server.url + path, timeout=60).raise_for_status()
        assert "https://" not in answer.text
    assert httpx.get(f"{server.url}/chat/chat.html", timeout=60).status_code == 404


def test_two_checkpoints_answer_side_by_side(
    server: RunningServer, browser: Browser, take: Callable[[str], None]
) -> None:
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-ann")
    training = service.create_lora_training_client(base_model="toy", rank=8, seed=1).result()
    paths = []
    for letter in "km":
        train_to_say(service, "[user] hi<[assistant] " + 6 * letter, client=training)
        paths.append(checkpoint(training, letter))
    service.close("success").result()

    browser.look(width=1280, height=800, dark=False)
    browser.open(server.url + "/chat")
    browser.until("document.querySelector('#ask')?.hidden === false")
    browser.evaluate("document.querySelector('#key').value = 'tml-ann'; document.querySelector('#ask').requestSubmit()")
    browser.until("document.querySelectorAll('#model0 option').length === 3")
    for side, path in enumerate(paths):
        browser.evaluate(
            f"choose({side}, {path!r}); document.querySelector('#model{side}').dispatchEvent(new Event('change'))"
        )
    for field, value in (("temperature", "0"), ("tokens", "6"), ("text", "hi")):
        browser.evaluate(f"document.querySelector('#{field}').value = '{value}'")
    browser.evaluate("document.querySelector('#text').focus()")
    said = "[...document.querySelectorAll('.assistant')].map((each) => each.firstChild?.textContent)"
    Patient.may_end.clear()
    browser.press("Enter")
    browser.until(f"{said}.join() === 'kkk,mmm'")  # while both are drawn
    take("chat-streaming")
    Patient.may_end.set()
    browser.until("document.querySelectorAll('.assistant small').length === 2")
    assert browser.evaluate(said) == ["kkkkkk", "mmmmmm"]
    take("chat")
    browser.look(width=1280, height=800, dark=False)
    tops = "[...document.querySelectorAll('.said')].map((each) => each.getBoundingClientRect().top)"
    left, right = browser.evaluate(tops)
    assert left == right, "side by side"

    # a second turn goes on; what is refused is told, and forgotten
    browser.evaluate("document.querySelector('#text').value = 'and?'; document.querySelector('#say').requestSubmit()")
    browser.until("document.querySelectorAll('.assistant small').length === 4")
    browser.evaluate("document.querySelector('#tokens').value = '9999999'")
    browser.evaluate("document.querySelector('#text').value = 'more'; document.querySelector('#say').requestSubmit()")
    browser.until("document.querySelectorAll('.failed small').length === 2")
    assert "maximum context length" in browser.evaluate("document.querySelector('.failed').textContent")
    assert browser.evaluate("state.messages[0].length") == 4
    assert [each for each in browser.problems if "status of 40" not in each] == []
