"""Named feeds, subscriptions and followers go on when nodes are lost, the keeper among them."""

from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import pytest
from tests.feed.support import impatient_followers
from tests.nodes import NodeCluster
from tests.waiting import HANG_SECONDS, wait_until

from floodmark.feed.named.feeds import FeedState
from floodmark.feed.named.round import Surroundings, ThreadRound
from floodmark.feed.named.runner import FeedRunner
from floodmark.feed.subscription.consumer import SubscriptionOptions
from floodmark.model.change import Change
from floodmark.model.errors import FloodmarkError
from floodmark.site import Site
from floodmark.site.beginning import decoder_of
from floodmark.testing.sinks import MemorySinks

KEYS = (b"ada", b"ken", b"zoe")
# Time passes quickly here, and leases are renewed by real time.
LEASE_SECONDS = 3_600
# The node that owns the last of the keys, and the keeper.
LOST = pytest.mark.parametrize("lost", [3, 1], ids=["owner", "keeper"])
WHERE = pytest.mark.parametrize("connects", [True, False], ids=["client", "node"])


def reader_of(cluster: NodeCluster, connects: bool) -> Site:
    """The site as a client of node 2 has it, or node 2 itself."""
    return cluster.connect(2) if connects else cluster.sites[2]


def put_all(cluster: NodeCluster, value: bytes) -> list[tuple[bytes, bytes]]:
    """Write all keys."""
    users = cluster.sites[2].namespace("users")
    for key in KEYS:
        users.put(key, value)
    return [(key, value) for key in KEYS]


def tick_until(cluster: NodeCluster, condition: Callable[[], bool]) -> None:
    """Let time pass at all nodes until something has happened."""

    def look() -> bool:
        cluster.tick()
        return condition()

    wait_until(look, "it never came to that", pause_seconds=0.05)


def seen(changes: list[Change]) -> list[tuple[bytes, bytes | None]]:
    return [(change.key, change.value) for change in changes]


def runner_of(site: Site, sinks: MemorySinks) -> FeedRunner:
    """The runner of the feed `copy`, with sinks in memory."""
    surroundings = Surroundings(
        site=site.name,
        site_id=site.id,
        open_changes=site.host.changes,
        decode=decoder_of(site.host).decode,
        open_sink=sinks.open_uri,
    )
    return FeedRunner(
        site.host.feeds,
        "copy",
        partial(ThreadRound, surroundings),
        holder="test",
        lease_seconds=LEASE_SECONDS,
        time_source=site.host.physical_ms,
    )


@pytest.mark.slow
@LOST
@WHERE
def test_a_named_feed_goes_on_when_a_node_is_lost(cluster: NodeCluster, lost: int, connects: bool) -> None:
    site = reader_of(cluster, connects)
    site.feeds.create("copy", "users", "blackhole:", since="beginning")
    sinks, states = MemorySinks(), list[FeedState]()
    runner = runner_of(site, sinks)
    running = Thread(target=lambda: states.append(runner.run()), daemon=True)
    running.start()
    written = put_all(cluster, b"before")
    tick_until(cluster, lambda: len(sinks.changes) >= len(written))
    cluster.kill(lost)
    cluster.take_over()
    written += put_all(cluster, b"after")
    tick_until(cluster, lambda: {*seen(sinks.changes)} >= {*written})
    last = max(change.version for change in sinks.changes)
    tick_until(cluster, lambda: site.feeds.show("copy").checkpoint >= last)
    runner.request_stop()
    running.join(HANG_SECONDS)
    assert states == [FeedState.NORMAL]
    for key in KEYS:
        versions = [change.version for change in sinks.changes if change.key == key]
        assert sorted({*versions}) == list(dict.fromkeys(versions)), "an older change came first"
    if connects:
        site.close()


@LOST
@WHERE
def test_a_subscription_goes_on_when_a_node_is_lost(cluster: NodeCluster, lost: int, connects: bool) -> None:
    site = reader_of(cluster, connects)
    got: list[Change] = []
    failures: list[FloodmarkError] = []
    options = SubscriptionOptions(lease_seconds=LEASE_SECONDS)

    def consume() -> None:
        try:
            with site.subscribe("indexer", "users", start="beginning", options=options) as subscription:
                for delivery in subscription:
                    got.append(delivery.change)
                    delivery.acknowledge()
                    if delivery.change.value == b"end":
                        return
        except FloodmarkError as failure:
            failures.append(failure)

    consuming = Thread(target=consume, daemon=True)
    consuming.start()
    written = put_all(cluster, b"before")
    tick_until(cluster, lambda: len(got) >= len(written))
    cluster.kill(lost)
    cluster.take_over()
    written += put_all(cluster, b"after")
    tick_until(cluster, lambda: {*seen(got)} >= {*written})
    assert sorted(seen(got)) == sorted(written), "a change that was acknowledged came again"
    cluster.sites[2].namespace("users").put(b"end", b"end")
    tick_until(cluster, lambda: not consuming.is_alive())
    assert failures == []
    assert site.subscriptions.statistics("indexer").unacked == 0
    if connects:
        site.close()


def test_a_follower_in_the_process_of_a_node_goes_on_when_the_node_begins_anew(cluster: NodeCluster) -> None:
    with impatient_followers():
        written = put_all(cluster, b"before")
        cluster.tick()
        stream: Any = cluster.sites[2].changes("users", since="beginning", follow=True)
        got = [next(stream) for _ in written]
        node = cluster.silence(2)
        cluster.take_over()
        users = cluster.sites[1].namespace("users")
        for key in KEYS:
            users.put(key, b"after")
        cluster.sites[2] = node
        cluster.tick(2)
        assert cluster.host(2).shared.incarnations == 2
        got += [next(stream) for _ in KEYS]
        assert sorted(seen(got[:3])) == written
        assert sorted(seen(got[3:])) == [(key, b"after") for key in KEYS]
        stream.close()
