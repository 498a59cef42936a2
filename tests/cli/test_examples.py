"""The examples: each runs as it stands, and prints what it should."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.support import PROCESS_SECONDS_MAX, ROOT
from tests.server import test_badges, test_unread_counts
from tests.spark import test_examples as on_spark

OUTPUTS = {
    "async_client.py": """\
visits of home: 20
set again: True
change: b'ada' b'countess'
change: b'ada' b'programmer'
users: [(b'ada', b'programmer')]
""",
    "cache.py": """\
{'milk': '1', 'tea': '3'}
{'tea': '4'} True
""",
    "first_look.py": """\
b'programmer' b'countess'
{b'ada': b'programmer'}
True False
upsert b'ada' b'programmer'
upsert b'alan' b'logician'
upsert b'grace' b'admiral'
delete b'alan' None
upsert b'grace' b'rear admiral'
""",
    "search_index.py": """\
['ebb', 'flood'] ['flood']
[] ['ebb']
['tide'] []
""",
    "secondary_index.py": """\
[b'ada', b'grace'] [b'alan']
reads that found the index wrong: 0
[b'grace'] [b'ada']
""",
}


def test_every_example_is_run() -> None:
    assert {
        path.name for path in (ROOT / "examples").glob("*.py")
    } == OUTPUTS.keys() | on_spark.OUTPUTS.keys() | {
        test_badges.EXAMPLE.name,
        test_unread_counts.EXAMPLE.name,
    }


@pytest.mark.parametrize("name", OUTPUTS)
def test_example_prints_what_it_should_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, ROOT / "examples" / name],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS_MAX,
        check=False,
    )
    assert (finished.stdout, finished.stderr, finished.returncode) == (OUTPUTS[name], "", 0)
    assert not list(tmp_path.iterdir())
