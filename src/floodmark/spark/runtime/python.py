"""The Python that Spark's workers on this machine run in: ours, which has pyspark installed.

Spark puts an archive with a copy of pyspark first on the workers' PYTHONPATH.  Modules in an archive are
compiled anew in each process, which takes most of a second, and a query has many workers.  So Spark is given
a `python` that is a short script: it drops this archive, and py4j's beside it, from PYTHONPATH.
"""

import os
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pyspark

from floodmark.spark.runtime.wrappers import make_home

_WRAPPER: Final = """\
#!/bin/sh
# Python with the pyspark that is installed, instead of the same one in an archive.
set -f
IFS=:
kept=
for place in $PYTHONPATH; do
    case $place in
        {archives}/*.zip) ;;
        *) kept=${{kept:+$kept:}}$place ;;
    esac
done
PYTHONPATH=$kept
export PYTHONPATH
exec {python} "$@"
"""


def make_python(executable: str, environment: Mapping[str, str] = os.environ) -> str:
    """The command for Spark's workers: a script before `executable`, or that if it needs the archives."""
    archives = Path(pyspark.__file__).parent / "python" / "lib"
    if not archives.is_dir() or find_spec("py4j") is None:
        return executable
    script = _WRAPPER.format(archives=shlex.quote(str(archives)), python=shlex.quote(executable))
    return str(make_home("python", script, environment) / "bin" / "python")
