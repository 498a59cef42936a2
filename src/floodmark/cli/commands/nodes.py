"""node list, drain and remove."""

from typing import Annotated

from floodmark.cli.arguments import Commands, OpenSite
from floodmark.cli.commands.partitions import show_moves
from floodmark.cli.render.output import Output
from floodmark.cli.render.text import show_time
from floodmark.host.statistics import NodeStatistics
from floodmark.model.version import COUNTER_BITS

commands = Commands("node")


@commands.command("list")
def list_nodes(site: OpenSite, output: Output) -> None:
    """List the nodes that serve a site, with what each owns.

    One process that serves a directory is not a node: then the list is empty. The keeper is the node that
    answers for the whole site. No node stamps a version above its ceiling.

    Example:
      floodmark node list grpc://oslo-1:7100,oslo-2:7100
    """
    output.rows(
        site.host.node_port.nodes(),
        {
            "node": lambda each: str(each.node),
            "state": show_state,
            "url": lambda each: each.url,
            "since": lambda each: show_time(each.since_ms << COUNTER_BITS),
            "last beat": lambda each: show_time(each.beat_ms << COUNTER_BITS),
            "changes/s": lambda each: each.load,
            "partitions": lambda each: len(each.partitions),
            "ceiling": lambda each: show_time(each.ceiling),
        },
        lambda each: {
            "node": each.node,
            "state": show_state(each),
            "url": each.url,
            "keeper": each.keeps,
            "since": show_time(each.since_ms << COUNTER_BITS),
            "last_beat": show_time(each.beat_ms << COUNTER_BITS),
            "changes_per_second": each.load,
            "incarnation": each.incarnation,
            "ceiling": each.ceiling,
            "partitions": each.partitions,
        },
    )


@commands.command()
def drain(site: OpenSite, output: Output, node: Annotated[int, "NODE", "The number of a node."]) -> None:
    """Move everything away from a node, which may then stop.

    Its partitions and the keeper's lease go to other nodes. It gets no partitions before it is started again.

    Example:
      floodmark node drain grpc://oslo-2:7100 1
    """
    show_moves(output, site.host.node_port.drain(node))


@commands.command()
def remove(site: OpenSite, output: Output, node: Annotated[int, "NODE", "The number of a node."]) -> None:
    """Forget a node that has stopped and will not come back.

    Nothing depends on it: a node that starts under the number later is a member again.

    Example:
      floodmark node remove grpc://oslo-2:7100 1
    """
    site.host.node_port.remove_node(node)
    output.result({"removed": node}, f"node {node} is no longer listed")


def show_state(node: NodeStatistics) -> str:
    """The state of a node in a word or two."""
    if not node.lives:
        return "lost" if node.partitions else "stopped"
    states = ["keeper"] * node.keeps + ["drained"] * node.drained
    return ", ".join(states) or "serves"
