"""A process that runs a feed of a server until it is killed.

    python support_runner_process.py URL FEED HOLDER

Its lease is short, so that the next one need not wait for long.
"""

import sys

from floodmark.feed import Decoder
from floodmark.feed.named.runner import FeedRunner
from floodmark.feed.sinks import open_sink
from floodmark.site.connecting import connect


def run(url: str, feed: str, holder: str) -> None:
    """Run the feed, or wait until whoever runs it is gone."""
    with connect(url) as site:
        host = site.host
        names = {row.id: row.name for row in host.namespaces.list_namespaces()}
        runner = FeedRunner(
            host.feeds,
            feed,
            site=site.name,
            site_id=site.id,
            holder=holder,
            open_changes=host.changes,
            decode=Decoder(site.id, lambda: names, host.physical_ms).decode,
            open_sink=open_sink,
            wait_for_lease=True,
            lease_seconds=1,
            report_seconds=0.05,
        )
        print(runner.run(), flush=True)


if __name__ == "__main__":
    run(*sys.argv[1:])
