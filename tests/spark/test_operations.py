"""The pages about sites that copy each other: every command runs, in order, and prints what the page says.

In the pages each site has a machine of its own; here each has a server process of its own, under the name
that the page gives its machine.  A block of TOML is the file topology.toml.  Of three sites, the third
has joined the others late.

In some pages each command that changes something is first killed in its middle (`KILLS`), and all servers
with it.  They are started again, and the repeated command must print what the page says.
"""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import pytest
from tests.cli.support import PROCESS_SECONDS_MAX, ROOT, run
from tests.cli.test_tutorial import find_blocks, find_commands, is_as_shown
from tests.links.support import SiteProcess
from tests.spark.support_garbage import collect_old

import floodmark
from floodmark.host.ports import NamespaceUpdate
from floodmark.links.exchange import HeldSnapshot
from floodmark.links.returning import BackupFacts, Portion, join_namespace
from floodmark.links.steps import plan_step, run_step
from floodmark.model.errors import VersionCollected
from floodmark.model.partition import LoadStream
from floodmark.replication.topology import MemberSite, SharedNamespace, Topology, parse_topology
from floodmark.replication.topology_file import render_topology
from floodmark.site import Site

PAGES = ROOT / "docs" / "operations"
IDS = {"oslo": 1, "rome": 2, "bonn": 3, "lund": 4}

# Where a command is killed: before or after its first call of a function.
KILLS = {
    "topology set": ("after", "floodmark.site.site", "Site.set_topology"),
    "topology remove": ("before", "floodmark.links.removing", "_end_links"),
    "backup": ("after", "floodmark.spark.jobs.backups.backup", "_carry_out"),
    "restore": ("after", "floodmark.spark.jobs.backups.restore", "Restoration.write"),
    "replicate": ("after", "floodmark.links.process", "run_step"),
}

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("spark")]


