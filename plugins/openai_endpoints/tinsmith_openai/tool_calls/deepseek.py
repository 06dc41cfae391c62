"""The calls of DeepSeek: V3 and R1, V3.1, and V3.2 in tags."""

import re
from collections.abc import Callable
from typing import Final

from tinsmith_openai.tool_calls.answers import Calls
from tinsmith_openai.tool_calls.arguments import Arguments
from tinsmith_openai.tool_calls.json_calls import close
from tinsmith_openai.tool_calls.named_calls import named_call
from tinsmith_openai.tool_calls.source import Parse, Source

_BAR: Final = "\N{FULLWIDTH VERTICAL LINE}"
_BLANK: Final = "\N{LOWER ONE EIGHTH BLOCK}"


def _mark(words: str) -> str:
    return f"<{_BAR}{words.replace(' ', _BLANK)}{_BAR}>"


CALLS, _CALLS_END = _mark("tool calls begin"), _mark("tool calls end")
_CALL, _SEPARATOR, _CALL_END = _mark("tool call begin"), _mark("tool sep"), _mark("tool call end")
MARKS: Final = (_CALLS_END, _CALL, _SEPARATOR, _CALL_END)

DSML: Final = f"{_BAR}DSML{_BAR}"
TAGGED_CALLS: Final = (f"<{DSML}function_calls>", f"<{DSML}tool_calls>")
_TAGGED_ENDS: Final = tuple(mark.replace("<", "</") for mark in TAGGED_CALLS)
_INVOKE, _INVOKE_END = f'<{DSML}invoke name="', f"</{DSML}invoke>"
_PARAMETER, _PARAMETER_END = f"<{DSML}parameter ", f"</{DSML}parameter>"
_DESCRIBED: Final = re.compile(re.escape(_PARAMETER) + r'name="([^"]*)"(?: string="(true|false)")?')


def deepseek(source: Source, calls: Calls) -> Parse[bool]:
    """V3 and R1: `function`, a separator, the name, and JSON in a block of code. V3.1: the name, a separator, JSON."""
    return (yield from _in_a_row(source, calls, _CALL, _deepseek_call, _CALLS_END))


def _deepseek_call(source: Source, calls: Calls) -> Parse[bool]:
    name = yield from source.until(_SEPARATOR)
    if name is None:
        return False
    yield from source.literal(_SEPARATOR)
    yield from source.space()
    if (yield from source.ahead("{")) is None:
        name = yield from source.until("\n")
        yield from source.space()
        if name is None or (yield from source.literal("```json")) is None:
            return False
        yield from source.space()
    if not (yield from named_call(source, calls, name.strip())):
        return False
    yield from close(source, "```")
    yield from close(source, _CALL_END)
    return True


def dsml(source: Source, calls: Calls) -> Parse[bool]:
    """DeepSeek V3.2: invocations with named parameters, each of which says whether it is a string."""
    return (yield from _in_a_row(source, calls, _INVOKE, _invocation, *_TAGGED_ENDS))


def _invocation(source: Source, calls: Calls) -> Parse[bool]:
    name = yield from source.until('">')
    if name is None:
        return False
    yield from source.literal('">')
    yield calls.begin(name)
    arguments = Arguments(calls, name)
    while True:
        yield from source.space()
        if (yield from source.ahead(_PARAMETER)) is None:
            break
        head = yield from source.until(">")
        described = _DESCRIBED.fullmatch(head or "")
        if described is None:
            return True
        yield from source.literal(">")
        string = None if described[2] is None else described[2] == "true"
        if (yield from arguments.read(source, described[1], [_PARAMETER_END], string=string)) is None:
            return True
    if (yield from source.literal(_INVOKE_END)) is not None:
        yield from arguments.end()
    return True


def _in_a_row(
    source: Source, calls: Calls, mark: str, read: Callable[[Source, Calls], Parse[bool]], *ends: str
) -> Parse[bool]:
    """Read calls that each begin with a mark, and the end of all. Return whether there was one."""
    found = False
    while True:
        place = source.at
        yield from source.space()
        if (yield from source.literal(mark)) is None or not (yield from read(source, calls)):
            source.at = place
            break
        found = True
    if found:
        yield from close(source, *ends)
    return found
