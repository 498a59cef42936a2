"""The examples on Spark: each runs as it stands, on the shared session, and prints what it should."""

import runpy
from pathlib import Path

import pytest
from tests.cli.support import ROOT

pytestmark = pytest.mark.slow

OUTPUTS = {
    "features_with_delta.py": """\
b'{"clicks":3,"premium":true}'
changes exported: [4, 1, 0]
upsert b'ada' b'{"clicks":3,"premium":true}'
upsert b'alan' b'{"clicks":1,"premium":false}'
upsert b'grace' b'{"clicks":2,"premium":true}'
upsert b'ada' b'{"clicks":4,"premium":true}'
delete b'alan' None
""",
    "streaming_counts.py": """\
{'09:00 ada': 2, '09:00 alan': 1, '09:01 ada': 1}
{'09:00 ada': 2, '09:00 alan': 1, '09:01 ada': 2, '09:02 grace': 1}
""",
}


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("name", OUTPUTS)
def test_example_on_spark_prints_what_it_should_and_leaves_nothing(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert capsys.readouterr().out == OUTPUTS[name]
    assert not list(tmp_path.iterdir())
