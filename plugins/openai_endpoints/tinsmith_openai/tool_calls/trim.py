"""Leaves out the blanks around reasoning and calls. Without either, a text stays as it is."""

from collections.abc import Iterator

from tinsmith_openai.tool_calls.events import CallBegins, Content, Event, Reasoning


class Trim:
    def __init__(self) -> None:
        self._blanks = ""  # at the end of the text so far
        self._blanks_of_reasoning = ""
        self._has_said = self._has_called = False
        self._has_thought = False  # perhaps nothing
        self._has_reasoned = False
        self._interrupted = False  # the reasoning, by something else

    def add(self, event: Event) -> Iterator[Event]:
        match event:
            case Reasoning(text):
                yield from self._reasoning(text)
            case Content(text):
                yield from self._content(text)
            case CallBegins():
                self._blanks, self._has_called, self._interrupted = "", True, True
                yield event
            case _:
                yield event

    def end(self) -> Iterator[Event]:
        if self._blanks and not self._has_called and (self._has_said or not self._has_thought):
            yield Content(self._blanks)

    def _content(self, text: str) -> Iterator[Event]:
        text = self._blanks + text
        if not self._has_said and (self._has_thought or self._has_called):
            text = text.lstrip()
        words = text.rstrip()
        self._blanks = text[len(words) :]
        if words:
            self._has_said = self._interrupted = True
            yield Content(words)

    def _reasoning(self, text: str) -> Iterator[Event]:
        self._has_thought = True
        if not self._has_said:
            self._blanks = ""
        text = self._blanks_of_reasoning + text
        if self._interrupted or not self._has_reasoned:
            text = text.lstrip()
        words = text.rstrip()
        self._blanks_of_reasoning = text[len(words) :]
        if words:
            separator = "\n\n" if self._interrupted and self._has_reasoned else ""
            self._has_reasoned, self._interrupted = True, False
            yield Reasoning(separator + words)
