"""The console without a browser: who gets an answer, what a frame tells, and what a closed page costs."""

import http.client
import json
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from tests.server.certificates import Certificate, Certificates
from tests.server.support import serving, write_access
from tests.waiting import HANG_SECONDS, wait_until

import floodmark
from floodmark.host.comparisons import ComparisonNote
from floodmark.host.ports import Host
from floodmark.model.errors import InvalidConfiguration
from floodmark.server import Server, ServerOptions, hash_token, new_token, serve
from floodmark.server.console.watching import SiteWatch, Watching, find_alarms

MARKUP = "<script>alert(1)</script>"


class Protected:
    """A served site with an access file: a token of a reader, and one for a namespace alone."""

    def __init__(self, directory: Path) -> None:
        self.site = floodmark.open(directory / "oslo", site="oslo")
        self.reader, self.clerk = new_token(), new_token()
        access = directory / "access.toml"
        access.write_text(
            f'[[access]]\nname = "ada"\nrole = "read"\ntoken_sha256 = "{hash_token(self.reader)}"\n'
            f'[[access]]\nname = "clerk"\nrole = "read"\nnamespaces = ["users"]\n'
            f'token_sha256 = "{hash_token(self.clerk)}"\n',
            "utf-8",
        )
        options = ServerOptions(access=access, console_listen="127.0.0.1:0", resp_listen=None)
        self.server: Server = serve(self.site, "127.0.0.1:0", options)

    def ask(self, path: str, token: str | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        connection = self.connect(path, token, **headers)
        try:
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def connect(self, path: str, token: str | None = None, **headers: str) -> http.client.HTTPConnection:
        """A connection with a request on its way."""
        connection = http.client.HTTPConnection(self.address, timeout=HANG_SECONDS)
        more = {} if token is None else {"Authorization": f"Bearer {token}"}
        connection.request("GET", path, headers={**headers, **more})
        return connection

    @property
    def address(self) -> str:
        """Host and port of the console."""
        assert self.server.console_url is not None
        return urlsplit(self.server.console_url).netloc


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Protected]:
    made = Protected(tmp_path_factory.mktemp("console"))
    users = made.site.create_namespace("users")
    users.put(MARKUP.encode(), b"first")
    users.put(MARKUP.encode(), MARKUP.encode())
    with made.server:
        yield made


def read_events(connection: http.client.HTTPConnection, count: int) -> dict[str, list[Any]]:
    """The first events of a stream, by name."""
    answer = connection.getresponse()
    assert answer.status == 200
    found: dict[str, list[Any]] = {}
    for _ in range(count):
        name = answer.readline().decode().removeprefix("event: ").strip()
        found.setdefault(name, []).append(json.loads(answer.readline().removeprefix(b"data: ")))
        assert answer.readline() == b"\n"
    return found


def watching_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("floodmark-console-")]


def test_without_a_token_nothing_is_answered_but_the_empty_page(served: Protected) -> None:
    key = f"/api/key?namespace=users&key={quote(MARKUP)}"
    for path in ("/api/events", key, "/metrics"):
        for token in (None, "wrong", ""):
            status, headers, body = served.ask(path, token)
            assert (status, headers["www-authenticate"]) == (401, "Bearer"), path
            assert b"first" not in body
            assert b"oslo" not in body
    status, _, body = served.ask("/")
    assert status == 200
    assert b"oslo" not in body
    # Who may read one namespace may not look at the site, and may look a key of it up.
    assert served.ask("/api/events", served.clerk)[0] == served.ask("/metrics", served.clerk)[0] == 403
    assert served.ask(key, served.clerk)[0] == 200
    assert served.ask("/api/key?namespace=orders&key=ada", served.clerk)[0] == 403


