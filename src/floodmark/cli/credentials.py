"""The entry of a server's access file that lets a token in."""

import tomlkit


def access_entry(name: str, role: str, digest: str, namespaces: list[str] | None = None) -> str:
    """An entry for the access file, in TOML.

    >>> print(access_entry("indexer", "read", "41ef", ["users"]))
    [[access]]
    name = "indexer"
    role = "read"
    token_sha256 = "41ef"
    namespaces = ["users"]
    """
    fields: dict[str, object] = {"name": name, "role": role, "token_sha256": digest}
    if namespaces:
        fields["namespaces"] = namespaces
    return tomlkit.dumps({"access": [fields]}).rstrip("\n")
