"""What a caller may do, as the steps of one stair: each role includes the ones below it."""

from enum import IntEnum


class Role(IntEnum):
    """How much a caller may do.  Roles compare: a higher one may do all that a lower one may.

    >>> Role.READ < Role.WRITE < Role.REPLICATE < Role.ADMIN
    True
    >>> str(Role.WRITE), Role.parse("write") is Role.WRITE
    ('write', True)
    """

    READ = 1
    WRITE = 2
    # For replication jobs: what a site believes to have of others is moved by them, and by no writer.
    REPLICATE = 3
    ADMIN = 4

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def parse(cls, text: str) -> "Role":
        """The role of a name as people write it; a ValueError if there is none."""
        for role in cls:
            if str(role) == text:
                return role
        raise ValueError(f"a role is {', '.join(map(str, cls))}")
