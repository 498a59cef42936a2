"""Short scripts that Spark starts in the place of a program.

Each has a home of its own, with the script under `bin/` and the program's name: private to the user, created
once, shared by processes.
"""

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path


def make_home(program: str, script: str, environment: Mapping[str, str] = os.environ) -> Path:
    """A directory whose `bin` holds a script under the name of a program."""
    try:
        digest = hashlib.sha256(script.encode()).hexdigest()[:16]
        home = _cache_directory(environment) / f"{program}-{digest}"
        _install(home / "bin" / program, script)
    except (OSError, RuntimeError):
        # A user without a writable home, as in a container.
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
    with tempfile.TemporaryDirectory(dir=wrapper.parent) as directory:
        staged = Path(directory, wrapper.name)
        staged.write_text(script, "utf-8")
        staged.chmod(0o700)
        staged.replace(wrapper)
