"""The tidy test: habits that no linter of ours checks.

Each check is a pure function of a path and a source text that yields findings. Each is run over
the tree, and over a canary: a planted fault that it must find, beside its harmless twin.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import NamedTuple

import pytest

import floodmark

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "floodmark"

FUNCTION_LINES_MAX = 70
CLASS_METHODS_MAX = 25

ROOMS_WITH_TIME_AND_CHANCE = {"clock", "testing"}

DOORWAYS = {
    "psycopg": ("engine/postgres.py",),
    "psycopg_pool": ("engine/postgres.py",),
    "rocksdict": ("engine/rocks.py",),
    "pyspark": ("spark/",),
    "pyarrow.flight": ("wire/", "server/"),
}

TIME_AND_CHANCE = re.compile(
    r"""time\.(time|monotonic|perf_counter|process_time|thread_time|clock_gettime)(_ns)?
    | datetime\.datetime\.(now|utcnow|today)
    | datetime\.date\.today
    | random(\..+)?
    """,
    re.VERBOSE,
)

NOTE_TO_SELF = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")

MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|home|Users|opt)/")
REGISTRY = re.compile(
    r"pypi\.(org|python\.org)|pythonhosted\.org|-index[-]url\b|\bfind[-]links\b",
    re.IGNORECASE,
)


class Finding(NamedTuple):
    """What is wrong, and where."""

    path: PurePosixPath
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


Check = Callable[[PurePosixPath, str], Iterable[Finding]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


parse = cache(ast.parse)


def functions_of(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def imported_names(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (the name bound here, the full name of what it stands for)."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.asname:
                yield alias.asname, alias.name
            else:
                root = alias.name.partition(".")[0]
                yield root, root
                yield alias.name, alias.name
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"
    elif isinstance(node, ast.Call) and node.args:
        function, argument = node.func, node.args[0]
        name = function.attr if isinstance(function, ast.Attribute) else None
        name = function.id if isinstance(function, ast.Name) else name
        if name in {"import_module", "__import__"} and isinstance(argument, ast.Constant):
            yield str(argument.value), str(argument.value)


def dotted_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted_name(node.value)):
        return f"{owner}.{node.attr}"
    return None


def check_function_length(path: PurePosixPath, source: str) -> Iterator[Finding]:
    for node in functions_of(parse(source)):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            message = f"{node.name}() has {lines} lines, at most {FUNCTION_LINES_MAX}: divide it"
            yield Finding(path, node.lineno, message)


def check_class_size(path: PurePosixPath, source: str) -> Iterator[Finding]:
    for node in ast.walk(parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        names = {each.name for each in node.body if isinstance(each, Function)}
        methods = sum(not (name.startswith("__") and name.endswith("__")) for name in names)
        if methods > CLASS_METHODS_MAX:
            message = f"{node.name} has {methods} methods, at most {CLASS_METHODS_MAX}: divide it"
            yield Finding(path, node.lineno, message)


def check_imports_at_the_top(path: PurePosixPath, source: str) -> Iterator[Finding]:
    for function in functions_of(parse(source)):
        for node in ast.walk(function):
            if any(imported_names(node)) or isinstance(node, ast.ImportFrom):
                message = f"import inside {function.name}(): move it to the top"
                yield Finding(path, getattr(node, "lineno", function.lineno), message)


def check_docstring(path: PurePosixPath, source: str) -> Iterator[Finding]:
    if not ast.get_docstring(parse(source)):
        yield Finding(path, 1, "no docstring: open the module with its idea and its reason")


def check_notes_to_self(path: PurePosixPath, source: str) -> Iterator[Finding]:
    for number, line in enumerate(source.splitlines(), start=1):
        if match := NOTE_TO_SELF.search(line):
            yield Finding(path, number, f"{match[0]}: do it, or open an issue")


def check_doorways(path: PurePosixPath, source: str) -> Iterator[Finding]:
    for node in ast.walk(parse(source)):
        for _, name in imported_names(node):
            for library, doorways in DOORWAYS.items():
                through_doorway = str(path).startswith(doorways)
                if f"{name}.".startswith(f"{library}.") and not through_doorway:
                    message = f"imports {name}: only {' and '.join(doorways)} may"
                    yield Finding(path, getattr(node, "lineno", 1), message)


def check_time_and_chance(path: PurePosixPath, source: str) -> Iterator[Finding]:
    if path.parts[0].removesuffix(".py") in ROOMS_WITH_TIME_AND_CHANCE:
        return
    tree = parse(source)
    bound = {name: full for node in ast.walk(tree) for name, full in imported_names(node)}
    for node in ast.walk(tree):
        names = [full for _, full in imported_names(node)]
        if dotted := dotted_name(node):
            first, _, rest = dotted.partition(".")
            names.append(f"{bound[first]}.{rest}" if first in bound and rest else "")
        for name in filter(TIME_AND_CHANCE.fullmatch, dict.fromkeys(names)):
            message = f"{name}: take a time source or a seeded generator as an argument"
            yield Finding(path, getattr(node, "lineno", 1), message)


def check_doormat(path: PurePosixPath, source: str) -> Iterator[Finding]:
    if path.name != "__init__.py":
        return
    for node in parse(source).body:
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
                pass
            case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.AnnAssign(target=ast.Name(id="__all__")):
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.FunctionDef(name="__getattr__" | "__dir__"):
                # The package itself hands a few names on lazily, because they load large libraries.
                if path != PurePosixPath("__init__.py"):
                    yield Finding(path, node.lineno, "only the package's own __init__.py is lazy")
            case ast.Assign(targets=[ast.Name(id="_LAZY" | "__version__")]):
                pass
            case _:
                message = "__init__.py only hands names on: imports, docstring and __all__"
                yield Finding(path, node.lineno, message)


def check_portable(path: PurePosixPath, source: str) -> Iterator[Finding]:
    for number, line in enumerate(source.splitlines(), start=1):
        if match := MACHINE_PATH.search(line):
            yield Finding(path, number, f"{match[0]} is a path of one machine")
        if match := REGISTRY.search(line):
            yield Finding(path, number, f"{match[0]} names a package registry")


def check_public_names(module: ModuleType) -> Iterator[str]:
    names = getattr(module, "__all__", None)
    if names is None:
        yield f"{module.__name__} has no __all__"
        return
    if list(names) != sorted(set(names)):
        yield f"{module.__name__}.__all__ is not sorted: {sorted(set(names))}"
    for name in names:
        if not hasattr(module, name):
            yield f"{module.__name__}.__all__ names {name}, which does not exist"


HEAVY = {"pandas", "pyarrow.flight", "pyspark", "rocksdict", "starlette", "uvicorn"}


def heavy_modules_after(statement: str, search_path: Path) -> list[str]:
    """Run a statement in a fresh interpreter and name the heavy libraries that it loaded."""
    script = (
        f"import sys; sys.path.insert(0, {str(search_path)!r}); {statement}; "
        f"print(*sorted({HEAVY!r} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


CHECKS: dict[Check, tuple[str, str, str]] = {
    check_function_length: (
        "model/x.py",
        "class A:\n  async def f(self):\n" + "    x = 1\n" * 70,
        "class A:\n  async def f(self):\n" + "    x = 1\n" * 69,
    ),
    check_class_size: (
        "model/x.py",
        "class A:\n" + "".join(f"  def f{number}(self): ...\n" for number in range(26)),
        "class A:\n  def __len__(self): ...\n"
        + "".join(f"  def f{number}(self): ...\n" for number in range(25)),
    ),
    check_imports_at_the_top: (
        "model/x.py",
        "def f():\n  if True:\n    from . import errors\n",
        "if True:\n  import os\ndef f():\n  os.getcwd()\n",
    ),
    check_docstring: ("model/x.py", "# An idea.\nx = 1\n", '"""An idea."""\nx = 1\n'),
    check_notes_to_self: ("model/x.py", "x = 1  # TODO: two\n", "HACKNEY = 'todo'\n"),
    check_doorways: (
        "engine/base.py",
        "from pyarrow import flight\n",
        "import pyarrow.flights\nfrom pyarrow import compute\n",
    ),
    check_time_and_chance: (
        "partition/x.py",
        "from datetime import datetime as d\nd.now()\n",
        "from datetime import datetime as d\nd.fromtimestamp(0)\nrandom = 1\n",
    ),
    check_doormat: (
        "model/__init__.py",
        '"""Idea."""\nVERSION = "1"\n',
        '"""Idea."""\nfrom floodmark.model import x\n__all__ = ["x"]\n',
    ),
}

MORE_FAULTS: list[tuple[Check, str, str]] = [
    (check_imports_at_the_top, "model/x.py", "async def f():\n  import os\n"),
    (check_imports_at_the_top, "model/x.py", "def f():\n  importlib.import_module('os')\n"),
    (check_notes_to_self, "model/x.py", '"""FIXME"""\n'),
    (check_doorways, "engine/memory.py", "import rocksdict\n"),
    (check_doorways, "engine/memory.py", "from rocksdict import Rdict\n"),
    (check_doorways, "site/x.py", "if True:\n  import pyspark.sql as s\n"),
    (check_doorways, "site/x.py", "import importlib\nimportlib.import_module('pyspark')\n"),
    (check_doorways, "site/x.py", "import pyarrow.flight\n"),
    (check_doorways, "site/x.py", "from pyarrow.flight import connect\n"),
    (check_time_and_chance, "site/x.py", "import time\ntime.time()\n"),
    (check_time_and_chance, "site/x.py", "import time as t\nread = t.monotonic_ns\n"),
    (check_time_and_chance, "site/x.py", "from time import perf_counter\n"),
    (check_time_and_chance, "site/x.py", "import datetime\ndatetime.datetime.utcnow()\n"),
    (check_time_and_chance, "site/x.py", "import random\n"),
    (check_time_and_chance, "site/x.py", "from random import Random\n"),
    (check_doormat, "model/__init__.py", "def f():\n  pass\n"),
    (check_doormat, "model/__init__.py", "def __getattr__(name):\n  pass\n"),
]


def over_the_package(check: Check) -> Iterator[Finding]:
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = PurePosixPath(path.relative_to(PACKAGE).as_posix())
        yield from check(relative, path.read_text("utf-8"))


def over_the_tree(check: Check) -> Iterator[Finding]:
    # In a linked worktree .git is a file, which names the repository's place on this machine.
    paths = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    for directory in ("src", "tests", "docs", "benchmarks", "examples", ".ci"):
        paths += [path for path in (ROOT / directory).rglob("*") if path.is_file()]
    for path in sorted(paths):
        if "__pycache__" in path.parts or any(part.endswith(".egg-info") for part in path.parts):
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        yield from check(PurePosixPath(path.relative_to(ROOT).as_posix()), text)


def assert_none(findings: Iterable[object]) -> None:
    lines = [str(finding) for finding in findings]
    assert not lines, "\n" + "\n".join(lines)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package_is_tidy(check: Check) -> None:
    assert any(PACKAGE.rglob("*.py")), "the package was not found"
    assert_none(over_the_package(check))


def repeated_class_names(sources: Iterable[tuple[PurePosixPath, str]]) -> Iterator[Finding]:
    """Each class whose name another class of the tree has had before it."""
    first: dict[str, PurePosixPath] = {}
    for path, source in sources:
        for node in ast.walk(parse(source)):
            if isinstance(node, ast.ClassDef) and first.setdefault(node.name, path) != path:
                yield Finding(
                    path, node.lineno, f"{first[node.name]} has a class {node.name} too: rename one"
                )


def test_no_two_modules_have_a_class_of_the_same_name() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert_none(
        repeated_class_names(
            (PurePosixPath(path.relative_to(PACKAGE).as_posix()), path.read_text("utf-8")) for path in paths
        )
    )


def test_class_name_of_another_module_is_found() -> None:
    names = ("model/x.py", "class A: ..."), ("site/y.py", "class B: ...\nif B:\n  class A: ...")
    (finding,) = repeated_class_names((PurePosixPath(path), source) for path, source in names)
    assert str(finding) == "site/y.py:3: model/x.py has a class A too: rename one"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check_finds_its_canary_and_spares_the_twin(check: Check) -> None:
    path, fault, twin = CHECKS[check]
    assert list(check(PurePosixPath(path), fault))
    assert_none(check(PurePosixPath(path), twin))


@pytest.mark.parametrize(("check", "path", "fault"), MORE_FAULTS)
def test_check_finds_other_forms_of_the_fault(check: Check, path: str, fault: str) -> None:
    assert list(check(PurePosixPath(path), fault))


@pytest.mark.parametrize(
    ("check", "path", "source"),
    [
        (check_doorways, "engine/rocks.py", "import rocksdict\n"),
        (check_doorways, "spark/source/source.py", "import pyspark.sql\n"),
        (check_doorways, "wire/client.py", "from pyarrow import flight\n"),
        (check_doorways, "server/service.py", "import pyarrow.flight\n"),
        (check_time_and_chance, "clock/sources.py", "import time\ntime.time_ns()\n"),
        (check_time_and_chance, "testing/x.py", "import random\n"),
    ],
)
def test_rooms_that_may_are_spared(check: Check, path: str, source: str) -> None:
    assert_none(check(PurePosixPath(path), source))


def test_finding_names_file_and_line() -> None:
    finding = next(iter(check_doorways(PurePosixPath("site/x.py"), "x = 1\nimport pyspark\n")))
    assert str(finding).startswith("site/x.py:2: ")


def test_files_name_no_machine_and_no_registry() -> None:
    assert_none(over_the_tree(check_portable))


@pytest.mark.parametrize(
    "fault",
    [
        "see /" + "work/main",
        "'/" + "root/.cache'",
        "file:///" + "home/ada/x",
        "https://py" + "pi.org/project",
        "files.python" + "hosted.org",
        "pip install --extra-index" + "-url x",
    ],
)
def test_portable_check_finds_its_canaries(fault: str) -> None:
    assert list(check_portable(PurePosixPath("README.md"), f"fine\n{fault}\n"))


def test_portable_check_spares_relative_paths() -> None:
    text = "docs/work/plan.md, ./root/x, https://example.org/home/, homework/"
    assert_none(check_portable(PurePosixPath("README.md"), text))


def test_public_names_are_sorted_and_exist() -> None:
    assert_none(check_public_names(floodmark))


def test_public_names_check_finds_its_canaries() -> None:
    module = ModuleType("canary")
    assert any("no __all__" in problem for problem in check_public_names(module))
    module.__dict__.update(a=1, b=2, __all__=["b", "a"])
    assert any("not sorted" in problem for problem in check_public_names(module))
    module.__dict__.update(__all__=["a", "c"])
    assert any("c, which does not exist" in problem for problem in check_public_names(module))


def test_importing_floodmark_loads_neither_spark_nor_flight_nor_rocksdb() -> None:
    assert heavy_modules_after("import floodmark", ROOT / "src") == []


def test_connecting_to_a_server_does_without_rocksdb() -> None:
    assert heavy_modules_after("from floodmark import connect", ROOT / "src") == ["pyarrow.flight"]


def test_the_spark_source_does_without_rocksdb() -> None:
    loaded = heavy_modules_after("import floodmark.spark.source.source", ROOT / "src")
    assert "rocksdict" not in loaded


def test_a_server_without_pages_does_without_pandas_and_uvicorn() -> None:
    loaded = heavy_modules_after("import floodmark.server", ROOT / "src")
    assert not {"pandas", "starlette", "uvicorn"} & {*loaded}


def test_heavy_import_check_finds_its_canary(tmp_path: Path) -> None:
    (tmp_path / "rocksdict.py").touch()
    (tmp_path / "innocent.py").write_text("import rocksdict\n", "utf-8")
    assert heavy_modules_after("import innocent", tmp_path) == ["rocksdict"]
