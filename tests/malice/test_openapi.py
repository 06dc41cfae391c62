"""Fuzzes every route with what the server's own OpenAPI description allows, and with what it does not."""

import time
from pathlib import Path
from typing import Any

import orjson
import pytest
import request_walk
import requests
import schemathesis
from attacker import Answer
from fuzzing import FORMS, Form, Properties, examples_of, fuzzed_server
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

HANG_S = 300.0


class Objects:
    """Real objects of the attacker's, whose names take the place of made-up ones: most routes start with a look-up."""

    def __init__(self, properties: Properties) -> None:
        attacker = properties.attacker
        attacker.end_session()
        self._seq_id = 1
        self._names = request_walk.objects(attacker)

    def put_into(self, case: Case) -> None:
        for place in (case.path_parameters, case.body):
            if isinstance(place, dict):
                place.update({name: value for name, value in self._names.items() if name in place})
        if isinstance(case.body, dict) and "model_id" in case.body and "seq_id" in case.body:
            self._seq_id += 1
            case.body["seq_id"] = self._seq_id


def fuzz(operation: Any, objects: Objects, url: str, properties: Properties, form: Form, number: int) -> None:
    """Any: schemathesis's types of operations are not public."""
    with requests.Session() as session:

        def check(example: tuple[Case, bool]) -> None:
            case, real = example
            if real:
                objects.put_into(case)
            properties.check_answer(_answer(case, url, session, properties.attacker.key))

        for mode in _modes(operation):
            strategy = operation.as_strategy(generation_mode=mode)
            examples_of(st.tuples(strategy, st.booleans()), check, form, number)


def _modes(operation: Any) -> list[GenerationMode]:
    """What is not allowed can be made of a body; of a route with nothing but names in its path almost nothing can."""
    return [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if operation.body else [])]


def _answer(case: Case, url: str, session: requests.Session, key: str) -> Answer:
    began = time.monotonic()
    answer = case.call(base_url=url, session=session, headers={"X-API-Key": key}, timeout=HANG_S)
    return Answer(answer.status_code, answer.content, time.monotonic() - began)


@pytest.mark.parametrize("form", FORMS)
def test_no_request_is_answered_with_a_fault_of_ours(form: Form, tmp_path: Path) -> None:
    with fuzzed_server(form, tmp_path) as (url, pids), Properties(url, pids) as properties:
        description = orjson.loads(requests.get(f"{url}/openapi.json", timeout=HANG_S).content)
        found = schemathesis.openapi.from_dict(description).get_all_operations()
        operations = [operation.ok() for operation in found]
        objects, began, number = Objects(properties), time.monotonic(), 0
        while number == 0 or time.monotonic() - began < form.seconds:
            for operation in operations:
                fuzz(operation, objects, url, properties, form, number)
                if "finish" in operation.path or operation.method == "delete":
                    objects = Objects(properties)
            number += 1
        properties.check_neighbour()
        properties.check_memory()
        print(f"\n{len(operations)} routes, {properties.summary}, {number} seeds")
