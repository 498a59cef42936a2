"""The pages about sites that copy each other: every command runs, in order, and prints what the page says.

In the pages each site has a machine of its own; here all are served by this process.  `floodmark serve`
serves a directory under the name that the page gives its machine, and a block of TOML is the file
topology.toml.
"""

import shlex
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import pytest
from tests.cli.support import ROOT, run
from tests.cli.test_tutorial import find_blocks, find_commands, is_as_shown
from tests.spark.support_garbage import collect_old

import floodmark
from floodmark.host.ports import NamespaceUpdate
from floodmark.links.steps import plan_step, run_step
from floodmark.model.errors import VersionCollected
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology
from floodmark.replication.topology_file import render_topology
from floodmark.server import serve
from floodmark.site import Site

PAGES = ROOT / "docs" / "operations"
IDS = {"oslo": 1, "rome": 2, "bonn": 3, "lund": 4}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("spark")]


class Machines:
    """The machines of a page: a directory for each, and its place in the network, where it may be served."""

    def __init__(self, directory: Path) -> None:
        self.sites: dict[str, Site] = {}
        self._directory = directory
        self._addresses = dict(zip(IDS, free_addresses(len(IDS)), strict=True))
        self._up: dict[str, ExitStack] = {}

    def serve(self, name: str) -> None:
        """Serve the directory of a machine."""
        stack = self._up[name] = ExitStack()
        self.sites[name] = site = floodmark.open(self._directory / "data" / name)
        stack.enter_context(serve(site, self._addresses[name]))

    def end(self, *names: str) -> None:
        """Stop the servers of some machines, or of all."""
        for name in names or list(self._up):
            self._up.pop(name).close()

    def lose(self, name: str) -> None:
        """Take a machine and its disk away."""
        self.end(name)
        shutil.rmtree(self._directory / "data" / name)

    def place(self, text: str) -> str:
        """A text of the page with the URLs that hold here."""
        for name, address in self._addresses.items():
            text = text.replace(f"grpc://{name}:7100", f"grpc://{address}")
        return text

    def share(self, *names: str) -> None:
        """Make sites, with a topology in which they share `users`."""
        topology = Topology(
            epoch=1,
            sites={name: MemberSite(id=IDS[name], url=f"grpc://{name}:7100") for name in names},
            namespaces={"users": SharedNamespace()},
        )
        Path("topology.toml").write_text(self.place(render_topology(topology)), "utf-8")
        for name in names:
            run("init", self._directory / "data" / name, "--site", name, "--site-id", str(IDS[name]))
            self.serve(name)
            assert run("topology", "set", self.place(f"grpc://{name}:7100"), "topology.toml").code == 0

    def put(self, name: str, value: str) -> None:
        """Write Ada at a site."""
        self.sites[name].namespace("users").put(b"ada", value.encode())
        self.sites[name].heartbeat()

    def link(self, source: str, target: str) -> None:
        """Copy what is there in one direction, and keep what comes after, or say that it is not possible."""
        here, there = self.sites[source].host, self.sites[target].host
        goal = self.sites[source].resolved_version()
        try:
            while (step := plan_step(here, there, ("users",))).namespaces[0].since < goal:
                run_step(here, there, step)
        except VersionCollected as error:
            there.replication.stall_link(IDS[source], ["users"], str(error))
        else:
            position = step.namespaces[0].since
            here.retention.hold_safe_point(f"link-{target}", position, timedelta(days=1), "users")

    def forget(self, name: str) -> None:
        """Let a site collect what nobody holds."""
        site = self.sites[name]
        for retention in (timedelta(milliseconds=1), timedelta(days=1)):
            site.host.namespaces.update_namespace("users", NamespaceUpdate(retention=retention))
            collect_old(site)


def free_addresses(count: int) -> list[str]:
    """Addresses at which nobody listens."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return ["{}:{}".format(*each.getsockname()) for each in sockets]


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.chdir(tmp_path)
    machines = Machines(tmp_path)
    yield machines
    machines.end()


# What has happened before each page begins.


def nothing(_machines: Machines) -> None:
    pass


def shared_for_a_while(machines: Machines) -> None:
    """Oslo and Rome have forgotten where they began."""
    machines.share("oslo", "rome")
    machines.put("oslo", "enchantress")
    machines.put("oslo", "countess")
    machines.link("oslo", "rome")
    machines.link("rome", "oslo")
    machines.forget("oslo")
    machines.forget("rome")


def away_for_too_long(machines: Machines) -> None:
    """Bonn comes back when Oslo has collected what it lacks."""
    machines.share("oslo", "rome", "bonn")
    machines.put("oslo", "enchantress")
    machines.link("oslo", "bonn")
    machines.put("oslo", "countess")
    machines.link("oslo", "rome")
    machines.sites["oslo"].release_safe_point("link-bonn")
    machines.forget("oslo")
    machines.put("bonn", "mathematician")
    machines.link("bonn", "oslo")
    machines.link("bonn", "rome")
    machines.link("oslo", "bonn")


def lost_with_a_backup(machines: Machines) -> None:
    """Oslo writes on after its backup, tells Rome of it, and is lost."""
    machines.share("oslo", "rome", "bonn")
    machines.put("oslo", "in the backup")
    assert run("backup", machines.place("grpc://oslo:7100"), "users", "backups/users").code == 0
    machines.put("oslo", "told to Rome alone")
    machines.link("oslo", "rome")
    machines.put("oslo", "told to nobody")
    machines.lose("oslo")


def lost_for_good(machines: Machines) -> None:
    """Bonn has told Rome of something, and is lost."""
    machines.share("oslo", "rome", "bonn")
    machines.put("bonn", "told to Rome alone")
    machines.link("bonn", "rome")
    machines.lose("bonn")


@pytest.mark.parametrize(
    ("page", "before"),
    [
        ("replication.md", nothing),
        ("join.md", shared_for_a_while),
        pytest.param("away.md", away_for_too_long, marks=pytest.mark.soak),
        pytest.param("restored.md", lost_with_a_backup, marks=pytest.mark.soak),
        pytest.param("remove.md", lost_for_good, marks=pytest.mark.soak),
    ],
)
def test_every_command_of_a_page_does_what_it_says(
    page: str, before: Callable[[Machines], None], machines: Machines
) -> None:
    before(machines)
    blocks = find_blocks((PAGES / page).read_text("utf-8"))
    assert {block.language for block in blocks} <= {"console", "toml"}
    for block in blocks:
        if block.language == "toml":
            Path("topology.toml").write_text(machines.place(block.text), "utf-8")
            continue
        for command, shown in find_commands(block.text):
            printed = run_command(shlex.split(machines.place(command)), machines)
            assert is_as_shown(shown, printed), f"{page}, line {block.line}: $ {command}\n{printed}"


def run_command(words: list[str], machines: Machines) -> str:
    program, *arguments = words
    assert program == "floodmark"
    if arguments[0] == "serve":
        machines.serve(Path(arguments[1]).name)
        return ""
    outcome = run(*arguments)
    assert outcome.code == 0, outcome.errors
    return outcome.text
