"""Badges: a message and the number of unread messages are one write, and no reader sees half of it.

    python examples/badges.py postgresql://HOST/DATABASE               # atomic batches and atomic reads
    python examples/badges.py postgresql://HOST/DATABASE --no-atomic   # the same with plain puts and gets

Three nodes serve the site, each a process.  Eight writers, each a process, send messages; eight readers look
at badges.  Writers and nodes are killed with SIGKILL and started again.  A badge is wrong if it counts a
message that is not there, or does not count one that is.  The program prints how many wrong badges the
readers saw; with atomic batches it fails if there is one.
"""

import argparse
import json
import subprocess
import sys
from itertools import count, cycle, islice
from threading import Event, Lock, Thread
from typing import IO, Any

import floodmark

NODES = 3
WRITERS = READERS = 8
RECIPIENTS = [b"ada", b"bob", b"grace", b"kim", b"ned", b"zoe"]
FLOODMARK = [sys.executable, "-m", "floodmark.cli"]


def send(site: floodmark.Site, recipient: bytes, number: int, *, atomic: bool) -> None:
    """Send message `number`, and set the badge to it."""
    messages, unread = site.namespace("messages"), site.namespace("unread")
    if atomic:
        with site.atomic() as batch:
            batch.put(messages, recipient, b"message %d" % number)
            batch.put(unread, recipient, b"%d" % number)
    else:
        messages.put(recipient, b"message %d" % number)
        unread.put(recipient, b"%d" % number)


def is_right(site: floodmark.Site, recipient: bytes, *, atomic: bool) -> bool:
    """Whether the badge shows the number of the last message."""
    messages, unread = site.namespace("messages"), site.namespace("unread")
    if atomic:
        message, badge = site.read_atomic([(messages, recipient), (unread, recipient)])
    else:
        message, badge = messages.get(recipient), unread.get(recipient)
    return bool(message == (None if badge is None else b"message " + badge))


def write(url: str, writer: int, start: int, *, atomic: bool) -> None:
    """Send messages until the process is killed, and print a line for each."""
    with floodmark.connect(url) as site:
        for number in count(start * WRITERS + writer, WRITERS):
            try:
                send(site, RECIPIENTS[number % len(RECIPIENTS)], number, atomic=atomic)
            except (floodmark.Retryable, floodmark.OutcomeUnknown):
                # A node was killed.  An atomic batch was then written as a whole, or not at all.
                continue
            print(number, flush=True)


class Process:
    """A child process whose lines are counted; it is killed with SIGKILL and started again."""

    def __init__(self, *command: str) -> None:
        self.command = command
        self.lines = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> str:
        """Start it; returns its first line."""
        self._process = subprocess.Popen([*self.command, *options], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        first = self._process.stdout.readline().decode()
        Thread(target=self._count, args=(self._process.stdout,), daemon=True).start()
        return first

    def _count(self, output: IO[bytes]) -> None:
        with output:
            for _ in output:
                self.lines += 1

    def kill(self) -> None:
        """Kill it with SIGKILL, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Readers:
    """Threads that read badges, and count the wrong ones."""

    def __init__(self, url: str, *, atomic: bool) -> None:
        self.looks = self.wrong = 0
        self._atomic = atomic
        self._lock = Lock()
        self._stopping = Event()
        self._site = floodmark.connect(url)
        self._threads = [Thread(target=self._read, args=(number,)) for number in range(READERS)]
        for thread in self._threads:
            thread.start()

    def _read(self, number: int) -> None:
        recipients = islice(cycle(RECIPIENTS), number, None)
        while not self._stopping.is_set():
            try:
                right = is_right(self._site, next(recipients), atomic=self._atomic)
            except floodmark.Retryable:
                # Another node takes over, and a later read reaches it.
                continue
            with self._lock:
                self.looks += 1
                self.wrong += not right

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._site.close()


def run_floodmark(*arguments: str) -> None:
    subprocess.run([*FLOODMARK, *arguments], check=True, stdout=subprocess.DEVNULL)


def prepare(url: str) -> None:
    """Make the namespaces, cut them into partitions, and give each node its share."""
    with floodmark.connect(url) as site:
        for name in ("messages", "unread"):
            try:
                site.create_namespace(name)
            except floodmark.NamespaceExists:
                # An earlier run made it.
                continue
            for recipient in RECIPIENTS[::2]:
                site.split(name, recipient)
    run_floodmark("partition", "rebalance", url, "--by", "count")


def main(database: str, *, atomic: bool, kills: int, pause_seconds: float, site: str) -> int:
    """Run writers and readers, kill writers and nodes, print the results; returns the exit code."""
    pause, options = Event(), [] if atomic else ["--no-atomic"]
    serve = [*FLOODMARK, "serve", database, "--site", site, "--json", "--log-level", "error"]
    serve += ["--listen", "127.0.0.1:0", "--node"]
    nodes = [Process(*serve, str(number + 1)) for number in range(NODES)]
    writers: list[Process] = []
    try:
        urls = [json.loads(node.start())["url"] for node in nodes]
        url = "grpc://" + ",".join(url.removeprefix("grpc://") for url in urls)
        prepare(url)
        writer_command = [sys.executable, __file__, url, *options, "--write"]
        writers += (Process(*writer_command, str(number)) for number in range(WRITERS))
        for writer in writers:
            writer.start("--start", "0")
        readers = Readers(url, atomic=atomic)
        for kill in range(1, kills + 1):
            pause.wait(pause_seconds)
            writer, node = writers[kill % WRITERS], nodes[kill % NODES]
            writer.kill()
            node.kill()
            pause.wait(pause_seconds)
            node.start()
            writer.start("--start", str(kill * 1_000_000))
            run_floodmark("partition", "rebalance", url, "--by", "count")
        pause.wait(pause_seconds)
        readers.stop()
    finally:
        for process in (*writers, *nodes):
            process.kill()
    sent = sum(writer.lines for writer in writers)
    print(f"{sent:,} messages sent; {kills} writers and {kills} nodes killed")
    print(f"{readers.looks:,} badges looked at; {readers.wrong:,} wrong")
    return 1 if atomic and readers.wrong else 0


def parse() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="the database; its schema for the site is made, or used again")
    parser.add_argument("--no-atomic", dest="atomic", action="store_false", help="plain puts and gets")
    parser.add_argument("--kills", type=int, default=3, help="how often a writer and a node are killed")
    parser.add_argument("--pause", type=float, default=10.0, help="seconds before and after each")
    parser.add_argument("--site", default="badges", help="the name of the site")
    parser.add_argument("--write", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    asked = parse()
    if asked.write is not None:
        write(asked.url, asked.write, asked.start, atomic=asked.atomic)
    else:
        sys.exit(
            main(
                asked.url,
                atomic=asked.atomic,
                kills=asked.kills,
                pause_seconds=asked.pause,
                site=asked.site,
            )
        )
