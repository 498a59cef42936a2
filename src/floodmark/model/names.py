"""What a site, a namespace, a feed or a subscription may be called."""

from floodmark.model.errors import InvalidName
from floodmark.model.limits import NAMESPACE_NAME_CHARACTERS_MAX


def require_name(name: object, what: str) -> None:
    """Names go into file names, URLs and metrics: short, printable, without blanks."""
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= NAMESPACE_NAME_CHARACTERS_MAX
        or not name.isprintable()
        or any(character.isspace() or character == "/" for character in name)
    ):
        raise InvalidName(
            f"{name!r:.200} cannot name a {what}: use 1 to {NAMESPACE_NAME_CHARACTERS_MAX} printable "
            "characters without blanks or slashes"
        )
