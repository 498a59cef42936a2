"""Certificates for tests, made on the spot by a certificate authority that only they trust."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import trustme

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
LATER_BUT_STILL_LONG_AGO = datetime(2020, 1, 2, tzinfo=UTC)


@dataclass(frozen=True)
class Certificate:
    """The files of a certificate and its key, in PEM."""

    certificate_path: Path
    key_path: Path

    @property
    def certificate(self) -> bytes:
        """The certificate, and those between it and the root, if any."""
        return self.certificate_path.read_bytes()

    @property
    def key(self) -> bytes:
        """The private key."""
        return self.key_path.read_bytes()


class Certificates:
    """An authority, a server that it vouches for, and clients of every kind.

    A client's name is the only alternative name in its certificate, which is where a server reads it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authority = trustme.CA()
        self._other_authority = trustme.CA()
        self.root_path = directory / "root.pem"
        self._authority.cert_pem.write_to_path(str(self.root_path))
        self.foreign_root_path = directory / "foreign-root.pem"
        self._other_authority.cert_pem.write_to_path(str(self.foreign_root_path))
        self.server = self._write("server", self._authority.issue_cert("localhost", "127.0.0.1", "::1"))

    @property
    def root(self) -> bytes:
        """The root that servers and clients are told to trust."""
        return self.root_path.read_bytes()

    def client(self, name: str) -> Certificate:
        """A client that the authority vouches for."""
        return self._write(f"client-{name}", self._authority.issue_cert(name))

    def expired_client(self, name: str) -> Certificate:
        """A client whose certificate was good once."""
        leaf = self._authority.issue_cert(name, not_before=LONG_AGO, not_after=LATER_BUT_STILL_LONG_AGO)
        return self._write(f"expired-{name}", leaf)

    def foreign_client(self, name: str) -> Certificate:
        """A client that only another authority vouches for."""
        return self._write(f"foreign-{name}", self._other_authority.issue_cert(name))

    def _write(self, name: str, leaf: trustme.LeafCert) -> Certificate:
        made = Certificate(self._directory / f"{name}.pem", self._directory / f"{name}.key.pem")
        made.certificate_path.write_bytes(b"".join(part.bytes() for part in leaf.cert_chain_pems))
        made.key_path.write_bytes(leaf.private_key_pem.bytes())
        return made


def make_certificates(directory: Path) -> Certificates:
    """Everything at once, in a directory of its own; a few milliseconds, so one set serves a session."""
    directory.mkdir(parents=True, exist_ok=True)
    return Certificates(directory)
