"""A server that does not answer is refused on the driver, after patience: it may be starting again."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from floodmark.model.errors import Unreachable
from floodmark.spark.source.schemas import CHANGES, PAIRS
from floodmark.spark.source.stream import open_stream_reader
from floodmark.spark.source.writing import open_stream_writer, open_writer

GIVEN = {"path": "grpc://127.0.0.1:1", "namespace": "users"}

WAYS: dict[str, Callable[[], object]] = {
    "write": lambda: open_writer(GIVEN, PAIRS),
    "write a stream": lambda: open_stream_writer(GIVEN, PAIRS, False),
    "read a stream": lambda: open_stream_reader({**GIVEN, "readChangeFeed": "true"}, CHANGES).initialOffset(),
}


@pytest.mark.slow
def test_server_that_does_not_answer_is_refused() -> None:
    # They wait a minute, side by side.
    with ThreadPoolExecutor() as pool:
        asked = {way: pool.submit(ask) for way, ask in WAYS.items()}
    for way, answer in asked.items():
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
            pytest.fail(f"{way}: {answer.result()}")
