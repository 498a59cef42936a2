"""The roles of callers, in ascending order: each includes the ones below it."""

from enum import IntEnum


class Role(IntEnum):
    """The role of a caller.  Roles compare: a higher one may do all that a lower one may.

    >>> Role.READ < Role.WRITE < Role.REPLICATE < Role.ADMIN
    True
    >>> str(Role.WRITE), Role.parse("write") is Role.WRITE
    ('write', True)
    """

    READ = 1
    WRITE = 2
    # For replication jobs: only they advance the positions that a site has in the changes of others.
    REPLICATE = 3
    ADMIN = 4

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def parse(cls, text: str) -> "Role":
        """The role with this name in lower case; raises ValueError if there is none."""
        for role in cls:
            if str(role) == text:
                return role
        raise ValueError(f"a role is {', '.join(map(str, cls))}")
