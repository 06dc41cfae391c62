"""Reads answers: reasoning first, then text and calls in the form of the model's family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tinsmith_checkpoints.huggingface import Json
from tinsmith_openai.tool_calls.events import CallArguments, CallBegins, Content, Event, Reasoning, Said, merged
from tinsmith_openai.tool_calls.source import Parse, Source
from tinsmith_openai.tool_calls.trim import Trim

Tools = Mapping[str, Mapping[str, Json]]
"""The JSON schema of each tool's arguments, by name."""


@dataclass(slots=True)
class Calls:
    """The calls of one answer, as far as they are read."""

    tools: Tools
    make_id: Callable[[int], str]
    number: int = 0
    read_in_vain: int = 0  # characters behind marks that will be read again

    def begin(self, name: str, identifier: str | None = None) -> CallBegins:
        self.number += 1
        index = self.number - 1
        spelled = name.encode(errors="replace").decode()  # JSON may write half of a character
        return CallBegins(index=index, id=identifier or self.make_id(index), name=spelled)

    def arguments(self, text: str) -> CallArguments:
        """Return more arguments of the last call."""
        return CallArguments(index=self.number - 1, text=text)


Grammar = Callable[[Source, Calls], Parse[bool]]
"""Reads the calls behind a mark. False if there are none: then nothing was yielded."""

Marks = tuple[str, str]
"""What begins and ends something."""

THINK: Final[Marks] = ("<think>", "</think>")
_MOST_IN_VAIN: Final = 1 << 18
"""Characters behind marks that may be read again as text. Then marks are text, or many would take for ever."""

SPELLED: Final = frozenset({"<think>", "<seed:think>"})
"""Marks that a model may also mention. They count at the beginning of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a family of models writes what it says."""

    name: str
    shown: tuple[str, ...]
    """A chat template that has one of these asks for this form."""
    calls: Mapping[str, Grammar] = field(default_factory=dict)  # by the mark before them
    at_start: Grammar | None = None
    """Reads calls that no mark announces, where the answer begins."""
    passed_over: tuple[str, ...] = ()  # marks around plain text
    inner: tuple[str, ...] = ()
    """Further marks within calls. Those of all marks that are special tokens stay in the text that is read."""
    whole: Grammar | None = None
    """Reads entire answers, in place of all others."""
    short_ids: bool = False
    """Whether templates demand ids of nine letters and digits."""


_TEXT: Final = Form(name="text", shown=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What it takes to read the answers to one request."""

    form: Form | None  # None: there are no tools, or no answer is a call
    reasoning: Marks | None  # None: the model's template has none, so that what looks like it stays text
    in_reasoning: bool  # the prompt has begun it
    tools: Tools
    make_id: Callable[[int, int], str]
    """Returns the id of a call, by the indices of choice and call. The same ones each time."""

    def reader(self, choice: int) -> "AnswerReader":
        return AnswerReader(self, choice)

    def read(self, choice: int, text: str) -> Said:
        reader = self.reader(choice)
        reader.add(text)
        reader.end()
        return reader.said


class AnswerReader:
    """Reads one answer as it comes."""

    def __init__(self, reading: Reading, choice: int) -> None:
        self.said = Said()
        self._source = Source()
        calls = Calls(reading.tools, lambda index: reading.make_id(choice, index))
        self._events = _answer(reading, self._source, calls)
        self._trim = Trim()
        self._ended = False

    def add(self, text: str) -> list[Event]:
        """Return what is certain now, without what was returned before."""
        self._source.add(text)
        return self._heard()

    def end(self) -> list[Event]:
        """Return the rest."""
        self._source.end()
        return self._heard()

    def _heard(self) -> list[Event]:
        heard: list[Event] = []
        while not self._ended:
            try:
                event = next(self._events)
            except StopIteration:
                self._ended = True
                heard += self._trim.end()
                break
            if event is None:
                break
            heard += self._trim.add(event)
        told = merged(heard)
        for event in told:
            self.said.add(event)
        return told


def _answer(reading: Reading, source: Source, calls: Calls) -> Parse[None]:
    form = reading.form or _TEXT
    if form.whole is not None:
        yield from form.whole(source, calls)
        return
    begins, ends = reading.reasoning or THINK
    thought = Content if reading.reasoning is None else Reasoning
    if reading.in_reasoning:
        yield from _thought(source, ends, thought)
    at_start = form.at_start
    while True:
        if at_start is not None:
            at_start = yield from _begun(source, calls, at_start, begins)
        mark = yield from source.text_until([begins, *form.calls, *form.passed_over], Content)
        if mark is None:
            return
        if mark == begins:
            counts = source.mark_begins_line or begins not in SPELLED
            if thought is Content or not counts:
                yield Content(mark)
            if counts:
                yield from _thought(source, ends, thought)
        elif mark in form.calls:
            yield from _called(source, calls, mark, form.calls[mark])


def _called(source: Source, calls: Calls, mark: str, grammar: Grammar) -> Parse[None]:
    """Read calls behind a mark. If there are none, the mark is text."""
    place = source.looked = source.at
    if calls.read_in_vain < _MOST_IN_VAIN and (yield from grammar(source, calls)):
        calls.read_in_vain += max(0, source.looked - source.at)
        return
    calls.read_in_vain += max(source.looked, source.at) - place
    source.at = place
    yield Content(mark)


def _begun(source: Source, calls: Calls, grammar: Grammar, begins: str) -> Parse[Grammar | None]:
    """Read the calls at the beginning. Return the grammar if there is reasoning before it, and so a beginning later."""
    place = source.at
    yield from source.space()
    if (yield from source.ahead(begins)) is not None:
        source.at = place
        return grammar
    if not (yield from grammar(source, calls)):
        source.at = place
    return None


def _thought(source: Source, ends: str, emit: Callable[[str], Event]) -> Parse[None]:
    yield emit("")
    mark = yield from source.text_until([ends], emit)
    if mark is not None and emit is Content:
        yield Content(mark)
