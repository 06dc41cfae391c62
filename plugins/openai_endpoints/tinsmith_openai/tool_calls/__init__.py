"""Reads what a model says: its reasoning, its text, and its calls of tools, in the form of its family.

One module for each grammar; `families.py` chooses among them by the model's chat template.
"""

from tinsmith_openai.tool_calls.answers import AnswerReader, Form, Marks, Reading
from tinsmith_openai.tool_calls.events import (
    CallArguments,
    CallBegins,
    Content,
    Event,
    Reasoning,
    Said,
    ToolCall,
    parsed,
)
from tinsmith_openai.tool_calls.families import FORMS, form_of, marks_of, reasoning_of

__all__ = [
    "FORMS",
    "AnswerReader",
    "CallArguments",
    "CallBegins",
    "Content",
    "Event",
    "Form",
    "Marks",
    "Reading",
    "Reasoning",
    "Said",
    "ToolCall",
    "form_of",
    "marks_of",
    "parsed",
    "reasoning_of",
]
