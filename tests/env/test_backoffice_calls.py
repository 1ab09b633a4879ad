"""Calls: both forms parse to one call; whatever is no call gives one bounded error and changes nothing."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchpoint.env import backoffice
from branchpoint.env.backoffice.calls import GRAMMAR, TOOLS, Call, Malformed, call, parse, schemas

GOOD = [
    call("search_customers", query="Ada Park", offset=5),
    call("search_customers", query="ada.park@mail.example"),
    call("get_customer", customer="C0007"),
    call("list_orders", customer="C0007"),
    call("get_order", order="O0042"),
    call("check_inventory", sku="SKU-0012"),
    call("update_shipping_address", order="O0042", address="12 Elm Road, Norwick"),
    call("cancel_order", order="O0042", reason="changed his mind"),
    call("issue_refund", order="O0042", amount=1999, reason="damaged"),
    call("reserve_stock", sku="SKU-0012", quantity=2, order="O0042"),
    call("schedule_shipment", order="O0042", carrier="express", day=104),
    call("create_ticket", customer="C0007", category="billing", priority="high", summary="please call"),
    call("create_ticket", customer="C0007", category="billing", priority="high", summary="x", order="O0042"),
    call("wait", seconds=30),
    call("finish", summary="all done"),
]
BAD = [
    '{"cmd": "ls',
    "null",
    "[1]",
    '"ls"',
    '{"cmd": "a\nb"}',
    '{"name": "get_order", "arguments": {"order": "O0042"',
    '{"name": "get_order", "arguments": null}',
    '{"name": "get_order", "arguments": [1]}',
    '{"name": "get_order", "arguments": "ls"}',
    '{"name": "get_order", "arguments": {"order": 42}}',
    '{"name": "get_order", "arguments": {"order": null}}',
    '{"name": "get_order", "arguments": {"order": "O0042", "order": "O0043"}}',
    '{"name": "get_order", "arguments": {"order": "O0042", "x": 1}}',
    '{"name": "get_order", "arguments": {}}',
    '{"name": 3, "arguments": {}}',
    '{"name": "rm", "arguments": {}}',
    '{"name": "wait", "arguments": {"seconds": true}}',
    '{"name": "wait", "arguments": {"seconds": 1.5}}',
    '{"name": "wait", "arguments": {"seconds": NaN}}',
    '{"name": "wait", "arguments": {"seconds": "' + "9" * 3000 + '"}}',
    '[{"name": "wait", "arguments": {"seconds": 1}}]',
    '{"name": "wait", "arguments": {"seconds": 1}}{"name": "wait", "arguments": {"seconds": 1}}',
    '<tool_call>{"name": "wait</tool_call><tool_call>{"name": "wait", "arguments": {"seconds": 1}}</tool_call>',
    '<tool_call>{"name": "wait", "arguments": {"seconds": 1}}',
    "wait seconds=1\nwait seconds=1",
    "wait seconds=1 wait seconds=1",
    "wait seconds=1 seconds=2",
    "wait",
    "wait seconds=soon",
    'finish summary="open',
    'finish summary="bad \\x escape"',
    "frobnicate order=O0042",
    "",
    "   ",
    "[" * 3900,
    '{"a":' * 700,
    "x" * 200_000,
    "{" + "9" * 200_000,
    "wait seconds=" + "\ud800",
]


@pytest.mark.parametrize("made", GOOD, ids=lambda c: c.tool)
def test_both_forms_parse_to_the_same_call(made: Call) -> None:
    assert parse(made.json()) == made
    assert parse(made.compact()) == made
    assert parse(f"I look first.\n<tool_call>\n{made.json()}\n</tool_call>") == made
    assert parse(json.dumps({"name": made.tool, "arguments": json.dumps(dict(made.args))})) == made
    assert parse(json.dumps({"arguments": dict(reversed(made.args.items())), "name": made.tool})) == made
    assert re.fullmatch(GRAMMAR, made.compact())
    assert made.problem == ""


def test_every_tool_is_covered_and_has_a_schema() -> None:
    assert {c.tool for c in GOOD} == set(TOOLS)
    assert len(TOOLS) == 13
    for schema in schemas():
        function = schema["function"]
        parameters = function["parameters"]
        assert json.loads(json.dumps(schema)) == schema
        assert set(parameters["required"]) <= set(parameters["properties"])
        for made in GOOD:
            if made.tool == function["name"]:
                for name, value in made.args.items():
                    field = parameters["properties"][name]
                    assert isinstance(value, {"string": str, "integer": int}[field["type"]])
                    assert value in field.get("enum", [value])
                    assert re.fullmatch(field.get("pattern", ".*"), str(value))


def test_integers_may_come_as_strings() -> None:
    assert parse('{"name": "wait", "arguments": {"seconds": "30"}}') == call("wait", seconds=30)


@pytest.mark.parametrize("style", ["json", "compact"])
@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_malformed_calls_teach_and_change_nothing(text: str, style: str) -> None:
    world = backoffice.make(backoffice.tasks("diagnostic", style=style, p=1.0)[0])
    world.reset()
    world.step("get_order order=O0042")
    before = world.get_state()
    step = world.step(text)
    assert world.get_state() == before
    assert (step.done, step.truncated, step.reward) == (False, False, 0.0)
    assert "MALFORMED_CALL" in step.observation
    assert len(step.observation) < 600
    assert ("arg=value" if style == "compact" else '\\"name\\"') in step.observation
    assert step.info["malformed"]
    assert not re.fullmatch(GRAMMAR, text)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(max_size=60) | st.sampled_from([c.compact() for c in GOOD] + [c.json() for c in GOOD]), st.data())
def test_parse_never_raises(text: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text)))
    cut = text[:at] + data.draw(st.text(max_size=3)) + text[at + 1 :]
    assert isinstance(parse(cut), Call | Malformed)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("get_order order=42", "INVALID_ARGUMENT"),
        ("get_order order=O٠٠٤٢", "INVALID_ARGUMENT"),
        ("wait seconds=0", "INVALID_ARGUMENT"),
        ("wait seconds=999999999999", "INVALID_ARGUMENT"),
        ("schedule_shipment order=O0042 carrier=pigeon day=101", "INVALID_ARGUMENT"),
        ('finish summary=""', "INVALID_ARGUMENT"),
        ("get_customer customer=C9999", "NOT_FOUND"),
    ],
)
def test_wrong_values_are_answered_by_the_tool(text: str, code: str) -> None:
    world = backoffice.make(backoffice.tasks("diagnostic")[0])
    world.reset()
    step = world.step(text)
    assert json.loads(step.observation)["error"] == code
    assert not step.done
    assert step.info["calls"] == (0 if text.startswith("finish") else 1)
