"""Expiry dates of certificates, read from their DER: `ssl` has them only for a peer that it verified."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from ssl import PEM_cert_to_DER_cert
from typing import Final

from floodmark.model.errors import InvalidConfiguration

_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
# The tags of a certificate's optional version, and of the two forms of a time.
_VERSION: Final = 0xA0
_FORMS: Final = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}


def first_expiry(pem: bytes) -> float:
    """The earliest moment at which a certificate of a PEM file expires, in unix seconds."""
    found = _PEM.findall(pem.decode("ascii", "replace"))
    try:
        return min(_expiry(PEM_cert_to_DER_cert(each)) for each in found)
    except (ValueError, LookupError) as error:
        raise InvalidConfiguration("a file of certificates has none that can be read; check it") from error


def _expiry(der: bytes) -> float:
    """The end of a certificate's validity, in unix seconds.

    Certificate  { TBSCertificate { [version], serial, signature, issuer, validity, … }, … }
    validity     { not before, not after }
    """
    ((_, certificate),) = _elements(der)
    (_, signed), *_ = _elements(certificate)
    fields = [content for tag, content in _elements(signed) if tag != _VERSION]
    _, (form, moment) = _elements(fields[3])
    return datetime.strptime(moment.decode("ascii"), _FORMS[form]).replace(tzinfo=UTC).timestamp()


def _elements(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The elements of a sequence: tag, length (one byte, or 0x80 + n and n bytes), content."""
    place = 0
    while place < len(content):
        tag, length, place = content[place], content[place + 1], place + 2
        if length & 0x80:
            more = length & 0x7F
            length, place = int.from_bytes(content[place : place + more]), place + more
        yield tag, content[place : place + length]
        place += length
