"""A witness outside the database: a record of RocksDB's files as they were last synced.

RocksDB cannot tell a write-ahead log that a power cut has torn from one whose bytes were damaged later: it
keeps the records before the damage and opens.  A MANIFEST that was cut, or a log file that was removed,
looks to it like an earlier state of the same database.  The witness makes the difference visible.  It is a
small file beside the database, written whenever the clock's bound is stored and when the database is closed,
so it costs a commit nothing.

**What it claims.**  Everything in it was on stable storage before it was written: the log files with the
sizes that they had before the sync, the MANIFEST with its size and checksum, the sequence number of the
last write.  All of these only grow, so an older witness claims less and never too much.  If a power cut
brings an older one back, or none was written yet, no healthy database is refused.

    name        meaning
    version     no version above this was ever minted
    sequence    RocksDB's sequence number: the database holds every write up to it
    manifest    name, bytes and CRC-32 of the MANIFEST that CURRENT named
    logs        the write-ahead logs that were there, and their bytes
    boot        the boot of the machine; until it restarts, files hold all bytes that were written to them
    closed      the database was closed, and its files are exactly these
"""

import os
import subprocess
import sys
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from floodmark.files.local import write_durably
from floodmark.model.errors import Corruption
from floodmark.model.limits import KIB
from floodmark.model.version import Version

_BOOT_FILE: Final = Path("/proc/sys/kernel/random/boot_id")
_BOOT_COMMAND: Final = ("/usr/sbin/sysctl", "-n", "kern.bootsessionuuid")
_BOOT_SECONDS_MAX: Final = 5.0
_CHUNK_BYTES: Final = 1 << 20
# How RocksDB writes its logs and its MANIFEST: whole records, or the first, middle and last part of one.
_BLOCK_BYTES: Final = 32 * KIB
_HEADER_BYTES: Final = 7
_TYPE_MAX: Final = 4
# Room for some hundred logs, of which there are seldom more than three.
SLOT_BYTES: Final = 16 * KIB
# CURRENT may name a MANIFEST that is replaced while this is looked up.
_LOOKS_MAX: Final = 10

ADVICE: Final = (
    "Nothing was changed. Put the file back, restore the site from a backup, or rebuild it from a peer "
    "(docs/operations/damage.md); `floodmark doctor --accept-loss DIRECTORY` opens it without what is missing"
)


class ManifestMark(msgspec.Struct, frozen=True):
    """The name, size and checksum of the MANIFEST, in which RocksDB lists its own files."""

    name: str
    size: int
    checksum: int


class Files(msgspec.Struct, frozen=True):
    """The files of a database that a witness records."""

    manifest: ManifestMark
    logs: dict[str, int]


class Witness(msgspec.Struct, frozen=True):
    """The content that a database is known to hold; the fields are described above."""

    version: Version
    sequence: int
    files: Files
    boot: str
    closed: bool = False


class _Slot(msgspec.Struct, frozen=True):
    number: int
    checksum: int
    witness: msgspec.Raw


class WitnessFile:
    """The file that holds the witness: two slots, written in turn, of which the later valid one counts.

    Writing in place costs one flush of the disk where replacing a file costs two, and a power cut can tear
    only the slot that is being written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number = 0

    def load(self) -> Witness | None:
        """The witness, or None.  Raises Corruption for a file without a valid slot: no crash leaves that."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        slots = [_decode_slot(content[start : start + SLOT_BYTES]) for start in (0, SLOT_BYTES)]
        number, witness = max(slots, key=lambda slot: slot[0])
        if witness is None:
            raise Corruption(
                f"{self.path}, which tells whether the database is complete, is damaged. {ADVICE}",
                what=f"{self.path.name} is damaged, and nothing tells whether the database is complete",
                missing=self.path.name,
            )
        self._number = number
        return witness

    def store(self, witness: Witness) -> None:
        """Write the witness.  After a power cut, the file has this witness or the previous one."""
        number = self._number + 1
        content = _encode_slot(number, witness)
        if len(content) > SLOT_BYTES:
            # Too many logs to name.  A witness may claim less, but nothing wrong.
            unnamed = Files(manifest=witness.files.manifest, logs={})
            content = _encode_slot(number, msgspec.structs.replace(witness, files=unnamed))
        if not self.path.exists():
            write_durably(self.path, content * 2)
        else:
            descriptor = os.open(self.path, os.O_WRONLY)
            try:
                os.pwrite(descriptor, content, SLOT_BYTES * (number % 2))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._number = number


