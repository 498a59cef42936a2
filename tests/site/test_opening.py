"""Opening a site: whose it is, who owns it now, what a crash leaves, and what a full disk does."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.clock.fakes import FakeTime
from tests.sizes import only

import floodmark
from floodmark import Site
from floodmark.engine import MemoryEngine
from floodmark.engine.rocks import RocksEngine
from floodmark.host.secondary import open_directory
from floodmark.model import errors
from floodmark.model.errors import FloodmarkError, InvalidArgument, StorageFull
from floodmark.model.format import FORMAT
from floodmark.partition import FAMILIES
from floodmark.site import open_engine

HOUR_MS = 3_600_000
NOBODY = 65534


def open_site(path: Path, **options: Any) -> Site:
    return floodmark.open(path, **{"background": False, **options})


def make_site(path: Path, **options: Any) -> None:
    with open_site(path, site="oslo", site_id=7, **options) as site:
        site.create_namespace("users").put(b"ada", b"countess")


def entries(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def require_usable(path: Path) -> None:
    """A refusal must have let go of the directory, and left what is in it."""
    with open_site(path) as site:
        assert site.namespace("users").get(b"ada") == b"countess"


# Directories that are no site


BAD_OPTIONS: dict[str, tuple[object, ...]] = {
    "collect_every": (5, None, timedelta(-1)),
    "log_retention": (5, "1d", timedelta(-1)),
    "skew_ms_max": (-1, None, 1.5, True),
    "disk_reserve_bytes": (-1, None, "1 GB"),
    "time_source": (None, 5, lambda: 1.5),
    "durability": (None, "sync"),
}


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option, values in BAD_OPTIONS.items() for value in values]
)
def test_option_that_cannot_be_used_is_refused_by_name_and_nothing_is_made(
    tmp_path: Path, option: str, value: object
) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(InvalidArgument, match=option):
        floodmark.open(tmp_path / "site", **options)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidArgument, match=option):
        open_engine(MemoryEngine(FAMILIES), site="oslo", **options)


@pytest.mark.parametrize("path", ["", None, 5, b"site", "a\0b"])
def test_what_is_no_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match="path"):
        floodmark.open(path, site="oslo")
    assert list(tmp_path.iterdir()) == []


def test_file_in_the_place_of_the_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    make_site(tmp_path)
    shutil.rmtree(tmp_path / "engine")
    (tmp_path / "engine").write_text("notes")
    with pytest.raises(FloodmarkError, match="engine"):
        open_site(tmp_path)
    assert (tmp_path / "engine").read_text() == "notes"


FULL_CALLS = ["os.open", "os.ftruncate", "os.pwrite", "os.fsync", "pathlib.Path.mkdir"]


@pytest.mark.parametrize("call", FULL_CALLS)
def test_full_disk_is_named_by_open_and_room_on_it_mends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.raises(StorageFull, match="make room"):
            floodmark.open(tmp_path / "site", site="oslo")
    with floodmark.open(tmp_path / "site", site="oslo") as site:
        assert site.name == "oslo"


def test_directory_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("chapter one")
    with pytest.raises(errors.NotASite, match="empty or a new directory") as refused:
        open_site(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert entries(tmp_path) == {"thesis.txt": b"chapter one"}


def test_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("chapter one")
    with pytest.raises(errors.NotASite, match="is a file"):
        open_site(file)
    with pytest.raises(errors.CannotOpen, match="file"):
        open_site(file / "below")
    assert file.read_text() == "chapter one"


@contextmanager
def as_somebody_without_rights() -> Iterator[Path]:
    """A directory that others may enter, and an effective user who is not root."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        if os.geteuid() != 0:
            yield path
            return
        try:
            os.seteuid(NOBODY)
        except OSError as error:
            pytest.skip(
                f"THE RIGHTS OF DIRECTORIES ARE NOT TESTED: root cannot become another user ({error})"
            )
        try:
            yield path
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("mode", [0o555, 0o000], ids=["read-only", "closed"])
def test_directory_without_rights_is_refused_by_name(mode: int) -> None:
    with as_somebody_without_rights() as path:
        as_root = os.getuid() == 0
        if as_root:
            os.seteuid(0)
        make_site(path / "site")
        for made in (path / "site", path / "empty"):
            made.mkdir(exist_ok=True)
            made.chmod(mode)
        path.chmod(0o555)
        if as_root:
            os.seteuid(NOBODY)
        for name in ("site", "empty", "missing"):
            with pytest.raises(errors.CannotOpen, match="denied") as refused:
                open_site(path / name)
            assert str(path / name) in str(refused.value)
        if as_root:
            os.seteuid(0)
        path.chmod(0o755)
        for name in ("site", "empty"):
            (path / name).chmod(0o755)
        require_usable(path / "site")


