"""The demo: what a site can do, step by step, with every claim checked in the run."""

from floodmark.cli.demo.command import demo

__all__ = ["demo"]
