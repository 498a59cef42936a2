"""The workload: people at both sites send each other messages, and read them at home.

A message is a record of the namespace `messages`, which the last write decides.  How many of them somebody
has not read is a counter in `unread`: whoever sends adds 1, at either site, and whoever reads takes away what
the counter at home shows.  The demo keeps the truth beside it: what was sent to whom, and what was read.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import count, islice
from threading import Event, Lock, Thread
from typing import Final

import msgspec

import floodmark
from floodmark.cli.demo.servers import Server
from floodmark.clock import monotonic_ms

MESSAGES: Final = "messages"
UNREAD: Final = "unread"

PEOPLE: Final = {
    "oslo": ("ada", "alan", "barbara", "claude", "edsger", "frances"),
    "rome": ("grace", "hedy", "john", "katherine", "margaret", "tim"),
}
EVERYBODY: Final = tuple(name for names in PEOPLE.values() for name in names)

TICK_MS: Final = 100
MESSAGES_A_TICK: Final = 80
# Somebody at each site reads after so many ticks, one person after the other.
TICKS_A_READING: Final = 5


class Truth:
    """What was sent to everybody, and what was read, at all sites together."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._sent: Counter[str] = Counter()
        self._read: Counter[str] = Counter()

    def add(self, sent: Counter[str], read: Counter[str]) -> None:
        """Take note of what a site has acknowledged."""
        with self._lock:
            self._sent += sent
            self._read += read

    @property
    def sent(self) -> int:
        """How many messages there are."""
        return self._sent.total()

    def unread(self) -> dict[str, int]:
        """How many messages everybody has not read."""
        with self._lock:
            return {name: self._sent[name] - self._read[name] for name in EVERYBODY}


class Messaging:
    """The people of one site, from `start` to `stop`, at a steady rate."""

    def __init__(self, server: Server, truth: Truth) -> None:
        self.writes = 0
        self.sent = 0
        self.read = 0
        self._server = server
        self._home = PEOPLE[server.name]
        self._truth = truth
        self._numbers = count()
        self._stop = Event()
        self._failure: Exception | None = None
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin to send and to read."""
        self._stop = Event()
        self._thread = Thread(target=self._run, name=f"people of {self._server.name}", daemon=True)
        self._thread.start()

    def require_well(self) -> None:
        """Nothing while all is well; the error if a write was refused."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Return when the last message is acknowledged."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.require_well()

    def _run(self) -> None:
        try:
            self._send_and_read()
        except Exception as failure:
            self._failure = failure

    def _send_and_read(self) -> None:
        due_ms = monotonic_ms()
        messages, unread = self._server.site.namespace(MESSAGES), self._server.site.namespace(UNREAD)
        with messages.writer() as message_writer, unread.writer() as unread_writer:
            for tick in count():
                if self._stop.is_set():
                    return
                sent = self._send(message_writer, unread_writer)
                turn, rest = divmod(tick, TICKS_A_READING)
                read = Counter() if rest else self._read_mail(turn, unread, unread_writer)
                message_writer.flush()
                unread_writer.flush()
                self._truth.add(sent, read)
                self.writes += 2 * sent.total() + len(read)
                self.sent += sent.total()
                self.read += read.total()
                due_ms += TICK_MS
                # A site that was slow is not hurried afterwards.
                due_ms = max(due_ms, monotonic_ms() - TICK_MS)
                self._stop.wait(max(0, due_ms - monotonic_ms()) / 1000)

    def _send(self, messages: floodmark.Writer, unread: floodmark.Writer) -> Counter[str]:
        sent: Counter[str] = Counter()
        for number in islice(self._numbers, MESSAGES_A_TICK):
            sender, recipient = conversation(self._home, number)
            key = message_key(sender, recipient, self._server.name, number)
            messages.put(key, message(sender, f"message {number} from {self._server.name}"))
            unread.add(recipient.encode(), 1)
            sent[recipient] += 1
        return sent

    def _read_mail(self, turn: int, counters: floodmark.Namespace, unread: floodmark.Writer) -> Counter[str]:
        """Somebody who is at home here reads all messages that the counter here tells of."""
        name = self._home[turn % len(self._home)]
        shown = int(counters.get(name.encode()) or 0)
        unread.add(name.encode(), -shown)
        return Counter({name: shown})


def conversation(senders: Sequence[str], number: int) -> tuple[str, str]:
    """Who sends the message of a number to whom: everybody writes to everybody else in turn.

    >>> conversation(("ada", "alan"), 0), conversation(("ada", "alan"), 1), conversation(("ada", "alan"), 2)
    (('ada', 'alan'), ('alan', 'barbara'), ('ada', 'barbara'))
    """
    sender = senders[number % len(senders)]
    others = len(EVERYBODY) - 1
    place = (EVERYBODY.index(sender) + 1 + number // len(senders) % others) % len(EVERYBODY)
    return sender, EVERYBODY[place]


def message_key(sender: str, recipient: str, site: str, number: int) -> bytes:
    """The key of a message: conversations stand together."""
    first, second = sorted((sender, recipient))
    return f"{first}+{second}/{number:06}-{site}".encode()


def message(sender: str, text: str) -> bytes:
    """A message as it is stored."""
    return msgspec.json.encode({"from": sender, "text": text})
