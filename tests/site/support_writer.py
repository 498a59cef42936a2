"""A process that writes to a site until it is killed, and says what was acknowledged.

    python support_writer.py DIRECTORY MODE ROUND SEED MINUTES_BACK

Each line on standard output is one fact, printed only after the site has answered:

    open                                    the site is about to be opened
    put VERSION KEY VALUE                   a put was acknowledged
    delete VERSION KEY                      a deletion was acknowledged
    many VERSION VALUE KEY KEY ...          a put_many within one partition was acknowledged
    resolved VERSION COUNT                  so many changes lie at or below a resolved version

In mode `fsync` and `async` one thread puts; in mode `mixed` four threads do everything at once.
"""

import os
import sys
from functools import partial
from pathlib import Path
from random import Random
from threading import Thread
from typing import Final

import floodmark
from floodmark.clock import system_time_ms
from floodmark.site import Namespace, Site

BATCH: Final = 5
THREADS: Final = 4


def say(*words: object) -> None:
    """Print a line in one piece: threads and the kill cannot cut it."""
    line = " ".join(word.decode() if isinstance(word, bytes) else str(word) for word in words)
    os.write(1, f"{line}\n".encode())


def announce(site: Site, counted: tuple[int, int]) -> tuple[int, int]:
    """Say how many changes lie at or below the resolved version; goes on counting where it was."""
    since, count = counted
    resolved = site.resolved_version()
    if resolved > since:
        count += sum(1 for _ in site.changes("users", since=since, until=resolved))
        say("resolved", resolved, count)
    return resolved, count


def put_alone(site: Site, users: Namespace, name: str, durability: str) -> None:
    """Put for ever from one thread."""
    counted = (0, 0)
    for step in range(10**9):
        key, value = b"key-%d" % (step % 17), f"{name}/{step}".encode()
        say("put", users.put(key, value, durability=durability), key, value)  # type: ignore[arg-type]
        if step % 10 == 9:
            counted = announce(site, counted)


def mix(site: Site, users: Namespace, name: str, chance: Random) -> None:
    """Do everything for ever.  A batch has a prefix of its own, which no split cuts."""
    counted = (0, 0)
    for step in range(10**9):
        value = f"{name}/{step}".encode()
        key = b"key-%d" % chance.randrange(40)
        kind = chance.choice(["put", "put", "async", "delete", "many", "many", "split", "merge", "resolved"])
        if kind in ("put", "async"):
            durability = "async" if kind == "async" else "fsync"
            say("put", users.put(key, value, durability=durability), key, value)  # type: ignore[arg-type]
        elif kind == "delete":
            say("delete", users.delete(key), key)
        elif kind == "many":
            batch = b"batch-%d" % chance.randrange(20)
            keys = [batch + b"-%d" % index for index in range(BATCH)]
            say("many", users.put_many(dict.fromkeys(keys, value)), value, *keys)
        elif kind == "resolved":
            counted = announce(site, counted)
        else:
            reshape(site, kind, chance)


def reshape(site: Site, kind: str, chance: Random) -> None:
    partitions = site.partitions()
    try:
        if kind == "split" and len(partitions) < 8:
            site.split("users", chance.choice([b"batch-%d", b"key-%d"]) % chance.randrange(40))
        elif kind == "merge" and len(partitions) > 1:
            left = chance.randrange(len(partitions) - 1)
            site.merge(partitions[left].id, partitions[left + 1].id)
    except floodmark.Terminal:
        pass  # Another thread was faster.


def main(directory: str, mode: str, name: str, seed: str, minutes_back: str) -> None:
    """Write until killed."""
    back_ms = int(minutes_back) * 60_000
    say("open")
    site = floodmark.open(
        Path(directory),
        site="oslo",
        background=mode == "mixed",
        time_source=lambda: system_time_ms() - back_ms,
    )
    users = site.namespace("users") if site.namespaces() else site.create_namespace("users")
    if mode != "mixed":
        put_alone(site, users, name, mode)
        return
    threads = [
        Thread(target=partial(mix, site, users, f"{name}/{index}", Random(f"{seed}/{index}")), daemon=True)
        for index in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