# The identity


def test_newer_format_is_refused(tmp_path: Path) -> None:
    make_site(tmp_path)
    identity = tmp_path / "floodmark.json"
    kept = identity.read_bytes()
    newer = json.dumps(json.loads(kept) | {"format": FORMAT + 1, "unheard_of": True})
    identity.write_text(newer)
    with pytest.raises(errors.FormatTooNew, match=rf"format {FORMAT + 1}.*up to {FORMAT}.*newer Floodmark"):
        open_site(tmp_path)
    assert identity.read_text() == newer
    identity.write_bytes(kept)
    require_usable(tmp_path)


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b"\xff\xfe\x00",
        b'{"site": "\xff", "site_id": 7, "format": 1}',
        b'{"site": "oslo", "site_id": 7}',
        b'{"site": 5, "site_id": 7, "format": 1}',
        b'{"site": "oslo", "site_id": "7", "format": 1}',
        b'{"site": "oslo", "site_id": 7, "format": "1"}',
        b'{"site": "oslo", "site_id": 7, "format": 0}',
        b'{"site": "oslo", "site_id": 700, "format": 1}',
    ],
    ids=ascii,
)
def test_damaged_identity_is_refused_and_left_for_repair(tmp_path: Path, damaged: bytes) -> None:
    make_site(tmp_path)
    identity = tmp_path / "floodmark.json"
    kept = identity.read_bytes()
    identity.write_bytes(damaged)
    with pytest.raises(errors.NotASite, match=r"floodmark\.json is damaged.*backup"):
        open_site(tmp_path)
    assert identity.read_bytes() == damaged
    identity.write_bytes(kept)
    require_usable(tmp_path)


@pytest.mark.parametrize("asked", [{"site": "rome"}, {"site_id": 8}, {"site": "oslo", "site_id": 8}], ids=str)
def test_wrong_name_or_id_is_refused(tmp_path: Path, asked: dict[str, Any]) -> None:
    make_site(tmp_path)
    with pytest.raises(errors.SiteMismatch, match=r"'oslo' with id 7.*own name"):
        open_site(tmp_path, **asked)
    require_usable(tmp_path)
    with open_site(tmp_path, site="oslo", site_id=7) as site:
        assert (site.name, site.id) == ("oslo", 7)


@pytest.mark.parametrize(
    "bad", [{"site": ""}, {"site": "a b"}, {"site_id": 0}, {"site_id": 256}, {"site_id": "7"}], ids=str
)
def test_site_of_an_impossible_name_or_id_is_not_made(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidName):
        open_site(tmp_path, **bad)
    with pytest.raises(errors.InvalidName):
        open_engine(MemoryEngine(FAMILIES), **{"site": "oslo", **bad})
    make_site(tmp_path)


def test_site_takes_the_name_of_its_directory_and_keeps_its_id(tmp_path: Path) -> None:
    with open_site(tmp_path / "bergen") as site:
        name, first = site.name, site.id
    assert name == "bergen"
    shutil.move(tmp_path / "bergen", tmp_path / "elsewhere")
    with open_site(tmp_path / "elsewhere") as site:
        assert (site.name, site.id) == ("bergen", first)


# The owner

OWNER = """
import sys, floodmark
site = floodmark.open(sys.argv[1], background=False, time_source=lambda: int(sys.argv[2]))
users = site.namespace("users")
print(max(users.put(b"key%d" % number, b"kept") for number in range(20)), flush=True)
sys.stdin.read()
"""


