"""Tools for agents.  Each can do one thing, says what it cannot do, and ends in time."""

from .calculator import CALCULATOR, calculate
from .command import command_runner
from .files import file_search
from .http import http_get
from .tool import Tool, ToolError

__all__ = ["CALCULATOR", "Tool", "ToolError", "calculate", "command_runner", "file_search", "http_get"]
