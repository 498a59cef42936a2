"""Functions as commands, and the arguments and options that many of them share.

A parameter is declared as `Annotated[type, "METAVAR", "help"]`: without a default an argument, with one the
option `--its-name`.  The metavar selects the parser of the text (`READERS`), and can be left out; a dict at
the end is passed to Typer.  `OpenSite`, `Output` and dataclasses, whose fields are options, are built from
other arguments.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import timedelta
from functools import partial
from inspect import Parameter, Signature, getdoc, signature
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand

from floodmark.cli.opening import open_site
from floodmark.cli.render.output import Output
from floodmark.cli.render.text import show_duration
from floodmark.model import Resolved, Version
from floodmark.model.text import read_at, read_bytes, read_duration

if TYPE_CHECKING:
    from floodmark import Site
    from floodmark.site.arguments import Since

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., None])


# Reading


def parse(read: Callable[[str], Result]) -> Callable[[Any], Result]:
    """A parser for Typer: a ValueError of `read` becomes an error of usage.  A default passes as it is."""

    def parser(text: Any) -> Result:
        try:
            return read(text) if isinstance(text, str) else text
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    # Typer shows the name where there is no metavar.
    parser.__name__ = read.__name__
    return parser


def read_since(text: str) -> "Since":
    """Parse where changes begin: a word, a version, a time, or a place within a snapshot.

    `snapshot` stands for every key as it is now, `beginning` for the first change of all, `now` for later
    changes only.

    >>> read_since("now"), read_since("411225436913926252"), read_since("411225436913926252@0x000001616461")
    ('now', 411225436913926252, Resolved(version=411225436913926252, snapshot=b'\\x00\\x00\\x01ada'))
    """
    match text:
        case "snapshot" | "beginning" | "now":
            return text
    version, mark, key = text.partition("@0x")
    try:
        return Resolved(read_at(version), bytes.fromhex(key)) if mark else read_at(text)
    except ValueError as error:
        raise ValueError(f"{error}, snapshot, beginning or now") from error


READERS: Final[dict[str, Callable[[str], object]]] = {
    "KEY": read_bytes,
    "DURATION": read_duration,
    "VERSION|TIME": read_at,
    "VERSION|TIME|snapshot|beginning|now": read_since,
}


# Shared arguments and options

BYTES_HELP: Final = "UTF-8 text, or hexadecimal after 0x (0x00ff)."
JSON_HELP: Final = (
    "Print JSON, one object a line. UTF-8 bytes are text in `key` and `value`; other bytes are as "
    "base64 in `key_base64` and `value_base64`. Versions are strings, times ISO 8601 in UTC."
)

ServedSite = Annotated[
    str, "SITE", "The site's directory (new or empty to make a site), or the URL of its database."
]
Directory = Annotated[str, "DIRECTORY", "The directory of the new site; new or empty."]
Location = Annotated[
    str, "SITE", "The site: its directory, or its server's URL, such as grpc://127.0.0.1:7100."
]
SiteId = Annotated[
    int | None,
    "NUMBER",
    "An id from 1 to 255, unique among sites; derived from the name by default.",
    {"min": 1, "max": 255},
]
OpenSite = Annotated["Site", "opened for the call, from the argument SITE"]
NamespaceName = Annotated[str, "NAMESPACE", "The namespace's name."]
Key = Annotated[bytes, "KEY", f"The key: {BYTES_HELP}"]
# Typer takes no union of types: the value is a `floodmark.site.arguments.Since`, or None.
SinceOption = Annotated[
    Any,
    "VERSION|TIME|snapshot|beginning|now",
    "Only changes after this, exclusive; snapshot: every key as it is, then later changes.",
]
AtOption = Annotated[
    Version | None, "VERSION|TIME", "Read as of a version, or of a time such as 2026-01-31T12:00:00Z."
]
Ttl = Annotated[timedelta | None, "DURATION", "Time to live: 90s, 24h, 7d."]
Retention = Annotated[
    timedelta | None, "DURATION", "The minimum time to keep old versions and changes: 24h, 7d."
]
Json = Annotated[bool, JSON_HELP]
InsecureMetrics = Annotated[
    bool, "Allow other machines to read --metrics: these pages have no access control."
]


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """The keys that a command is about."""

    start_key: Annotated[bytes | None, "KEY", "Only keys from this one on, inclusive."] = None
    end_key: Annotated[bytes | None, "KEY", "Only keys before this one, exclusive."] = None
    prefix: Annotated[bytes | None, "KEY", "Only keys that start with this."] = None

    def given(self) -> dict[str, Any]:
        """The options as arguments of functions that read a range."""
        return {**asdict(self), "start_key": self.start_key or b""}


def given(**options: Any) -> dict[str, Any]:
    """The options that have a value; the callee has defaults for the others."""
    return {name: value for name, value in options.items() if value is not None}


# Commands

# The sample values of arguments in derived examples.
_SAMPLES: Final = {"SITE": "data/oslo", "DIRECTORY": "data/oslo", "NAMESPACE": "users", "KEY": "ada"}


class PlainCommand(TyperCommand):
    """A command whose help names arguments by their metavars alone: `SITE`, where Typer writes `{SITE}`."""

    def __init__(self, *given: Any, **attributes: Any) -> None:
        super().__init__(*given, **attributes)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument):
                name = parameter.metavar if parameter.required else f"[{parameter.metavar}]"
                shown = {"display_type_rich": lambda **_: None, "_usage_display_name": partial(str, name)}
                vars(parameter).update(shown)


class Commands(typer.Typer):
    """A group of commands, such as `feed …`; `sample` is a NAME in its examples."""

    def __init__(self, path: str = "", *, sample: str = "", **more: Any) -> None:
        super().__init__(**more)
        self._path = path.split()
        self._samples = {**_SAMPLES, "NAME": sample}

    def command(self, name: str | None = None, **more: Any) -> Callable[[Function], Function]:
        """Add a function as a command.  Its docstring is the help, with an example if it has none."""

        def add(function: Function) -> Function:
            word, adapted, text = name or function.__name__, adapt(function), getdoc(function) or ""
            if "\n\nExample" not in text:
                given = [each.annotation for each in signature(adapted).parameters.values()]
                words = [each.__metadata__[0].metavar for each in given]
                samples = [self._samples[each] for each in words if each in self._samples]
                text += f"\n\nExample:\n  {' '.join(['floodmark', *self._path, word, *samples])}"
            # Examples keep their lines.
            text = text.replace("\n\nExample", "\n\n\b\nExample")
            super(Commands, self).command(word, cls=PlainCommand, help=text, **more)(adapted)
            return function

        return add


def adapt(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a function for Typer, with all its arguments and options as parameters."""
    own: dict[str, tuple[Any, Any]] = {}
    shared: dict[str, tuple[Any, Any]] = {}
    made: dict[str, Any] = {}
    for name, parameter in signature(function, eval_str=True).parameters.items():
        kind = parameter.annotation
        if kind in (OpenSite, Output) or is_dataclass(kind):
            made[name] = kind
        if kind == OpenSite:
            own["location"] = Location, Parameter.empty
        elif is_dataclass(kind):
            hints = get_type_hints(kind, include_extras=True)
            shared |= {field.name: (hints[field.name], field.default) for field in fields(kind)}
        elif kind is not Output:
            own[name] = kind, parameter.default
    if Output in made.values():
        shared["json"] = Json, False

    def call(**given: Any) -> None:
        with ExitStack() as stack:
            for name, kind in made.items():
                if kind is Output:
                    given[name] = Output(json=given.pop("json"))
                elif kind == OpenSite:
                    given[name] = stack.enter_context(open_site(given.pop("location")))
                else:
                    given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            function(**given)

    parameters = [_declare(name, *each) for name, each in (own | shared).items()]
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return call


def _declare(name: str, annotation: Any, default: Any) -> Parameter:
    """A parameter in Typer's terms; an annotation that is already Typer's stays as it is."""
    kind, *words = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    if words and isinstance(words[0], str):
        attributes = words.pop() if isinstance(words[-1], dict) else {}
        *metavar, help_text = words
        attributes = {"help": help_text, **attributes}
        if metavar:
            attributes["metavar"] = metavar[0]
        if metavar and metavar[0] in READERS:
            attributes["parser"] = parse(READERS[metavar[0]])
        if isinstance(default, timedelta):
            attributes["show_default"] = show_duration(default)
        if default is Parameter.empty:
            annotation = Annotated[kind, typer.Argument(**attributes)]
        else:
            option = attributes.pop("name", f"--{name.replace('_', '-')}")
            annotation = Annotated[kind, typer.Option(option, **attributes)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
