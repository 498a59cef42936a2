"""topology show, set and remove: which sites share which namespaces."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from floodmark.cli.arguments import Json, Location
from floodmark.cli.failures import FINDING
from floodmark.cli.opening import open_members, open_site, read_topology
from floodmark.cli.render.fields import plain
from floodmark.cli.render.output import Output, note
from floodmark.cli.render.text import show_version
from floodmark.links.removing import remove_site
from floodmark.replication.topology import Topology
from floodmark.replication.topology_file import render_topology

commands = typer.Typer(help="Show and set which sites share which namespaces.")


@commands.command()
def show(location: Location, json: Json = False) -> None:
    """Show the topology of a site, as TOML that `topology set` reads.

    \b
    Examples:
      floodmark topology show data/oslo
      floodmark topology show grpc://127.0.0.1:7100 --json
    """
    with open_site(location) as site:
        topology = site.topology()
    if topology is None:
        note("no topology: this site shares nothing with others")
        raise typer.Exit(FINDING)
    output = Output(json=json)
    if json:
        output.object(msgspec.to_builtins(topology))
    else:
        output.raw(render_topology(topology).encode())


@commands.command("set")
def set_topology(
    location: Location,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The topology, in TOML.")],
    json: Json = False,
) -> None:
    """Set the topology of a site.  Do it at each of them, a new site's peers first.

    Namespaces that do not exist there are created. One that holds data from before is refused:
    see `floodmark namespace rewrite`. Each change of the topology increments `epoch`; setting
    the same one again does nothing.

    \b
    Example:
      floodmark topology set data/oslo topology.toml
    """
    topology = read_topology(file)
    with open_site(location) as site:
        site.set_topology(topology)
        name, shared = site.name, topology.shared_by(site.name)
    Output(json=json).result(
        {"site": name, "epoch": topology.epoch, "namespaces": shared},
        f"{name} follows topology {topology.epoch} and shares: {', '.join(shared) or 'nothing'}",
    )


@commands.command()
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The site that goes.")],
    file: Annotated[
        Path, typer.Option("--topology", metavar="FILE", help="The topology, in TOML; it is rewritten.")
    ],
    json: Json = False,
) -> None:
    """Remove a site for good.  All others must be reachable, the site itself need not.

    Its links are closed first; then the others exchange its changes, until all sites hold the
    same. Its entry stays in the topology, and its id is never used again. Stop replication
    before, and start it again with the new topology. Comments in the file stay. The same command
    resumes a removal that was interrupted.

    \b
    Example:
      floodmark topology remove bonn --topology topology.toml
    """
    topology = read_topology(file)

    def publish(changed: Topology) -> None:
        # The file is replaced as a whole, and keeps the comments of the one before.
        written = file.with_name(f".{file.name}.new")
        written.write_text(render_topology(changed, file.read_text("utf-8")), "utf-8")
        written.replace(file)

    with open_members(topology, without=name) as members:
        removed = remove_site(topology, name, {each: site.host for each, site in members.items()}, publish)
    Output(json=json).result(
        plain(removed),
        [
            ("removed", removed.site),
            ("its last version", show_version(removed.final)),
            ("exchanged", f"{removed.records_copied:,} records"),
            ("topology", f"{removed.epoch}, in {file}"),
        ],
    )
