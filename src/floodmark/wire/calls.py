"""Remote procedure calls made of a protocol class: its methods, as the type hints say, and no others.

A port such as `Administration` is written down once, as a `Protocol`.  Its methods' names and types are
all that a client needs to call them and a server to offer them: the arguments travel as a structure with
the parameters as fields, checked against their types where they arrive, and so does the result.  What a call
needs, and whether it may be repeated, its declaration says (`model/actions.py`).
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, Final, get_type_hints

import msgspec

from floodmark.model.actions import declared
from floodmark.wire.connection import Connection
from floodmark.wire.messages import Method

# What changes or examines a site may take its time, as the collection of garbage does.
TIMEOUT_SECONDS: Final = 600.0


class CallSpec:
    """One method of a protocol, as it travels."""

    def __init__(self, prefix: str, function: Callable[..., object]) -> None:
        self.name = function.__name__
        self.action = declared(function)
        self.timeout_seconds = TIMEOUT_SECONDS if self.action.lengthy else None
        self.signature = _without_self(function)
        hints = get_type_hints(function)
        fields = [_field(parameter, hints) for parameter in self.signature.parameters.values()]
        self._structure = msgspec.defstruct(f"{self.name}_arguments", fields, frozen=True)
        self.method: Method[Any, Any] = Method(
            f"{prefix}.{self.name}", self._structure, hints["return"], self.action
        )

    def bind(self, *args: object, **kwargs: object) -> object:
        """The arguments of a call as a request."""
        return self._structure(**self.signature.bind(*args, **kwargs).arguments)

    def arguments(self, request: object) -> dict[str, object]:
        """The arguments that a request holds, by name."""
        return {name: getattr(request, name) for name in self.signature.parameters}

    def call(self, target: object, request: object) -> object:
        """Call the method of an object that satisfies the protocol."""
        return getattr(target, self.name)(**self.arguments(request))


@cache
def call_specs(protocol: type, prefix: str) -> Mapping[str, CallSpec]:
    """The methods of a protocol by their names on the wire; a TypeError if one has no declaration.

    To read type hints takes far longer than to connect: it is done once for all connections.
    """
    functions = inspect.getmembers(protocol, inspect.isfunction)
    specs = [CallSpec(prefix, function) for name, function in functions if not name.startswith("_")]
    return {spec.method.name: spec for spec in specs}


class RemoteCalls:
    """Has the methods of a protocol; each asks the server and returns its answer."""

    def __init__(self, connection: Connection, specs: Iterable[CallSpec]) -> None:
        for spec in specs:
            setattr(self, spec.name, partial(_invoke, connection, spec))


def _invoke(connection: Connection, spec: CallSpec, *args: object, **kwargs: object) -> object:
    return connection.invoke(spec.method, spec.bind(*args, **kwargs), timeout_seconds=spec.timeout_seconds)


def _without_self(function: Callable[..., object]) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _field(parameter: inspect.Parameter, hints: dict[str, Any]) -> tuple[str, Any] | tuple[str, Any, Any]:
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        raise TypeError(f"{parameter.name} collects arguments; only named ones can travel")
    if parameter.default is inspect.Parameter.empty:
        return parameter.name, hints[parameter.name]
    return parameter.name, hints[parameter.name], parameter.default
