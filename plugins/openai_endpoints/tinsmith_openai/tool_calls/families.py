"""The table of families: which form of calls a chat template asks its model for."""

from typing import Final

from tinsmith_openai.tool_calls.answers import THINK, Form, Marks
from tinsmith_openai.tool_calls.deepseek import CALLS as DEEPSEEK_CALLS
from tinsmith_openai.tool_calls.deepseek import DSML, TAGGED_CALLS, deepseek, dsml
from tinsmith_openai.tool_calls.deepseek import MARKS as DEEPSEEK_MARKS
from tinsmith_openai.tool_calls.gemma_calls import calls_with
from tinsmith_openai.tool_calls.harmony import MARKS as HARMONY_MARKS
from tinsmith_openai.tool_calls.harmony import harmony
from tinsmith_openai.tool_calls.json_calls import between
from tinsmith_openai.tool_calls.named_calls import kimi, mistral
from tinsmith_openai.tool_calls.python_calls import bare, python_list
from tinsmith_openai.tool_calls.xml_calls import function, functions, pairs

_XML: Final = functions("</tool_call>", breaks=True)
_COHERE_TEXT: Final = tuple(f"<|{edge}_{what}|>" for edge in ("START", "END") for what in ("RESPONSE", "TEXT"))

FORMS: Final = (
    Form(name="gpt-oss", shown=("<|channel|>",), whole=harmony, passed_over=HARMONY_MARKS),
    Form(name="DeepSeek V3.2", shown=(DSML,), calls=dict.fromkeys(TAGGED_CALLS, dsml), inner=(DSML,)),
    Form(name="DeepSeek", shown=(DEEPSEEK_CALLS,), calls={DEEPSEEK_CALLS: deepseek}, inner=DEEPSEEK_MARKS),
    Form(
        name="Kimi-K2",
        shown=("<|tool_calls_section_begin|>",),
        calls={"<|tool_calls_section_begin|>": kimi},
        inner=tuple(
            f"<|tool_{what}|>" for what in ("call_begin", "call_argument_begin", "call_end", "calls_section_end")
        ),
    ),
    Form(name="GLM", shown=("<arg_key>",), calls={"<tool_call>": pairs}),
    Form(
        name="Seed-OSS",
        shown=("<seed:tool_call>",),
        calls={"<seed:tool_call>": functions("</seed:tool_call>", breaks=False)},
    ),
    Form(
        name="Qwen3-Coder",
        shown=("<function=",),
        calls={"<tool_call>": between("</tool_call>", also=_XML), "<function=": between("</tool_call>", also=function)},
    ),
    Form(
        name="Mistral",
        shown=("[TOOL_CALLS]",),
        calls={"[TOOL_CALLS]": mistral},
        inner=("[CALL_ID]", "[ARGS]"),
        short_ids=True,
    ),
    Form(name="Nemotron", shown=("<TOOLCALL>",), calls={"<TOOLCALL>": between("</TOOLCALL>")}),
    Form(
        name="Command A",
        shown=("<|START_ACTION|>",),
        calls={"<|START_ACTION|>": between("<|END_ACTION|>")},
        inner=("<|END_ACTION|>",),
        passed_over=_COHERE_TEXT,
    ),
    Form(name="Command R", shown=("Action:",), calls={"Action:": between("```", begins="```json", known=True)}),
    Form(
        name="Phi",
        shown=("<|/tool_call|>", "functools["),
        calls={"<|tool_call|>": between("<|/tool_call|>"), "functools": between()},
        inner=("<|/tool_call|>",),
    ),
    Form(
        name="FunctionGemma",
        shown=("<start_function_call>",),
        calls={"<start_function_call>": calls_with("<escape>", "<end_function_call>")},
        inner=("<escape>", "<end_function_call>"),
    ),
    Form(
        name="Gemma 4",
        shown=("<|tool_call>",),
        calls={"<|tool_call>": calls_with('<|"|>', "<tool_call|>")},
        inner=('<|"|>', "<tool_call|>", "<|channel>"),
    ),
    Form(name="Granite", shown=("<|tool_call|>",), calls={"<|tool_call|>": between()}),
    Form(name="Apriel", shown=("<tool_calls>",), calls={"<tool_calls>": between("</tool_calls>")}),
    Form(
        name="LFM2",
        shown=("<|tool_call_start|>",),
        calls={"<|tool_call_start|>": python_list("<|tool_call_end|>")},
        inner=("<|tool_call_end|>",),
    ),
    Form(name="OLMo 3", shown=("<function_calls>",), calls={"<function_calls>": python_list("</function_calls>")}),
    Form(name="Hermes", shown=("<tool_call>",), calls={"<tool_call>": between("</tool_call>", also=_XML)}),
    Form(
        name="Llama",
        shown=("<|python_tag|>", "<|python_start|>", "ipython", '{"name": function name, "parameters"', "[func_name1("),
        calls={"<|python_tag|>": bare, "<|python_start|>": bare},
        at_start=bare,
        inner=("<|python_end|>",),
    ),
)
"""The first one counts that a template shows."""

_REASONING: Final[tuple[Marks, ...]] = (
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    THINK,
)


def form_of(template: str) -> Form | None:
    return next((form for form in FORMS if any(mark in template for mark in form.shown)), None)


def reasoning_of(template: str) -> Marks | None:
    """Return what begins and ends reasoning, by the first pair of which the template has the end."""
    return next((marks for marks in _REASONING if marks[1] in template), None)


def marks_of(form: Form | None, reasoning: Marks | None) -> frozenset[str]:
    """Return what must not be left out of decoded text, although it may be special tokens."""
    marks = {*(reasoning or ())}
    if form is not None:
        marks |= {*form.calls, *form.passed_over, *form.inner}
    return frozenset(marks)
