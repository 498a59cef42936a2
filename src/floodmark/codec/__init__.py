"""Every byte layout of Floodmark, each drawn in the docstring of its module.  Pure functions."""

from floodmark.codec.ordered import decode_bytes, decode_key, encode_bytes, encode_key
from floodmark.codec.values import decode_value, encode_value

__all__ = [
    "decode_bytes",
    "decode_key",
    "decode_value",
    "encode_bytes",
    "encode_key",
    "encode_value",
]