@contextmanager
def child(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_second_open_in_the_same_process_is_refused(tmp_path: Path) -> None:
    with open_site(tmp_path, site="oslo") as site:
        users = site.create_namespace("users")
        for _ in range(2):
            with pytest.raises(errors.SiteLocked, match=f"process {os.getpid()} .*stop that process"):
                open_site(tmp_path)
        users.put(b"ada", b"countess")
    require_usable(tmp_path)


def test_owner_in_another_process_is_named_and_its_death_frees_the_site(tmp_path: Path) -> None:
    """It is killed with time an hour ahead of ours: our versions must still be above all of its own."""
    time = FakeTime()
    make_site(tmp_path, time_source=time)
    with child(OWNER, tmp_path, time.ms + HOUR_MS) as owner:
        last = int(read_line(owner))
        with pytest.raises(errors.SiteLocked, match=f"process {owner.pid} ") as refused:
            open_site(tmp_path)
        assert str(owner.pid) in str(refused.value.details["owner"])
        owner.kill()
        owner.wait()
        with open_site(tmp_path, time_source=time) as site:
            users = site.namespace("users")
            assert all(users.get(b"key%d" % number) == b"kept" for number in range(20))
            assert users.put(b"key0", b"new") > last
            assert users.get(b"key0") == b"new"


def test_failure_to_open_lets_go_of_the_directory(tmp_path: Path) -> None:
    make_site(tmp_path)
    current = tmp_path / "engine" / "CURRENT"
    kept = current.read_bytes()
    current.write_bytes(b"nonsense\n")
    with pytest.raises(errors.FloodmarkError):
        open_site(tmp_path)
    current.write_bytes(kept)
    require_usable(tmp_path)


# Creation that was interrupted


@pytest.mark.parametrize("step", ["directory", "owner", "identity half", "identity", "engine", "bound"])
def test_interrupted_creation_continues(tmp_path: Path, step: str) -> None:
    """What a site's directory holds when its maker dies after each step."""
    path = tmp_path / "site"
    path.mkdir()
    if step != "directory":
        (path / "owner").write_text("process 1 on nowhere")
    if step == "identity half":
        (path / "floodmark.json.new").write_text('{"site": "os')
    if step in ("identity", "engine", "bound"):
        (path / "floodmark.json").write_text(
            '{"site": "oslo", "site_id": 7, "format": 2, "unfinished": true}\n'
        )
    if step in ("engine", "bound"):
        engine = RocksEngine(path / "engine", FAMILIES)
        if step == "bound":
            engine.write([("meta", b"clock/bound", (1 << 60).to_bytes(8, "big"))])
        engine.close()
    make_site(path)
    require_usable(path)


# A database that is not the site's own


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("left", ["nothing", "an empty directory"])
def test_site_without_its_database_is_refused_and_not_made_anew(
    tmp_path: Path, left: str, create: bool
) -> None:
    """As on a disk that is not mounted."""
    path = tmp_path / "site"
    make_site(path)
    (path / "engine").rename(tmp_path / "unmounted")
    if left == "an empty directory":
        (path / "engine").mkdir()
    with pytest.raises(errors.CannotOpen, match=r"'oslo'.*database is gone.*[Mm]ount"):
        open_site(path, create=create)
    if left == "an empty directory":
        assert not list((path / "engine").iterdir())
        (path / "engine").rmdir()
    (tmp_path / "unmounted").rename(path / "engine")
    require_usable(path)


@pytest.mark.parametrize("changed", [{"site_id": 5}, {"site": "osln"}], ids=str)
def test_changed_identity_is_refused_and_its_copy_named(tmp_path: Path, changed: dict[str, Any]) -> None:
    """One bit of `site_id` would change the origin of every later write."""
    make_site(tmp_path)
    identity = tmp_path / "floodmark.json"
    kept = identity.read_bytes()
    identity.write_text(json.dumps(json.loads(kept) | changed))
    with pytest.raises(errors.Corruption, match=r"the database belongs to 'oslo' with id 7"):
        open_site(tmp_path)
    with pytest.raises(errors.Corruption, match="belongs to 'oslo' with id 7"):
        open_directory(tmp_path)
    identity.write_bytes(kept)
    require_usable(tmp_path)


def test_database_of_another_site_is_refused(tmp_path: Path) -> None:
    make_site(tmp_path / "oslo")
    with open_site(tmp_path / "rome", site="rome", site_id=9):
        pass
    shutil.rmtree(tmp_path / "rome" / "engine")
    shutil.copytree(tmp_path / "oslo" / "engine", tmp_path / "rome" / "engine")
    (tmp_path / "rome" / "witness").unlink()
    with pytest.raises(errors.Corruption, match=r"'rome' with id 9.*belongs to 'oslo' with id 7"):
        open_site(tmp_path / "rome")


def test_site_of_an_earlier_floodmark_gets_its_identity_and_its_witness_when_it_is_opened(
    tmp_path: Path,
) -> None:
    make_site(tmp_path)
    (tmp_path / "witness").unlink()
    engine = RocksEngine(tmp_path / "engine", FAMILIES)
    engine.write([("meta", b"identity", None)])
    engine.close()
    require_usable(tmp_path)
    assert (tmp_path / "witness").exists()
    identity = tmp_path / "floodmark.json"
    identity.write_text(json.dumps(json.loads(identity.read_bytes()) | {"site_id": 8}))
    with pytest.raises(errors.Corruption, match="belongs to"):
        open_site(tmp_path)


# What reopening keeps


def describe(site: Site) -> dict[str, object]:
    """Everything about a site that must outlive the process."""
    spaces = {name: site.namespace(name) for name in site.namespaces()}
    statistics = site.statistics()
    oldest = max(space.oldest_version for space in statistics.namespaces)
    return {
        "settings": {name: space.settings for name, space in spaces.items()},
        "records": {
            name: [space.record(key) for key, _ in space.scan()] for name, space in sorted(spaces.items())
        },
        "changes": list(site.changes(since=oldest)),
        "safe points": site.safe_points(),
        "partitions": [(partition.id, partition.range) for partition in site.partitions()],
        "collected": statistics.namespaces,
    }


def test_reopening_keeps_everything_and_goes_on_above_with_the_clock_set_back(tmp_path: Path) -> None:
    time = FakeTime()
    with open_site(tmp_path, site="oslo", time_source=time) as site:
        users = site.create_namespace("users", retention=timedelta(minutes=1))
        orders = site.create_namespace("orders", ttl=timedelta(hours=1), retention=timedelta(minutes=2))
        site.create_namespace("gone").put(b"k", b"v")
        users.put_many({b"%03d" % number: bytes(number) for number in range(200)})
        users.delete(b"007")
        site.split("users", b"100")
        time.ms += 300_000
        large = orders.put(b"large", bytes(100_000))
        site.hold_safe_point("reader", large, namespace="orders")
        site.drop_namespace("gone")
        site.collect_garbage()
        users.put(b"100", b"again")
        site.update_namespace("users", ttl=timedelta(days=1))
        before, latest = describe(site), site.now()
    time.ms -= HOUR_MS
    with open_site(tmp_path, time_source=time) as site:
        assert describe(site) == before
        version = site.namespace("users").put(b"100", b"once more")
        assert version > latest
        assert [change.value for change in site.changes("users", since=latest)] == [b"once more"]
        assert site.create_namespace("gone").get(b"k") is None
        ids = [space.id for space in site.statistics().namespaces]
        assert max(ids) == 4, "the id of a dropped namespace is not used again"


# Full disks

FULL_DISK = """
import collections, json, resource, signal, sys, traceback, floodmark

# Writing beyond the limit then fails with EFBIG, as it fails with ENOSPC on a disk that is full.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path, limit, then = sys.argv[1], int(sys.argv[2]), sys.argv[3]
site = floodmark.open(path, site="oslo", background=False)
users = site.create_namespace("users")
acknowledged, open_fate, outcomes, foreign = {}, {}, collections.Counter(), []

def attempt(call):
    try:
        return call()
    except floodmark.FloodmarkError as error:
        return type(error).__name__
    except BaseException:
        foreign.append(traceback.format_exc())
        return "foreign"

def put(number):
    key, value = b"key%03d" % number, bytes([number]) * 4000
    outcome = attempt(lambda: users.put(key, value))
    outcomes["done" if isinstance(outcome, int) else outcome] += 1
    if isinstance(outcome, int):
        acknowledged[key] = value
    elif outcome == "OutcomeUnknown":
        open_fate[key] = value

def is_all_there():
    found = dict(users.scan())
    return (
        all(users.get(key) == found.get(key) == value for key, value in acknowledged.items())
        and all(open_fate.get(key) == found[key] for key in found.keys() - acknowledged.keys())
        and [key for key, _ in users.scan(reverse=True)] == sorted(found, reverse=True)
    )

for number in range(10):
    put(number)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
for number in range(10, 100):
    put(number)
full = dict(outcomes)
reads_while_full = attempt(is_all_there)
closed = attempt(site.close) if then == "reopen" else None
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
if then == "reopen":
    site = floodmark.open(path, background=False)
    users = site.namespace("users")
outcomes.clear()
for number in range(100, 110):
    put(number)
reads_afterwards = attempt(is_all_there)
changes = attempt(lambda: {change.key for change in site.changes("users")})
found = attempt(lambda: {key for key, _ in users.scan()})
attempt(site.close)
print(json.dumps({
    "full": full, "reads while full": reads_while_full, "closed": closed, "after": dict(outcomes),
    "reads afterwards": reads_afterwards, "changes": changes == found, "foreign": foreign[:1],
}))
"""

# What a writer may be told while the disk is full.
HONEST = {"StorageFull", "StorageFailed", "OutcomeUnknown", "PartitionStopped"}


@pytest.mark.parametrize("then", ["go on", "reopen"])
@pytest.mark.parametrize("limit", only([1, 100_000], [1, 4096, 100_000]))
def test_full_disk_is_told_honestly_and_nothing_acknowledged_is_lost(
    tmp_path: Path, limit: int, then: str
) -> None:
    """A limit on file sizes makes RocksDB's own writes fail in three places.

    With 1 and 4,096 bytes the write-ahead log cannot grow and RocksDB cannot reopen either (not even its
    options file fits); with 100,000 some more writes succeed first.  Seen: the failed write says "IO
    error: While appending to file …: File too large", RocksDB then refuses all writes but goes on
    serving reads, and closing such a database raises as well, because it tries to flush its log.
    """
    with child(FULL_DISK, tmp_path, limit, then) as process:
        told = json.loads(read_line(process))
    assert told["foreign"] == []
    refused = set(told["full"]) - {"done"}
    assert refused
    assert refused <= HONEST
    assert told["reads while full"] is True
    assert told["closed"] in (None, *HONEST)
    assert told["after"] == {"done": 10}
    assert told["reads afterwards"] is True
    assert told["changes"] is True


def test_disk_below_its_reserve_takes_no_writes_and_serves_reads(tmp_path: Path) -> None:
    make_site(tmp_path)
    with open_site(tmp_path, disk_reserve_bytes=1 << 62) as site:
        users = site.namespace("users")
        before = describe(site)
        writes: list[Callable[[], object]] = [
            lambda: users.put(b"ada", b"x"),
            lambda: users.put(b"ada", b"x", durability="async"),
            lambda: users.put_many({b"ada": b"x"}),
            lambda: users.delete(b"ada"),
            lambda: users.compare_and_set(b"ada", b"countess", b"x"),
            users.delete_range,
        ]
        for write in writes:
            with pytest.raises(errors.StorageFull, match=r"bytes left.*make room") as refused:
                write()
            assert str(tmp_path) in str(refused.value)
        assert describe(site) == before
    require_usable(tmp_path)


def test_refusal_of_many_writes_does_not_pile_up_tracebacks(tmp_path: Path) -> None:
    """Each writer gets an error of its own: one that is raised again and again keeps every frame alive."""
    make_site(tmp_path)

    def depth(error: BaseException) -> int:
        frames, traceback = 0, error.__traceback__
        while traceback is not None:
            frames, traceback = frames + 1, traceback.tb_next
        return frames

    with open_site(tmp_path, disk_reserve_bytes=1 << 62) as site:
        users = site.namespace("users")
        depths = set()
        for _ in range(5):
            with pytest.raises(errors.StorageFull) as refused:
                users.put(b"ada", b"x")
            depths.add(depth(refused.value))
    assert len(depths) == 1