def _encode_slot(number: int, witness: Witness) -> bytes:
    encoded = msgspec.json.encode(witness)
    slot = _Slot(number=number, checksum=zlib.crc32(encoded), witness=msgspec.Raw(encoded))
    return msgspec.json.encode(slot).ljust(SLOT_BYTES - 1) + b"\n"


def _decode_slot(content: bytes) -> tuple[int, Witness | None]:
    """A slot's number and witness; 0 and none if it is torn or damaged."""
    try:
        slot = msgspec.json.decode(content, type=_Slot)
        if zlib.crc32(slot.witness) == slot.checksum:
            return slot.number, msgspec.json.decode(slot.witness, type=Witness)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    return 0, None


def read_files(path: Path, known: ManifestMark | None = None) -> Files:
    """Record a database's files.  Syncs the MANIFEST, but not the logs: call it before syncing them.

    `known` saves reading the part of the MANIFEST that was read before.
    """
    for _ in range(_LOOKS_MAX):
        name = read_current(path)
        with suppress(FileNotFoundError):
            return Files(manifest=_read_manifest(path, name, known), logs=_read_logs(path))
    raise _lost(path, f"CURRENT names {name}, which is not there", name)


def read_current(path: Path) -> str:
    """The name of the MANIFEST that is in use."""
    try:
        return (path / "CURRENT").read_text("utf-8", "replace").strip()
    except FileNotFoundError:
        raise Corruption(
            f"{path} holds no database: CURRENT is missing. {ADVICE}", missing="CURRENT"
        ) from None


def require_files(path: Path, witness: Witness) -> bool:
    """Raise Corruption if files hold less than a witness saw.

    Returns whether the witness saw the database closed, and its MANIFEST has not changed since.
    """
    seen, name = witness.files.manifest, read_current(path)
    if _number(name) < _number(seen.name):
        raise _lost(path, f"CURRENT names {name!r}, and has named {seen.name} before", seen.name)
    is_same = name == seen.name and _require_manifest(path, witness) == seen.size
    for log, size in witness.files.logs.items():
        with suppress(FileNotFoundError):
            found = (path / log).stat().st_size
            if found < size:
                raise _lost(path, f"{log} has {found:,} bytes, and had {size:,}", log)
    return is_same and witness.closed


def missing_logs(path: Path, witness: Witness) -> list[str]:
    """The logs that a witness saw and that are gone: lost, or no longer needed."""
    return sorted(log for log in witness.files.logs if not (path / log).exists())


def require_logs(path: Path, witness: Witness, oldest_needed: int) -> None:
    """Raise Corruption if a log is missing that RocksDB needs: its writes are in no other file."""
    for log in missing_logs(path, witness):
        if _number(log) >= oldest_needed:
            raise _lost(path, f"{log}, with {witness.files.logs[log]:,} bytes, is missing", log)


def require_sequence(path: Path, witness: Witness, sequence: int) -> None:
    """Raise Corruption if a database ends before the last write that a witness saw."""
    if sequence < witness.sequence:
        lost = witness.sequence - sequence
        raise _lost(path, f"the write-ahead log ends {lost:,} rows too early", ",".join(witness.files.logs))


def damaged_log(path: Path, damage: object, logs: Iterable[str]) -> Corruption:
    """The error for a write-ahead log with bytes that no crash can have left there."""
    return _lost(path, f"the write-ahead log is damaged ({damage})", ",".join(logs))