def test_every_answer_forbids_what_is_inline_or_foreign(served: Protected) -> None:
    for path in ("/", "/console.js", "/console.css", "/api/events", "/api/key"):
        policy = served.ask(path)[1]["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        assert "http" not in policy
    page = served.ask("/")[2].decode()
    assert "<style" not in page
    assert " style=" not in page
    assert " on" not in page.partition("<body>")[2].replace(" on the ", " ")
    assert page.count("<script") == page.count('<script type="module" src="console.js"></script>') == 1
    assert served.ask("/static/../routes.py")[0] == served.ask("/routes.py")[0] == 404


def test_frame_tells_what_the_site_tells_and_a_closed_page_costs_nothing(served: Protected) -> None:
    connection = served.connect("/api/events", served.reader)
    try:
        events = read_events(connection, 5)
        assert watching_threads()
    finally:
        connection.close()
    frame = events["snapshot"][-1]
    (site,) = frame["sites"]
    assert (site["name"], site["state"], site["url"]) == ("oslo", "answering", served.server.url)
    overview = site["overview"]
    assert overview["namespaces"] == ["users"]
    assert overview["changes"] == served.site.statistics().changes == 2
    assert overview["whole_comparison"] is None
    assert overview["machine"]["release"] == floodmark.__version__
    assert frame["health"] == {"severity": "ok", "sentence": "Nothing is wrong: oslo answers."}
    wait_until(lambda: not watching_threads(), "the console to look no more")


def test_key_is_shown_with_its_history_as_text(served: Protected) -> None:
    status, headers, body = served.ask(f"/api/key?namespace=users&key={quote(MARKUP)}", served.reader)
    assert (status, headers["content-type"]) == (200, "application/json")
    told = json.loads(body)
    ((site),) = told["sites"]
    assert (told["key"], site["error"], site["more"]) == (MARKUP, None, None)
    assert [record["value"] for record in site["records"]] == [MARKUP, "first"]
    assert [record["origin"] for record in site["records"]] == ["oslo", "oslo"]
    assert served.ask("/api/key?namespace=users&key=0x0", served.reader)[0] == 400
    status, _, body = served.ask("/api/key?namespace=orders&key=ada", served.reader)
    assert status == 200
    assert "orders" in json.loads(body)["sites"][0]["error"]


def test_drift_that_a_comparison_has_found_is_an_alarm_with_advice(tmp_path: Path) -> None:
    with floodmark.open(tmp_path, site="rome") as site:
        verification = site.host.verification
        verification.note_comparison(ComparisonNote(sites=["oslo", "rome"], done=3, total=8))
        running = site.host.status.overview().running_comparison
        assert running is not None
        assert (running.report.done, running.report.total) == (3, 8)
        found = ComparisonNote(sites=["oslo", "rome"], outcome="drift", drift=2, sample=["users/ada"])
        verification.note_comparison(found)
        watch = SiteWatch("rome", "grpc://rome", lambda: site.host)
        assert watch.look()
        (alarm,) = find_alarms([watch.frame(0)])
        assert (alarm.finding.check, alarm.site) == ("verify", "rome")
        assert "2 keys" in alarm.finding.message
        assert "--repair" in alarm.finding.advice
    # A restart does not make of it a comparison that was never run.
    with floodmark.open(tmp_path) as site:
        whole = site.host.status.overview().whole_comparison
        assert whole is not None
        assert whole.report == found


def test_site_that_fails_is_silent_and_answers_again(tmp_path: Path) -> None:
    with floodmark.open(tmp_path, site="oslo") as site:
        fails = True

        def reach() -> Host:
            if fails:
                raise floodmark.Unreachable("nothing listens")
            return site.host

        watching = Watching([SiteWatch("oslo", "grpc://oslo", reach)])
        changed = threading.Event()
        with watching.watched(changed.set):
            assert changed.wait(HANG_SECONDS)
            frame = watching.frame()
            assert frame.sites[0].state == "silent"
            assert "nothing listens" in frame.alarms[0].finding.message
            assert frame.health.severity == "problem"
            changed.clear()
            fails = False
            assert changed.wait(HANG_SECONDS)
            assert watching.frame().sites[0].state == "answering"
            assert not watching.frame().alarms


def test_open_console_is_shown_under_a_name_of_this_machine_only(tmp_path: Path) -> None:
    site = floodmark.open(tmp_path, site="oslo")
    options = ServerOptions(console_listen="127.0.0.1:0", resp_listen=None)
    with serve(site, "127.0.0.1:0", options) as server:
        assert server.console_url is not None
        address = urlsplit(server.console_url).netloc
        for name, status in (
            ("localhost:1", 400),
            ("[::1]:1", 400),
            ("evil.example:80", 403),
            ("127.0.0.1.x", 403),
        ):
            connection = http.client.HTTPConnection(address, timeout=HANG_SECONDS)
            connection.request("GET", "/api/key?key=0x0", headers={"Host": name})
            assert connection.getresponse().status == status
            connection.close()


def test_under_tls_a_token_is_needed_and_certificates_are_shown(
    certificates: Certificates, tmp_path: Path
) -> None:
    token = new_token()
    access = write_access(tmp_path / "access.toml", {"name": "ada", "role": "read", "token": token})
    with serving(over_tls(certificates, access)) as (_, server):
        with open_tls(server, certificates) as connection:
            connection.request("GET", "/api/events")
            assert connection.getresponse().status == 401
        with open_tls(server, certificates) as connection:
            connection.request("GET", "/api/events", headers={"Authorization": f"Bearer {token}"})
            frame = read_events(connection, 5)["snapshot"][-1]
        assert list(frame["sites"][0]["overview"]["machine"]["certificates"]) == ["server"]
        assert server.console_url is not None
        plain = http.client.HTTPConnection(urlsplit(server.console_url).netloc, timeout=HANG_SECONDS)
        plain.request("GET", "/")
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            plain.getresponse()
        plain.close()


def test_under_mutual_tls_a_certificate_is_enough_and_needed(
    certificates: Certificates, tmp_path: Path
) -> None:
    access = write_access(tmp_path / "access.toml", {"name": "ada", "role": "read", "certificate": "ada"})
    with serving(over_tls(certificates, access, mutual=True)) as (_, server):
        for name, status in (("ada", 200), ("eve", 401)):
            with open_tls(server, certificates, certificates.client(name)) as connection:
                connection.request("GET", "/api/events")
                assert connection.getresponse().status == status
        for bad in (None, certificates.foreign_client("ada")):
            with (
                open_tls(server, certificates, bad) as connection,
                pytest.raises((ssl.SSLError, ConnectionError)),
            ):
                ask_page(connection)


def ask_page(connection: http.client.HTTPConnection) -> None:
    """A client hears that its certificate is refused when it sends, or when it reads."""
    connection.request("GET", "/")
    connection.getresponse()


def over_tls(certificates: Certificates, access: Path, *, mutual: bool = False) -> ServerOptions:
    return ServerOptions(
        tls_certificate=certificates.server.certificate_path,
        tls_key=certificates.server.key_path,
        tls_client_root=certificates.root_path if mutual else None,
        access=access,
        console_listen="127.0.0.1:0",
        resp_listen=None,
    )


def open_tls(
    server: Server, certificates: Certificates, own: Certificate | None = None
) -> closing[http.client.HTTPSConnection]:
    context = ssl.create_default_context(cafile=certificates.root_path)
    if own is not None:
        context.load_cert_chain(own.certificate_path, own.key_path)
    assert server.console_url is not None
    assert server.console_url.startswith("https://")
    address = urlsplit(server.console_url).netloc
    return closing(http.client.HTTPSConnection(address, timeout=HANG_SECONDS, context=context))


def test_colours_of_text_have_enough_contrast(served: Protected) -> None:
    schemes = re.findall(r":root {(.*?)}", served.ask("/console.css")[2].decode(), re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", scheme))
        texts = ("ink", "quiet", "accent", "sand", "ok", "warning", "problem", "unknown")
        pairs = [(text, ground) for text in texts for ground in ("ground", "panel", "sunk")]
        pairs += [(text, f"{text}-ground") for text in texts[4:]]
        for text, ground in pairs:
            # Level AA of the Web Content Accessibility Guidelines.
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert 1.0 < contrast("#ffffff", "#777777") < 4.5


def contrast(one: str, other: str) -> float:
    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    shares = [part / 255 for part in bytes.fromhex(colour[1:])]
    red, green, blue = (
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in shares
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_console_is_refused_beyond_this_machine_without_protection(tmp_path: Path) -> None:
    with (
        floodmark.open(tmp_path, site="oslo") as site,
        pytest.raises(InvalidConfiguration, match="access file"),
    ):
        serve(site, "127.0.0.1:0", ServerOptions(console_listen="0.0.0.0:0"))
