"""The functions that the requests of the tool-calling workload offer, each with one exchange that shows it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bitmtp.tokenizer import Message


@dataclass(frozen=True, slots=True)
class Tool:
    """A function: its definition as the OpenAI API has it, and an exchange in which it is called.

    Attributes:
        parameters: name → JSON schema; all of them are required.
        question, arguments, result, answer: of the exchange.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    question: str
    arguments: dict[str, Any]
    result: str
    answer: str

    @property
    def definition(self) -> dict[str, Any]:
        """What the ``tools`` of a request hold."""
        schema = {"type": "object", "properties": self.parameters, "required": list(self.parameters)}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}

    @property
    def exchange(self) -> list[Message]:
        """Question, call, result and answer."""
        call = {"name": self.name, "arguments": self.arguments}
        return [
            {"role": "user", "content": self.question},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": json.dumps({"result": self.result}, ensure_ascii=False)},
            {"role": "assistant", "content": self.answer},
        ]


_TEXT = {"type": "string"}

CALCULATOR = Tool(
    name="calculate",
    description="Work out an arithmetic expression.",
    parameters={"expression": _TEXT},
    question="A box holds 12 eggs. How many eggs are in 7 boxes?",
    arguments={"expression": "12 * 7"},
    result="84",
    answer="There are 84 eggs in 7 boxes.",
)
TRANSLATOR = Tool(
    name="translate",
    description="Translate a text into another language.",
    parameters={"text": _TEXT, "target": {"type": "string", "description": "language"}},
    question="Translate German to English: Der Zug ist pünktlich.",
    arguments={"text": "Der Zug ist pünktlich.", "target": "English"},
    result="The train is on time.",
    answer="The train is on time.",
)
SEARCH = Tool(
    name="search",
    description="Search an encyclopedia for a fact.",
    parameters={"query": _TEXT},
    question="Which river flows through Vienna?",
    arguments={"query": "river in Vienna"},
    result="The Danube flows through Vienna.",
    answer="The Danube flows through Vienna.",
)
CALENDAR = Tool(
    name="add_event",
    description="Add an event to the calendar.",
    parameters={"title": _TEXT, "date": {"type": "string", "description": "YYYY-MM-DD"}},
    question="Put the dentist into my calendar for the third of May 2026.",
    arguments={"title": "Dentist", "date": "2026-05-03"},
    result="added",
    answer="The dentist is in your calendar for 3 May 2026.",
)
WEATHER = Tool(
    name="weather",
    description="The weather forecast of a place.",
    parameters={"place": _TEXT, "days": {"type": "integer"}},
    question="Will it rain in Bergen tomorrow?",
    arguments={"place": "Bergen", "days": 1},
    result="rain, 9 °C",
    answer="Yes, rain is expected in Bergen tomorrow, at 9 °C.",
)
EXTRAS = (CALENDAR, WEATHER)
