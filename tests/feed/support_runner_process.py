"""A process that runs a feed of a server until it is killed.

    python support_runner_process.py URL FEED HOLDER

Its lease is short, so that the next one need not wait for long.
"""

import sys
from dataclasses import replace
from functools import partial

from floodmark.feed.named.round import ThreadRound
from floodmark.feed.named.runner import FeedRunner
from floodmark.feed.sinks.base import open_sink
from floodmark.site.connecting import connect
from floodmark.site.feeds import surroundings_of


def run(url: str, feed: str, holder: str) -> None:
    """Run the feed, or wait until whoever runs it is gone."""
    with connect(url) as site:
        surroundings = replace(surroundings_of(site.host, ()), open_sink=open_sink)
        runner = FeedRunner(
            site.host.feeds,
            feed,
            partial(ThreadRound, surroundings),
            holder=holder,
            wait_for_lease=True,
            lease_seconds=1,
            report_seconds=0.05,
        )
        print(runner.run(), flush=True)


if __name__ == "__main__":
    run(*sys.argv[1:])
