"""topology show, set and remove: which sites share which namespaces."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer

import floodmark
from floodmark.cli.arguments import Commands, OpenSite
from floodmark.cli.failures import FINDING, NoInput, Usage
from floodmark.cli.opening import connect
from floodmark.cli.render.output import Output, note
from floodmark.cli.render.progress import tracked
from floodmark.cli.render.text import show_version
from floodmark.files.local import write_durably
from floodmark.links.removing import remove_site
from floodmark.model.errors import InvalidConfiguration
from floodmark.replication.topology import Topology, parse_topology
from floodmark.replication.topology_file import render_topology

commands = Commands("topology")


@commands.command()
def show(site: OpenSite, output: Output) -> None:
    """Show the topology of a site, as TOML that `topology set` reads.

    Examples:
      floodmark topology show data/oslo
      floodmark topology show grpc://127.0.0.1:7100 --json
    """
    topology = site.topology()
    if topology is None:
        note("no topology: this site shares nothing with others")
        raise typer.Exit(FINDING)
    if output.json:
        output.object(msgspec.to_builtins(topology))
    else:
        output.raw(render_topology(topology).encode())


@commands.command("set")
def set_topology(
    site: OpenSite, output: Output, file: Annotated[Path, "FILE", "The topology, in TOML."]
) -> None:
    """Set the topology of a site.  Run it for each site, the peers of a new site first.

    Creates shared namespaces that the site lacks. A namespace with earlier data is refused: see
    `floodmark namespace rewrite`. Increment `epoch` with each change of the topology; setting the
    same topology again does nothing.

    Example:
      floodmark topology set data/oslo topology.toml
    """
    topology = read_topology(file)
    site.set_topology(topology)
    name, shared = site.name, topology.shared_by(site.name)
    output.result(
        {"site": name, "epoch": topology.epoch, "namespaces": shared},
        f"{name} follows topology {topology.epoch} and shares: {', '.join(shared) or 'nothing'}",
    )


@commands.command()
def remove(
    name: Annotated[str, "NAME", "The site to remove."],
    output: Output,
    file: Annotated[
        Path, typer.Option("--topology", metavar="FILE", help="The topology, in TOML; it is rewritten.")
    ],
) -> None:
    """Remove a site for good.  All other sites must be reachable; the removed site need not be.

    First closes the site's links; then the other sites exchange its changes, until all of them
    hold the same. A site that is being restored gets them when it is back. The entry of the
    removed site stays in the topology, and its id is never used again. Stop replication first,
    and start it afterwards with the new topology. Comments in the file are kept. The same command
    resumes a removal that was interrupted.

    Example:
      floodmark topology remove bonn --topology topology.toml
    """
    topology = read_topology(file)

    def publish(changed: Topology) -> None:
        # This keeps the comments of the file.
        write_durably(file, render_topology(changed, file.read_text("utf-8")).encode())

    with ExitStack() as stack:
        track = stack.enter_context(tracked("connecting to the other sites"))
        hosts = {each: stack.enter_context(site).host for each, site in open_others(topology, name)}
        track(f"{', '.join(hosts)} exchange what they have of {name}", 0)
        removed = remove_site(topology, name, hosts, publish)
    output.details(
        removed,
        {
            "removed": "site",
            "its last version": lambda each: show_version(each.final),
            "exchanged": lambda each: f"{each.records_copied:,} records",
            "topology": lambda each: f"{each.epoch}, in {file}",
        },
    )
    for waiting in removed.waiting:
        note(f"{waiting} is being restored, and gets the changes of {name} when `floodmark restore` ends")


def read_topology(file: Path) -> Topology:
    """The topology in a file."""
    try:
        text = file.read_bytes()
    except FileNotFoundError as error:
        raise NoInput(f"{file} does not exist", "floodmark topology --help") from error
    except OSError as error:
        raise Usage(f"{file} cannot be read: {error.strerror}", "floodmark topology --help") from error
    return parse_topology(text, str(file))


def open_others(topology: Topology, *without: str) -> Iterator[tuple[str, floodmark.Site]]:
    """Connect to all active sites of a topology except `without`; yields names and sites."""
    for name, site in topology.sites.items():
        if site.is_active and name not in without:
            if site.url is None:
                raise InvalidConfiguration(f"site {name!r} has no url in the topology; add it", site=name)
            yield name, connect(site.url, token_file=site.token_file, tls_root=site.tls_root_certificate)
