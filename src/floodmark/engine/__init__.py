"""Ordered storage: the port, and the engines that implement it."""

from floodmark.engine.base import Engine, EngineLimits, Guard, Row, Write, WriteRow, durable_writes
from floodmark.engine.memory import MemoryEngine

__all__ = ["Engine", "EngineLimits", "Guard", "MemoryEngine", "Row", "Write", "WriteRow", "durable_writes"]
