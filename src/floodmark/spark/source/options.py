"""Options of readers and writers, read once on the driver, before a job starts.

Spark passes options as text and ignores case.  An unknown option is refused: ignoring a misspelt one would
read or write something else than the user asked for.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from typing import Final, TypeVar

from floodmark.feed import LIFETIME
from floodmark.model.errors import InvalidArgument, InvalidOption
from floodmark.model.names import require_name
from floodmark.model.ranges import KeyRange
from floodmark.model.stream import OnGeneration
from floodmark.model.text import read_at, read_bytes, read_duration
from floodmark.model.version import VERSION_MAX, Version, compose, physical_ms
from floodmark.site.address import FILES, SiteAddress
from floodmark.site.arguments import check_range
from floodmark.spark.source.schemas import AVAILABLE, JSON, STRING

COMMON: Final = frozenset({"path", "namespace", *FILES})
KEYS: Final = frozenset({"startKey", "endKey", "prefix"})
READING: Final = COMMON | KEYS | {"readChangeFeed", "valueFormat", "minPartitions"}
SNAPSHOT: Final = READING | {"versionAsOf", "timestampAsOf", "rows", "metadata"}
CHANGES: Final = READING | {
    "startingVersion",
    "endingVersion",
    "startingTimestamp",
    "endingTimestamp",
    "beforeImages",
    "onGeneration",
}
STREAM: Final = frozenset({"maxChangesPerTrigger", "safePointLifetime"})

VALUE_FORMATS: Final = ("binary", STRING, JSON)

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
# Every live key as of one version, and then the changes above it.
SNAPSHOT_FIRST: Final = "snapshot"

_OF_CHANGES: Final = {name.lower(): name for name in (CHANGES | STREAM) - SNAPSHOT}
_TRUE: Final = {"true": True, "false": False}

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The options of a reader; those of other kinds of readers have their defaults."""

    address: SiteAddress
    namespace: str
    keys: KeyRange
    value_format: str | None
    partitions_min: int | None
    # Of a snapshot; without a version it is the present.
    at: Version | None
    rows: str
    metadata: bool
    # Of changes: those after `start`, up to `end` or the present.
    start: Version | str
    end: Version | None
    before_images: bool
    on_generation: OnGeneration
    # Of a stream.
    changes_max: int | None
    lifetime: timedelta


def read_options(given: Mapping[str, str], allowed: Iterable[str]) -> ReadOptions:
    """Read the options of a reader.  Raises InvalidOption."""
    options = Options(given, allowed)
    options.exclusive("versionAsOf", "timestampAsOf")
    return ReadOptions(
        address=options.address(),
        namespace=options.namespace(),
        keys=options.keys(),
        value_format=options.value_format(),
        partitions_min=options.number("minPartitions"),
        at=options.read("versionAsOf", _read_version) or options.read("timestampAsOf", _read_moment),
        rows=options.choice("rows", AVAILABLE),
        metadata=options.flag("metadata"),
        start=options.start(),
        end=options.end(),
        before_images=options.flag("beforeImages"),
        on_generation=OnGeneration(options.choice("onGeneration", OnGeneration)),
        changes_max=options.number("maxChangesPerTrigger"),
        lifetime=options.read("safePointLifetime", read_duration) or LIFETIME,
    )


