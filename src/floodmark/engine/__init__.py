"""Ordered storage: the port, and the engines behind it."""

from floodmark.engine.base import Engine, EngineLimits, Guard, Row, WriteRow
from floodmark.engine.memory import MemoryEngine

__all__ = ["Engine", "EngineLimits", "Guard", "MemoryEngine", "Row", "WriteRow"]
