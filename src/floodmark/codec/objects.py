"""Codecs: how Python objects are encoded as values and decoded."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

from floodmark.model.errors import InvalidArgument

Value = TypeVar("Value")
CodecName: TypeAlias = Literal["text", "json"]


@dataclass(frozen=True)
class Codec(Generic[Value]):
    """Encodes and decodes values.  Both functions raise TypeError or ValueError if they cannot."""

    encode: Callable[[Value], bytes]
    decode: Callable[[bytes], Value]


def _write_text(value: str) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"it is {type(value).__name__}, and must be str")
    return value.encode()


def _write_json(value: object) -> bytes:
    if value is None:
        raise ValueError("None stands for a key that is absent; delete it instead")
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()


CODECS: Final[Mapping[str, Codec[Any]]] = {
    "json": Codec(_write_json, json.loads),
    "text": Codec(_write_text, bytes.decode),
}


def find_codec(codec: CodecName | Codec[Any] | None) -> Codec[Any] | None:
    """The codec of a name; a `Codec` or None is returned as it is.  Raises InvalidArgument otherwise."""
    if codec is None or isinstance(codec, Codec):
        return codec
    if codec not in tuple(CODECS):
        raise InvalidArgument(f"codec is {' or '.join(CODECS)}, or a floodmark.Codec, not {codec!r:.60}")
    return CODECS[codec]
