"""Spark's workers take the pyspark that is installed, and find all else where they were told to look."""

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from floodmark.spark.runtime import programs
from floodmark.spark.runtime.programs import make_python

LIBRARIES = Path(pyspark.__file__).parent / "python" / "lib"
LOOK = """
import os, sys
from importlib.util import find_spec
origins = [find_spec(name).origin for name in ("pyspark", "py4j")]
print(*origins, os.environ["PYTHONPATH"], *sys.argv[1:], sep="\\n")
"""


def look(program: str, *arguments: str, places: list[str]) -> list[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    answer = subprocess.run(
        [program, "-c", LOOK, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return answer.stdout.splitlines()


def test_workers_leave_the_archives_of_spark_alone_and_nothing_else(tmp_path: Path) -> None:
    program = make_python(sys.executable, {"XDG_CACHE_HOME": str(tmp_path)})
    archives = sorted(map(str, LIBRARIES.glob("*.zip")))
    assert len(archives) == 2
    others = [str(tmp_path / "with a space *"), str(tmp_path / "pyspark.zip")]
    found = look(program, "an argument", "*", places=[archives[0], others[0], archives[1], others[1]])
    spark, py4j, places, *arguments = found
    assert spark == pyspark.__file__
    assert not py4j.startswith(str(LIBRARIES))
    assert places.split(os.pathsep) == others
    assert arguments == ["an argument", "*"]


def test_workers_need_no_other_place(tmp_path: Path) -> None:
    program = make_python(sys.executable, {"XDG_CACHE_HOME": str(tmp_path)})
    spark, _, places = look(program, places=[str(next(LIBRARIES.glob("pyspark.zip")))])
    assert (spark, places) == (pyspark.__file__, "")


def test_python_that_could_not_do_without_the_archives_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "find_spec", lambda _: None)
    assert make_python(sys.executable, {"XDG_CACHE_HOME": str(tmp_path)}) == sys.executable
    assert not list(tmp_path.iterdir())
