"""Calls in tags: Qwen3-Coder, Qwen3.5, Nemotron 3 and Seed-OSS, and those of GLM."""

from tinsmith_openai.tool_calls.answers import Calls, Grammar
from tinsmith_openai.tool_calls.arguments import Arguments
from tinsmith_openai.tool_calls.json_calls import close
from tinsmith_openai.tool_calls.source import Parse, Source


def _in_name(character: str) -> bool:
    return character.isalnum() or character in "_-./: "


def functions(close_mark: str, *, breaks: bool) -> Grammar:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`, several in a row, and the end of the tag around.

    `breaks`: each value stands on lines of its own.
    """

    def grammar(source: Source, calls: Calls) -> Parse[bool]:
        found = False
        while True:
            place = source.at
            yield from source.space()
            if (yield from source.literal("<function=")) is None or not (
                yield from function(source, calls, breaks=breaks)
            ):
                source.at = place
                break
            found = True
        if found:
            yield from close(source, close_mark)
        return found

    return grammar


def function(source: Source, calls: Calls, *, breaks: bool = True) -> Parse[bool]:
    """Read a function behind `<function=`."""
    name = yield from source.while_true(_in_name)
    if not name.strip() or (yield from source.literal(">")) is None:
        return False
    yield from source.space()
    ahead = yield from source.ahead("<parameter=", "</function>", "{")
    if ahead is None:
        return False
    name = name.strip()
    yield calls.begin(name)
    if ahead == "{":  # a form that Llama 3.1 knows as well
        yield from source.json(calls.arguments)
        yield from close(source, "</function>")
        return True
    arguments = Arguments(calls, name)
    while True:
        yield from source.space()
        if (yield from source.literal("<parameter=")) is None:
            break
        key = yield from source.until(">")
        if key is None:
            return True
        yield from source.literal(">")
        ends = ("</parameter>", "<parameter=", "</function>")
        mark = yield from arguments.read(source, key.strip(), ends, breaks=breaks)
        if mark is None:
            return True
        if mark != ends[0]:  # the model has forgotten the end
            source.at -= len(mark)
    if (yield from source.literal("</function>")) is not None or (yield from source.ahead("</")) is not None:
        yield from arguments.end()
    return True


def pairs(source: Source, calls: Calls) -> Parse[bool]:
    """GLM: `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""
    yield from source.space()
    name = yield from source.while_true(_in_name)
    yield from source.space()
    name, ahead = name.strip(), (yield from source.ahead("<arg_key>", "</tool_call>"))
    if not name or ahead is None or (ahead == "</tool_call>" and name not in calls.tools):
        return False
    yield calls.begin(name)
    arguments = Arguments(calls, name)
    while (yield from source.literal("<arg_key>")) is not None:
        key = yield from source.until("</arg_key>")
        if key is None:
            return True
        yield from source.literal("</arg_key>")
        yield from source.space()
        if (yield from source.literal("<arg_value>")) is None:
            return True
        if (yield from arguments.read(source, key.strip(), ["</arg_value>"])) is None:
            return True
        yield from source.space()
    if (yield from source.literal("</tool_call>")) is not None:
        yield from arguments.end()
    return True
