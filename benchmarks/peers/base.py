"""The protocol of the alternatives to Floodmark, and the processes of their servers.

A `Peer` may not be installed.  `running` starts its real server on loopback, durable, with the configuration
beside this file, and stops it at the end.  The `Server` that it yields holds only an address, so it can be
passed to the processes of clients.  One call that loads or writes has each key at most once, as a batch of
Floodmark has.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

HERE: Final = Path(__file__).resolve().parent
LOOPBACK: Final = "127.0.0.1"
INSTALL_CLIENTS: Final = "pip install -r benchmarks/peers/requirements.txt"

START_SECONDS_MAX: Final = 30.0
STOP_SECONDS_MAX: Final = 15.0
# Limit for one answer, and for the next change of a stream.
ANSWER_SECONDS_MAX: Final = 30.0
POLL_SECONDS: Final = 0.05
LOG_LINES_SHOWN: Final = 20

ENTER: Final = 0o001

Pair: TypeAlias = tuple[bytes, bytes]
Write: TypeAlias = Callable[[Sequence[Pair]], None]
Answer = TypeVar("Answer")


class PeerFailed(RuntimeError):
    """A peer did not start, did not answer in time, or is not set up as a comparison needs it."""


class Client(Protocol):
    """One connection for point operations; used by one thread."""

    def put(self, key: bytes, value: bytes) -> None:
        """Returns when the record is on disk."""

    def get(self, key: bytes) -> bytes | None: ...


class Call(NamedTuple):
    """A put of `value`, or a get that must return it."""

    key: bytes
    value: bytes
    is_put: bool


@runtime_checkable
class PipelinedClient(Client, Protocol):
    """A connection that sends several calls before it reads the first answer."""

    def pipeline(self, calls: Sequence[Call]) -> Sequence[bytes | None]:
        """Returns the results of the gets, in order, when all puts are on disk."""


class Server(Protocol):
    """A running peer."""

    def facts(self) -> Mapping[str, str]:
        """Its version and its durability settings, as the server itself reports them."""

    def load(self, records: Sequence[Pair], batch: int) -> None:
        """Append changes of new keys, as fast as the peer can make them durable."""

    def catch_up(self, count: int) -> int:
        """Read and decode changes from the first one on until `count` were read; returns their number."""

    def writer(self) -> AbstractContextManager[Write]:
        """Yields a function that writes a batch as a whole, and returns when it is on disk."""

    def tail(self) -> AbstractContextManager[Iterator[Sequence[Pair]]]:
        """Yields decoded changes in groups as they arrive, from the first write after entering."""


@runtime_checkable
class KeyServer(Server, Protocol):
    """A running peer that also finds values by their keys."""

    def fill(self, records: Sequence[Pair], batch: int) -> None:
        """Put the records that the point operations will read."""

    def client(self) -> AbstractContextManager[Client]: ...


class Peer(Protocol):
    """An alternative to Floodmark."""

    @property
    def name(self) -> str: ...

    def is_installed(self) -> bool: ...

    def how_to_install(self) -> str: ...

    def running(self, directory: Path) -> AbstractContextManager[Server]:
        """A server with its data in a new folder of `directory`, for as long as the context is open.

        The server may run as another user, which needs permission to enter `directory`;
        `scratch_directory` grants it.
        """


def count_changes(groups: Iterable[Sequence[Pair]], count: int) -> int:
    """Read groups until they held at least `count` changes; returns the number read."""
    seen = 0
    for group in groups:
        seen += len(group)
        if seen >= count:
            break
    return seen


def in_batches_of(batch: int, records: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    return (records[start : start + batch] for start in range(0, len(records), batch))


def require(name: str, facts: Mapping[str, str], promised: Mapping[str, str]) -> None:
    """Refuse a server that is less durable than the comparison says."""
    for setting, value in promised.items():
        if facts.get(setting) != value:
            raise PeerFailed(
                f"{name} runs with {setting}={facts.get(setting)}, and must with {value}: "
                f"compare its configuration in {HERE.name}/ with the version that is installed"
            )


# Finding things


def find_program(name: str, *directories: Path) -> Path | None:
    """The first match in `directories`, beside the interpreter and on the path; None if there is none."""
    beside = Path(sys.executable).parent
    path = os.pathsep.join([*map(str, directories), str(beside), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=path)
    return None if found is None else Path(found)


def has_modules(*names: str) -> bool:
    return all(find_spec(name) is not None for name in names)


def free_port() -> int:
    """A port that is free at this moment."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """A temporary directory that servers under another user can enter."""
    with tempfile.TemporaryDirectory(prefix="floodmark-peers-", dir=parent) as name:
        directory = Path(name).resolve()
        directory.chmod(directory.stat().st_mode | ENTER)
        yield directory


def check_others_can_enter(directory: Path) -> None:
    for each in (directory, *directory.resolve().parents):
        if not each.stat().st_mode & ENTER:
            raise PeerFailed(f"the server's user cannot enter {each}: run chmod o+x on it, or name another")


# Server processes


@dataclass(frozen=True, kw_only=True)
class ServerProcess:
    """The process of a server, and its log file."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_until_ready(self, ask: Callable[[], Answer], not_yet: tuple[type[Exception], ...]) -> Answer:
        """Call `ask` until it succeeds; errors in `not_yet` mean that the server is still starting."""
        deadline = monotonic() + START_SECONDS_MAX
        while True:
            try:
                return ask()
            except not_yet as error:
                if monotonic() > deadline:
                    raise PeerFailed(
                        f"{self.name} did not start in time: {error}\n{self._ending()}"
                    ) from None
            try:
                self.process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            raise PeerFailed(f"{self.name} ended while starting:\n{self._ending()}")

    def stop(self, with_signal: signal.Signals) -> None:
        """Send a signal and wait; kill the process if it has not ended after `STOP_SECONDS_MAX`."""
        self.process.send_signal(with_signal)
        try:
            self.process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _ending(self) -> str:
        lines = self.log.read_text("utf-8", errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES_SHOWN:])


@contextmanager
def server_process(
    name: str,
    command: Sequence[str | Path],
    directory: Path,
    *,
    user: str | None = None,
    stop_signal: signal.Signals = signal.SIGTERM,
) -> Iterator[ServerProcess]:
    """Run a server in `directory` while the context is open.  With setpriv, it ends with this process too."""
    log = directory / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*_ended_with_this_process(stop_signal), *command],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C must reach only the benchmark, which then stops the server.
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
    started = ServerProcess(name=name, process=process, log=log)
    try:
        yield started
    finally:
        started.stop(stop_signal)


def _ended_with_this_process(stop_signal: signal.Signals) -> list[str]:
    # The kernel sends the signal even if this process is killed and cannot stop the server itself.
    program = shutil.which("setpriv")
    return [] if program is None else [program, "--pdeathsig", stop_signal.name.removeprefix("SIG")]
