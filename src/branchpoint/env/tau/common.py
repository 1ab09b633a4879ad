"""Tools that both domains have."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from typing import Any

from branchpoint.env.tau.calls import Tool, text
from branchpoint.env.tau.database import Database, Record, ToolError

TRANSFER = "transfer_to_human_agents"
"""The tool that ends the conversation."""
_ARITHMETIC = frozenset("0123456789+-*/(). ")
_LONGEST = 200
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(db: Database, expression: str) -> str:
    if not set(expression) <= _ARITHMETIC:
        raise ToolError("invalid characters in expression")
    if len(expression) > _LONGEST:
        raise ToolError(f"expression longer than {_LONGEST} characters")
    try:
        return str(round(float(_value(ast.parse(expression.strip(), "<string>", "eval").body)), 2))
    except (SyntaxError, ArithmeticError, TypeError, ValueError, RecursionError) as error:
        raise ToolError(str(error)[:100]) from error


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=op, operand=inner):
            return _OPERATORS[type(op)](_value(inner))
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Pow) and (abs(a) > 1e6 or abs(b) > 20):
                raise ValueError("the power is too large")
            return _OPERATORS[type(op)](a, b)
    raise ValueError("not an arithmetic expression")


def get_user_details(db: Database, user_id: str) -> str:
    return json.dumps(db.get("users", user_id, "user not found"))


def find_user(db: Database, fits: Callable[[Record], bool]) -> str:
    """The id of the first user that fits. Raises ToolError."""
    for user_id, user in db.items("users"):
        if fits(user):
            return user_id
    raise ToolError("user not found")


def think(db: Database, thought: str) -> str:
    return ""


def transfer_to_human_agents(db: Database, summary: str) -> str:
    return "Transfer successful"


COMMON = {
    tool.name: tool
    for tool in (
        Tool(
            "calculate",
            "read",
            "The value of an arithmetic expression.",
            {"expression": text("numbers, + - * /, parentheses and spaces, e.g. '2 + 2'")},
            calculate,
        ),
        Tool(
            "get_user_details",
            "read",
            "The details of a user, with what they ordered or booked.",
            {"user_id": text("user id, e.g. 'sara_doe_496'")},
            get_user_details,
        ),
        Tool("think", "control", "Note a thought; nothing happens.", {"thought": text("a thought")}, think),
        Tool(
            TRANSFER,
            "control",
            "Hand the user over to a human agent, which ends the conversation: only if the user asks for it or no tool "
            "does what is asked.",
            {"summary": text("a summary of the matter")},
            transfer_to_human_agents,
        ),
    )
}
