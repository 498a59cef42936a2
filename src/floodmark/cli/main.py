"""The entry point of the `floodmark` command."""


def main() -> None:
    """Run the command."""
