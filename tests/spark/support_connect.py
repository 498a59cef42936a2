"""A Spark Connect server as a process of its own.

    python support_connect.py MASTER

It prints its URL when it serves, on a free port of the loopback, and ends when its input does.
"""

import sys

from floodmark.spark.session import SparkOptions, open_session


def main(master: str) -> None:
    """Serve until nobody holds the other end any more."""
    conf = {
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.sql.artifact.isolation.enabled": "true",
    }
    with open_session(SparkOptions(master=master, conf=conf)) as session:
        service = getattr(session._jvm, "org.apache.spark.sql.connect.service.SparkConnectService$")
        port = getattr(service, "MODULE$").localPort()
        print(f"sc://127.0.0.1:{port}", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
