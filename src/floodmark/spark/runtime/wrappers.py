"""Scripts of a few lines that stand before a program which Spark starts.

Each lies in a home of its own, under `bin/` and the program's name: private to the user, made once, shared by
processes.
"""

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path


def make_home(program: str, script: str, environment: Mapping[str, str] = os.environ) -> Path:
    """A directory whose `bin` holds a script under the name of the program that it stands before."""
    try:
        digest = hashlib.sha256(script.encode()).hexdigest()[:16]
        home = _cache_directory(environment) / f"{program}-{digest}"
        _install(home / "bin" / program, script)
    except (OSError, RuntimeError):
        # A user without a home, or one that cannot be written to, as in a container.
        home = Path(tempfile.mkdtemp(prefix=f"floodmark-{program}-"))
        atexit.register(shutil.rmtree, home, ignore_errors=True)
        _install(home / "bin" / program, script)
    return home


def _cache_directory(environment: Mapping[str, str]) -> Path:
    named = environment.get("XDG_CACHE_HOME")
    return (Path(named) if named else Path.home() / ".cache") / "floodmark"


def _install(wrapper: Path, script: str) -> None:
    if wrapper.is_file() and wrapper.read_text("utf-8") == script and os.access(wrapper, os.X_OK):
        return
    wrapper.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Renamed into place: another process may be running the same script.
    handle, temporary = tempfile.mkstemp(dir=wrapper.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(script)
        os.chmod(temporary, 0o700)
        os.replace(temporary, wrapper)
    except BaseException:
        os.unlink(temporary)
        raise
