"""Requests as the gateway reads them: forms of answers, and calls in a history."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from rayapp.rollout.gateway.conversation import ToolCall
from rayapp.rollout.gateway.reading import call_form
from rayapp.tools.base import ToolSchema


def with_mode(name: str, key: str, *values: str) -> ToolSchema:
    mode = {"enum": list(values)}
    inner = {"type": "object", "properties": {"mode": {"$ref": f"#/{key}/Mode"}}}
    parameters = {
        "type": "object",
        "properties": {"mode": {"$ref": f"#/{key}/Mode"}, "inner": {"$ref": f"#/{key}/Inner"}},
        key: {"Mode": mode, "Inner": inner},
    }
    return ToolSchema(name=name, description="", parameters=parameters)


@pytest.mark.parametrize("key", ["$defs", "definitions"])
def test_tools_keep_their_own_definitions(key: str) -> None:
    tools = [with_mode("read", key, "a"), with_mode("write", key, "b")]
    form: Any = call_form(tools, None, several=True).structured["json"]

    def is_allowed(name: str, mode: str) -> bool:
        call = {"name": name, "arguments": {"mode": mode, "inner": {"mode": mode}}}
        return Draft202012Validator(form).is_valid([call])

    assert [is_allowed(*each) for each in (("read", "a"), ("write", "b"))] == [True, True]
    assert [is_allowed(*each) for each in (("read", "b"), ("write", "a"))] == [False, False]
    assert key in tools[0].parameters


def test_a_tools_old_and_new_definitions_are_apart() -> None:
    both = {"$defs": {"Mode": {"const": "a"}}, "definitions": {"Mode": {"const": "b"}}}
    properties = {"new": {"$ref": "#/$defs/Mode"}, "old": {"$ref": "#/definitions/Mode"}}
    tool = ToolSchema(name="read", description="", parameters={"type": "object", "properties": properties} | both)
    form: Any = call_form([tool], None, several=True).structured["json"]

    assert Draft202012Validator(form).is_valid([{"name": "read", "arguments": {"new": "a", "old": "b"}}])


def test_a_reference_to_a_tools_whole_schema_names_its_own() -> None:
    def tree(name: str, value: str) -> ToolSchema:
        kids, twin = {"type": "array", "items": {"$ref": "#"}}, {"$ref": "#/properties/value"}
        properties = {"value": {"const": value}, "twin": twin, "kids": kids}
        return ToolSchema(name=name, description="", parameters={"type": "object", "properties": properties})

    form: Any = call_form([tree("read", "a"), tree("write", "b")], None, several=True).structured["json"]
    validator = Draft202012Validator(form)

    for value, wanted in (("a", [True, False]), ("b", [False, True])):
        arguments = {"kids": [{"value": value, "kids": [{"twin": value}]}]}
        calls = [[{"name": name, "arguments": arguments}] for name in ("read", "write")]
        assert [validator.is_valid(call) for call in calls] == wanted


@pytest.mark.parametrize(
    ("arguments", "parsed"), [("", {}), (" \n", {}), ("null", {}), ("{}", {}), ('{"a": 1}', {"a": 1}), ("a", "a")]
)
def test_arguments_of_a_call_in_a_history_are_data(arguments: str, parsed: object) -> None:
    assert ToolCall(id="1", name="look", arguments=arguments).parsed == parsed
