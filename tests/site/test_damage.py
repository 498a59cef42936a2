"""A site whose database has lost something is refused, says what, and opens again when that is accepted."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from tests.cli.support import run

import floodmark
from floodmark.host.secondary import open_directory
from floodmark.model.errors import Corruption
from floodmark.model.version import Version
from floodmark.site.opening import open_accepting

PUTS = 300


class Left:
    """What is left of a site that was ended, and the versions that it had acknowledged."""

    def __init__(self, path: Path, versions: list[Version]) -> None:
        self.path = path
        self.versions = versions

    def copy(self, name: str) -> Path:
        target = self.path.with_name(name)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.path, target)
        return target


def log_of(path: Path) -> Path:
    return max((path / "engine").glob("*.log"))


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="module", params=["killed", "closed"])
def left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Left]:
    path = tmp_path_factory.mktemp("sites") / "oslo"
    site = floodmark.open(path, site="oslo", site_id=7, background=False)
    users = site.create_namespace("users")
    versions = [users.put(b"%04d" % number, bytes(200)) for number in range(PUTS)]
    if request.param == "killed":
        ended = Left(path, versions).copy("killed")
        yield Left(ended, versions)
        site.close()
    else:
        site.close()
        yield Left(path, versions)


def count(path: Path) -> int:
    with floodmark.open(path, background=False) as site:
        return sum(1 for _ in site.namespace("users").scan())


def test_site_that_is_not_damaged_has_everything(left: Left) -> None:
    path = left.copy("healthy")
    for _ in range(3):
        assert count(path) == PUTS


def test_site_with_a_flipped_bit_in_its_log_is_refused(left: Left) -> None:
    chance = Random(1)
    size = log_of(left.path).stat().st_size
    if not size:
        pytest.skip("a site that was closed has an empty log")
    path = left.copy("flipped")
    kept = log_of(path).read_bytes()
    for _ in range(25):
        log_of(path).write_bytes(kept)
        # The last block is tests/engine/test_witness.py's.
        flip(log_of(path), chance.randrange(size - (size % 32768 or 32768)))
        with pytest.raises(Corruption, match=r"lost acknowledged writes.*doctor --accept-loss"):
            count(path)
    log_of(path).write_bytes(kept)
    assert count(path) == PUTS


def test_site_with_a_cut_manifest_is_refused_also_to_those_who_only_read(left: Left) -> None:
    path = left.copy("cut")
    manifest = path / "engine" / (path / "engine" / "CURRENT").read_text().strip()
    kept = manifest.read_bytes()
    for size in range(0, len(kept), 97):
        manifest.write_bytes(kept[:size])
        for open_it in (count, open_directory):
            with pytest.raises(Corruption, match=f"{manifest.name} has {size:,} bytes"):
                open_it(path)
    manifest.write_bytes(kept)
    assert count(path) == PUTS


def test_site_without_one_of_its_files_is_refused(left: Left) -> None:
    for file in sorted((left.path / "engine").iterdir()):
        is_data = file.suffix in (".log", ".sst") or file.name.startswith(("MANIFEST", "CURRENT"))
        if is_data and file.stat().st_size:
            path = left.copy("gone")
            (path / "engine" / file.name).unlink()
            with pytest.raises(Corruption, match=file.name):
                count(path)


def test_accepted_loss_mints_no_version_again(left: Left) -> None:
    path = left.copy("accepted")
    if size := log_of(path).stat().st_size:
        flip(log_of(path), size // 2)
    else:
        (path / "witness").write_bytes(b"damaged")
    with pytest.raises(Corruption):
        count(path)
    with open_accepting(path, loss=True) as site:
        users = site.namespace("users")
        kept = sum(1 for _ in users.scan())
        assert kept < PUTS if size else kept == PUTS
        assert users.put(b"later", b"1") > max(left.versions)
    assert count(path) == kept + 1


def test_doctor_names_the_loss_and_accepts_it(left: Left) -> None:
    path = left.copy("doctor")
    manifest = path / "engine" / (path / "engine" / "CURRENT").read_text().strip()
    flip(manifest, manifest.stat().st_size - 1)
    for _ in range(2):
        outcome = run("doctor", path, "--quick")
        assert outcome.code == 1
        assert f"{manifest.name} has other bytes than before" in " ".join(outcome.text.split())
    if not log_of(path).stat().st_size:
        # RocksDB itself cannot read this one; a witness that is gone is a loss of nothing.
        shutil.copy(left.path / "engine" / manifest.name, manifest)
        (path / "witness").write_bytes(b"damaged")
    else:
        shutil.copy(left.path / "engine" / manifest.name, manifest)
        flip(log_of(path), 20_000)
    accepted = run("doctor", path, "--quick", "--accept-loss")
    words = " ".join(accepted.text.split())
    assert accepted.code == 1
    assert "loss" in words
    assert "accepted: " in words
    assert run("doctor", path, "--quick").code == 0
    again = run("doctor", path, "--quick", "--accept-loss")
    assert again.code == 0
    assert "no acknowledged write is known to be missing" in again.text