class Options:
    """The options of one reader or writer, by name.  Raises InvalidOption for one that is not allowed."""

    def __init__(self, given: Mapping[str, str], allowed: Iterable[str]) -> None:
        names = {name.lower(): name for name in allowed}
        self._given: dict[str, str] = {}
        _refuse_secrets(given)
        for written, text in given.items():
            if written.lower() not in names:
                raise _unknown(written, names)
            self._given[names[written.lower()]] = text

    def text(self, name: str) -> str | None:
        """The text of an option."""
        return self._given.get(name)

    def flag(self, name: str) -> bool:
        """An option that is true or false; false if it is not given."""
        return bool(self.read(name, _read_flag))

    def number(self, name: str) -> int | None:
        """An option that is a positive number."""
        return self.read(name, _read_number)

    def value_format(self) -> str | None:
        """The format of values; None if it is not given."""
        return self.choice("valueFormat", VALUE_FORMATS) if "valueFormat" in self._given else None

    def start(self) -> Version | str:
        """The version above which changes begin, or a word for it; by default the first."""
        self.exclusive("startingVersion", "startingTimestamp")
        moment = self.read("startingTimestamp", _read_moment)
        if moment is not None:
            # The whole millisecond is included.
            return compose(physical_ms(moment), 0) - 1
        text = self._given.get("startingVersion", EARLIEST).lower()
        if text in (EARLIEST, LATEST, SNAPSHOT_FIRST):
            return text
        return self.read("startingVersion", _read_starting_version) or 0

    def end(self) -> Version | None:
        """The last version whose changes are wanted."""
        self.exclusive("endingVersion", "endingTimestamp")
        moment = self.read("endingTimestamp", _read_moment)
        return self.read("endingVersion", _read_version) if moment is None else moment

    def choice(self, name: str, choices: Iterable[str]) -> str:
        """An option that is one of several words; the first of them if it is not given."""
        words = list(choices)
        given = self._given.get(name, words[0])
        if given.lower() not in words:
            raise InvalidOption(
                f"the option {name} is one of {', '.join(words)}, not {given!r:.60}", option=name
            )
        return given.lower()

    def exclusive(self, *names: str) -> None:
        """Raise InvalidOption if several of these are given."""
        given = [name for name in names if name in self._given]
        if len(given) > 1:
            raise InvalidOption(f"the options {' and '.join(given)} exclude each other; give one of them")

    def address(self) -> SiteAddress:
        """The address of the site."""
        return SiteAddress(
            location=self._given.get("path", ""),
            token_file=self._given.get("tokenFile"),
            tls_root=self._given.get("tlsRootCertificate"),
            tls_certificate=self._given.get("tlsCertificate"),
            tls_key=self._given.get("tlsKey"),
        )

    def namespace(self) -> str:
        """The namespace.  Raises InvalidOption without one."""
        name = self._given.get("namespace")
        if name is None:
            raise InvalidOption('no namespace is named; add .option("namespace", NAME)', option="namespace")
        try:
            require_name(name, "namespace")
        except InvalidArgument as error:
            raise InvalidOption(
                f"the option namespace cannot be used: {error}", option="namespace"
            ) from error
        return name

    def keys(self) -> KeyRange:
        """The range of keys."""
        start, end, prefix = (self.read(name, read_bytes) for name in ("startKey", "endKey", "prefix"))
        try:
            return check_range(start or b"", end, prefix)
        except InvalidArgument as error:
            raise InvalidOption(f"the options startKey, endKey and prefix: {error}") from error

    def read(self, name: str, read: Callable[[str], Value]) -> Value | None:
        """An option, parsed by `read`; None if it is not given.  A ValueError becomes InvalidOption."""
        text = self._given.get(name)
        if text is None:
            return None
        try:
            return read(text)
        except ValueError as error:
            raise InvalidOption(f"the option {name} cannot be read: {error}", option=name) from None


def _refuse_secrets(given: Mapping[str, str]) -> None:
    """Raise InvalidOption for a secret.  `SiteAddress` refuses one in a URL."""
    for written in given:
        if written.lower() == "token":
            raise InvalidOption(
                "plans and event logs would show the token; put it into a file and name the file with the "
                "option tokenFile",
                option="token",
            )


def reads_changes(given: Mapping[str, str]) -> bool:
    """Whether the options ask for changes and not for a snapshot."""
    name = "readChangeFeed"
    return Options({each: given[each] for each in given if each.lower() == name.lower()}, {name}).flag(name)


def _read_flag(text: str) -> bool:
    if text.lower() not in _TRUE:
        raise ValueError(f"it is true or false, not {text!r:.60}")
    return _TRUE[text.lower()]


def _read_version(text: str) -> Version:
    if not (text.isascii() and text.isdigit() and len(text) < 21 and 0 < int(text) <= VERSION_MAX):
        raise ValueError(f"it is a version, a number of up to 64 bits, not {text!r:.60}")
    return int(text)


def _read_starting_version(text: str) -> Version:
    """The version before the first one.  0 stands for the beginning, as in Delta."""
    if text == "0":
        return 0
    if not text.isdigit():
        raise ValueError(f"it is a version, {EARLIEST}, {LATEST} or {SNAPSHOT_FIRST}, not {text!r:.60}")
    return _read_version(text) - 1


def _read_moment(text: str) -> Version:
    """The last version of the millisecond of a moment with its time zone."""
    # A number could be seconds, milliseconds or a version.
    if re.fullmatch(r"\s*[+-]?[\d_.]+\s*", text):
        raise ValueError(f"it is a time such as 2026-01-31T12:00:00Z, not the number {text!r:.60}")
    return read_at(text)


def _read_number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 19 and int(text) > 0):
        raise ValueError(f"it is a number of 1 or more, not {text!r:.60}")
    return int(text)


def _unknown(written: str, names: Mapping[str, str]) -> InvalidOption:
    if written.lower() in _OF_CHANGES and "startingversion" not in names:
        option = _OF_CHANGES[written.lower()]
        return InvalidOption(
            f'the option {option} is for changes; add .option("readChangeFeed", "true")', option=option
        )
    if written.lower() == "filterpushdown":
        return InvalidOption(
            "there is no option filterPushdown: Spark would give one query the rows of another. Name the "
            "keys with startKey, endKey or prefix",
            option=written,
        )
    near = get_close_matches(written.lower(), names, n=1)
    hint = f"did you mean {names[near[0]]}?" if near else f"there are: {', '.join(sorted(names.values()))}"
    return InvalidOption(f"there is no option {written!r:.60} here; {hint}", option=written)
