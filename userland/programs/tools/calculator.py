"""Arithmetic for a model: an expression is parsed, and only what is on the lists below is ever evaluated."""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from .tool import Tool, ToolError

Number: TypeAlias = int | float

MAX_CHARS: Final = 400
MAX_BITS: Final = 10_000  # of a whole number: whatever is asked takes microseconds
_MAX_ROUND: Final = 15


def _round(value: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > _MAX_ROUND:  # of a whole number, Python would make 10 ** -digits
        raise ToolError(f"round gives a whole number of digits, at most {_MAX_ROUND}")
    return round(value, digits) if digits else round(value)


_BINARY: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: Final[Mapping[type[ast.unaryop], Callable[[Any], Any]]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "abs": abs, "ceil": math.ceil, "cos": math.cos, "exp": math.exp, "floor": math.floor, "log": math.log,
    "log10": math.log10, "log2": math.log2, "max": max, "min": min, "round": _round, "sin": math.sin,
    "sqrt": math.sqrt, "tan": math.tan,
}  # fmt: skip
_CONSTANTS: Final[Mapping[str, Number]] = {"e": math.e, "pi": math.pi}
_SIGNS: Final = str.maketrans({"×": "*", "÷": "/", "−": "-", "^": " ** "})


def calculate(expression: str) -> Number:
    """The value of an arithmetic expression.  Error: ToolError, which says what it cannot evaluate."""
    if len(expression) > MAX_CHARS:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_CHARS} are evaluated")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python's parser, about what is on no list here anyway
            tree = ast.parse(expression.strip().translate(_SIGNS), mode="eval")
        return _value(tree.body)
    except SyntaxError as error:
        raise ToolError(f"{expression!r} is no arithmetic expression: {error.msg}") from None
    except (ArithmeticError, ValueError, TypeError) as error:  # division by zero, overflow, sqrt(-1), max()
        raise ToolError(f"{expression!r} has no value: {error}") from None
    except (RecursionError, MemoryError):
        raise ToolError(f"{expression[:40]!r}... is nested too deeply") from None


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _checked(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _checked(_UNARY[type(op)](_value(operand)))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _checked(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _checked(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _checked(_FUNCTIONS[name](*[_value(argument) for argument in arguments]))
    raise ToolError(
        f"{ast.unparse(node)!r} is not evaluated; there are numbers, + - * / // % **, parentheses, "
        f"{', '.join(_CONSTANTS)} and {', '.join(_FUNCTIONS)}"
    )


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and abs(base).bit_length() * abs(exponent) > MAX_BITS:
        raise ToolError(f"a power of more than {MAX_BITS} bits is too large")
    result: Number | complex = base**exponent
    if isinstance(result, complex):
        raise ToolError("that power is no real number")
    return result


def _checked(value: Number) -> Number:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise ToolError(f"a number of more than {MAX_BITS} bits is too large")
    elif not math.isfinite(value):
        raise ToolError("the value is too large for a number with a point")
    return value


async def _run(expression: str) -> str:
    value = calculate(expression)
    return f"{value:.15g}" if isinstance(value, float) else str(value)


CALCULATOR: Final = Tool(
    "calculator", "Evaluates an arithmetic expression such as (17 + 4) * 2.5 or sqrt(2).",
    {"expression": "what to evaluate"}, _run, ("expression",), time_limit_s=5.0, eta_s=0.01,
)  # fmt: skip