class Machines:
    """The machines of a page: a directory for each, and its place in the network.

    Before a page begins, the sites are open in this process; then each is served by a process of its own.
    """

    def __init__(self, directory: Path) -> None:
        self.sites: dict[str, Site] = {}
        self._directory = directory
        self._addresses = dict(zip(IDS, free_addresses(len(IDS)), strict=True))
        self._processes: dict[str, SiteProcess] = {}
        self._epoch = 0

    def open(self, name: str) -> Site:
        """Open the directory of a machine in this process."""
        site = self.sites[name] = floodmark.open(
            self._directory / "data" / name, site=name, site_id=IDS[name]
        )
        return site

    def begin(self) -> None:
        """Serve all sites by processes."""
        names = list(self.sites)
        self.close()
        for name in names:
            self.serve(name)

    def serve(self, name: str) -> None:
        """Serve the directory of a machine by a process."""
        directory = self._directory / "data" / name
        self._processes[name] = SiteProcess(directory, IDS[name], self._addresses[name])

    def crash(self) -> None:
        """Kill all servers, and start them again."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.start()

    def connect(self, *names: str) -> None:
        """Use the servers of some machines from this process."""
        for name in names:
            self.sites[name] = floodmark.connect(self.place(f"grpc://{name}:7100"))

    def close(self) -> None:
        """Close the sites that are open in this process."""
        for site in self.sites.values():
            site.close()
        self.sites.clear()

    def end(self) -> None:
        """Stop everything."""
        self.close()
        for process in self._processes.values():
            process.kill()

    def lose(self, name: str) -> None:
        """Take a machine and its disk away."""
        self.sites.pop(name).close()
        shutil.rmtree(self._directory / "data" / name)

    def place(self, text: str) -> str:
        """A text of the page with the URLs that hold here."""
        for name, address in self._addresses.items():
            text = text.replace(f"grpc://{name}:7100", f"grpc://{address}")
        return text

    def share(self, *names: str) -> None:
        """Let sites share `users`; those that are not there are made."""
        self._epoch += 1
        topology = Topology(
            epoch=self._epoch,
            sites={name: MemberSite(id=IDS[name], url=f"grpc://{name}:7100") for name in names},
            namespaces={"users": SharedNamespace()},
        )
        text = self.place(render_topology(topology))
        Path("topology.toml").write_text(text, "utf-8")
        for name in names:
            site = self.sites.get(name) or self.open(name)
            site.set_topology(parse_topology(text))

    def join(self, name: str, other: str) -> None:
        """A site joins those that are there, with the state of one of them."""
        self.share(*self.sites, name)
        here, there = self.sites[name].host, self.sites[other].host
        snapshot = HeldSnapshot(there, "users", f"join-{name}")
        snapshot.hold()
        watermark = there.replication.watermark("users", snapshot.version)

        def write(portion: Portion) -> None:
            snapshot.copy(here, LoadStream(True), portion.take)

        facts = BackupFacts({**watermark, IDS[other]: snapshot.version}, 0, {})
        join_namespace(here, "users", facts, write)
        snapshot.release()

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
    machines.begin()


def shared_by_three(machines: Machines) -> None:
    """Bonn joins Oslo and Rome late."""
    machines.share("oslo", "rome")
    machines.put("rome", "before Bonn")
    machines.link("rome", "oslo")
    machines.join("bonn", "rome")


def away_for_too_long(machines: Machines) -> None:
    """Bonn comes back when Oslo has collected what it lacks."""
    shared_by_three(machines)
    machines.put("oslo", "enchantress")
    machines.link("oslo", "bonn")
    machines.put("oslo", "countess")
    machines.link("oslo", "rome")
    machines.sites["oslo"].release_safe_point("link-bonn")
    machines.forget("oslo")
    machines.put("bonn", "mathematician")
    machines.link("bonn", "oslo")
    machines.link("bonn", "rome")
    machines.begin()
    machines.connect("oslo", "bonn")
    machines.link("oslo", "bonn")
    machines.close()


def lost_with_a_backup(machines: Machines) -> None:
    """Oslo is backed up before Bonn joins, writes on, tells Rome of it, and is lost."""
    machines.share("oslo", "rome")
    machines.put("oslo", "in the backup")
    machines.link("oslo", "rome")
    machines.sites.pop("oslo").close()
    assert run("backup", "data/oslo", "users", "backups/users").code == 0
    machines.open("oslo")
    machines.join("bonn", "rome")
    machines.put("bonn", "from Bonn")
    machines.link("bonn", "rome")
    machines.put("oslo", "told to Rome alone")
    machines.link("oslo", "rome")
    machines.put("oslo", "told to nobody")
    machines.lose("oslo")
    machines.begin()


def lost_for_good(machines: Machines) -> None:
    """Bonn has told Rome of something, and is lost."""
    shared_by_three(machines)
    machines.put("bonn", "told to Rome alone")
    machines.link("bonn", "rome")
    machines.lose("bonn")
    machines.begin()


BEFORE: dict[str, Callable[[Machines], None]] = {
    "replication.md": nothing,
    "join.md": shared_for_a_while,
    "away.md": away_for_too_long,
    "restored.md": lost_with_a_backup,
    "remove.md": lost_for_good,
}
# Together they kill each command; a killed job starts a Spark of its own.
KILLED = {"join.md", "remove.md"}


@pytest.mark.parametrize(
    ("page", "killed"),
    [
        *((page, page in KILLED) for page in BEFORE),
        *(pytest.param(page, page not in KILLED, marks=pytest.mark.soak) for page in [*BEFORE][1:]),
    ],
)
def test_every_command_of_a_page_does_what_it_says(page: str, killed: bool, machines: Machines) -> None:
    BEFORE[page](machines)
    blocks = find_blocks((PAGES / page).read_text("utf-8"))
    assert {block.language for block in blocks} <= {"console", "toml"}
    for block in blocks:
        if block.language == "toml":
            Path("topology.toml").write_text(machines.place(block.text), "utf-8")
            continue
        for command, shown in find_commands(block.text):
            words = shlex.split(machines.place(command))
            if killed:
                run_killed(words[1:], machines)
            printed = run_command(words, machines)
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


def run_killed(arguments: list[str], machines: Machines) -> None:
    """Kill a command in its middle, and all servers, which are started again."""
    place = next((KILLS[name] for name in KILLS if arguments[: len(name.split())] == name.split()), None)
    if place is None:
        return
    command = [sys.executable, "-m", "tests.spark.killed_command", *place, *arguments]
    finished = subprocess.run(
        command,
        capture_output=True,
        cwd=Path.cwd(),
        env=ENVIRONMENT,
        timeout=PROCESS_SECONDS_MAX,
        check=False,
    )
    assert finished.returncode == -signal.SIGKILL, finished.stderr.decode()
    machines.crash()