def find_flaws(path: Path, *, zeros: bool = True) -> dict[str, int]:
    """The logs with a record of a type that Floodmark's RocksDB never writes, and its first position in each.

    RocksDB must not open such a log.  At a record that claims to be of a recycled log, its reader (9.8) loops
    for ever, or takes it for the end; it skips zeros, and continues after the gap.  Its own checksums find
    all other damage.  The MANIFEST is checked too; zeros do no harm there.

    A log consists of blocks of 32 KiB, and these of records:  checksum: 4 | length: 2 | type: 1 | content
    """
    current = read_current(path)
    flaws = {}
    for name in (current, *_read_logs(path)):
        # RocksDB reports best what is wrong with a CURRENT that names no file.
        with suppress(FileNotFoundError, IsADirectoryError, ValueError), (path / name).open("rb") as stream:
            position = 0
            while block := stream.read(_BLOCK_BYTES):
                if (flaw := _find_flaw(block, zeros=zeros and name != current)) is not None:
                    flaws[name] = position + flaw
                    break
                position += len(block)
    return flaws


def _find_flaw(block: bytes, *, zeros: bool) -> int | None:
    position, last = 0, len(block) - _HEADER_BYTES
    while position <= last:
        kind = block[position + 6]
        if kind > _TYPE_MAX:
            return position
        if not kind:
            return position if zeros else None
        position += _HEADER_BYTES + (block[position + 4] | block[position + 5] << 8)
    return None


def read_boot() -> str:
    """The id of this boot of the machine; empty if the machine does not report one."""
    try:
        if sys.platform == "darwin":
            return subprocess.run(
                _BOOT_COMMAND, capture_output=True, text=True, check=True, timeout=_BOOT_SECONDS_MAX
            ).stdout.strip()
        return _BOOT_FILE.read_text("ascii").strip()
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""


def _read_manifest(path: Path, name: str, known: ManifestMark | None) -> ManifestMark:
    file = path / name
    size = file.stat().st_size
    if known is not None and (known.name, known.size) == (name, size):
        return known
    start, checksum = 0, 0
    if known is not None and known.name == name and known.size < size:
        start, checksum = known.size, known.checksum
    with file.open("rb") as stream:
        checksum = _checksum(stream.fileno(), start, size, checksum)
        os.fsync(stream.fileno())
    return ManifestMark(name=name, size=size, checksum=checksum)


def _require_manifest(path: Path, witness: Witness) -> int:
    """Raise Corruption if a MANIFEST holds less than a witness saw; returns its size."""
    seen = witness.files.manifest
    try:
        with (path / seen.name).open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size < seen.size:
                raise _lost(path, f"{seen.name} has {size:,} bytes, and had {seen.size:,}", seen.name)
            if _checksum(stream.fileno(), 0, seen.size, 0) != seen.checksum:
                raise _lost(path, f"{seen.name} has other bytes than before", seen.name)
            return size
    except FileNotFoundError:
        raise _lost(path, f"{seen.name} is missing", seen.name) from None


def _checksum(descriptor: int, start: int, end: int, checksum: int) -> int:
    while start < end and (chunk := os.pread(descriptor, min(_CHUNK_BYTES, end - start), start)):
        checksum = zlib.crc32(chunk, checksum)
        start += len(chunk)
    return checksum


def _read_logs(path: Path) -> dict[str, int]:
    logs: dict[str, int] = {}
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.endswith(".log"):
                with suppress(FileNotFoundError):
                    logs[entry.name] = entry.stat().st_size
    return logs


def _number(name: str) -> int:
    """The number in the name of one of RocksDB's files; 0 if there is none.

    >>> _number("MANIFEST-000005"), _number("000012.log"), _number("something else")
    (5, 12, 0)
    """
    digits = name.removeprefix("MANIFEST-").removesuffix(".log")
    return int(digits) if digits.isdecimal() else 0


def _lost(path: Path, what: str, missing: str) -> Corruption:
    return Corruption(
        f"{path} has lost acknowledged writes: {what}. {ADVICE}", path=str(path), what=what, missing=missing
    )
