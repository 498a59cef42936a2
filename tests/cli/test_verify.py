"""What verify prints and exports, without Spark: the sites are compared elsewhere."""

import io
import json
import socket
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from threading import Event
from urllib.error import HTTPError
from urllib.request import urlopen

import msgspec
import pytest
from tests.cli.support import run

import floodmark
from floodmark.cli.commands import verifying
from floodmark.cli.commands.verifying import VerifyMetrics, print_verification
from floodmark.cli.monitoring import serving_page
from floodmark.cli.render.output import Output
from floodmark.divergence.comparing import Drift, DriftSide
from floodmark.divergence.histories import Difference, DifferenceKind
from floodmark.divergence.outcome import Outcome
from floodmark.divergence.repairing import RepairSummary
from floodmark.divergence.rules import Verdict
from floodmark.model.change import Stamp
from floodmark.model.version import compose
from floodmark.spark.jobs import PairSummary, VerifySummary
from floodmark.spark.jobs.verifying.verify import DifferenceFound, DriftFound
from floodmark.testing.clock import SimulatedTime

WRITTEN = compose(1_700_000_000_000, 0)
MARK = {1: WRITTEN + 9, 2: WRITTEN + 8}
LEFT = DriftSide("oslo", WRITTEN, Stamp(WRITTEN, 1), MARK, (1 << 64) - 1, False)
RIGHT = DriftSide("rome", 0, None, MARK, None, False)


def pair(**numbers: int) -> PairSummary:
    counts = {"compared": 1_000, "agree": 1_000, "lag": 0, "value_mismatch": 0, "missing_left": 0}
    return PairSummary(
        namespace="users", left="oslo", right="rome", **{**counts, "missing_right": 0, **numbers}
    )


AGREED = VerifySummary(sites=["oslo", "rome"], pairs=[pair()], seconds=1.5)
DRIFTED = VerifySummary(
    sites=["oslo", "rome"],
    pairs=[pair(agree=996, lag=2, missing_right=2)],
    sample=[DriftFound("users", Drift(b"ada", Verdict.MISSING_RIGHT, LEFT, RIGHT))],
    whole=False,
)


def printed(summary: VerifySummary, *, as_json: bool = False) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    print_verification(Output(json=as_json, stream=stream), summary)
    stream.seek(0)
    return stream.read()


def test_table_shows_numbers_and_keys_and_ends_with_the_outcome() -> None:
    assert printed(AGREED).splitlines() == [
        "namespace  left  right  compared  agree  lag  differ  missing",
        "users      oslo  rome   1,000     1,000  0    0       0",
        "the sites agree",
    ]
    lines = printed(DRIFTED).splitlines()
    assert lines[1].endswith("2 at rome")
    assert lines[2] == (
        "drift  users  ada is missing at rome: oslo has what was written at 2023-11-14T22:13:20.000Z by site "
        "1, rome has nothing"
    )
    assert lines[3:] == ["drift  and 1 more", "the sites have drifted apart"]


@pytest.mark.parametrize(
    ("part", "right", "said"),
    [
        (
            None,
            RIGHT,
            "ada differs: oslo has what was written at 2023-11-14T22:13:20.000Z by site 1, rome has",
        ),
        ("city", RIGHT, "ada (field city) differs: oslo has"),
        (1, RIGHT, "ada (count of site 1) differs: oslo has"),
        (
            None,
            msgspec.structs.replace(LEFT, site="rome", digest=7),
            "ada is not the same at oslo and rome, though it was written at 2023-11-14T22:13:20.000Z by",
        ),
    ],
)
def test_difference_is_told_with_its_part_and_its_stamps(
    part: str | int | None, right: DriftSide, said: str
) -> None:
    drift = Drift(b"ada", Verdict.VALUE_MISMATCH, LEFT, right, part)
    summary = msgspec.structs.replace(DRIFTED, sample=[DriftFound("users", drift)])
    assert printed(summary).splitlines()[2].startswith(f"drift  users  {said}")


@pytest.mark.parametrize(
    ("summary", "last"),
    [
        (VerifySummary(sites=[], pairs=[pair(lag=1)]), "the sites agree; 1 change under way"),
        (
            VerifySummary(sites=[], pairs=[], doubts=["rome is away"]),
            "unknown: not all sites could be compared",
        ),
        (
            VerifySummary(
                sites=[], pairs=[pair(missing_right=1)], repair=RepairSummary(repaired=1), left=[pair()]
            ),
            "the sites agree again",
        ),
        (
            VerifySummary(
                sites=[],
                pairs=[pair(missing_right=1)],
                repair=RepairSummary(impossible=1, problems=("b'ada': nobody knows",)),
                left=[pair(missing_right=1)],
            ),
            "the sites have drifted apart",
        ),
    ],
)
def test_last_line_is_the_outcome(summary: VerifySummary, last: str) -> None:
    text = printed(summary)
    assert text.splitlines()[-1] == last
    for said in [*summary.doubts, *(summary.repair.problems if summary.repair else ())]:
        assert said in text


def test_what_is_in_the_past_is_a_finding_too() -> None:
    past = Difference(b"ada", Stamp(WRITTEN, 1), DifferenceKind.LOST, "oslo", "rome", WRITTEN)
    summary = VerifySummary(
        sites=[], pairs=[pair()], differences=[DifferenceFound("users", past)], differences_found=3
    )
    assert summary.outcome is Outcome.DRIFT
    lines = printed(summary).splitlines()
    assert lines[2].startswith("past   users  ada was lost on its way to rome: written at 2023-11-14")
    assert lines[3] == "past   and 2 more"
    assert lines[4] == "the sites agree now, but some changes had been lost and later written over"


def test_programs_get_versions_as_text_and_digests_in_hexadecimal() -> None:
    found = json.loads(printed(DRIFTED, as_json=True))
    assert (found["outcome"], found["whole"], found["pairs"][0]["drift"]) == ("drift", False, 2)
    (sample,) = found["sample"]
    assert sample["key"] == "ada"
    assert sample["left"] == {
        "site": "oslo",
        "version": str(WRITTEN),
        "stamp": {"version": str(WRITTEN), "site": 1},
        "mark": {"1": str(WRITTEN + 9), "2": str(WRITTEN + 8)},
        "digest": "ffffffffffffffff",
        "deleted": False,
    }
    assert (sample["right"]["digest"], sample["right"]["stamp"]) == (None, None)


def test_metrics_add_up_passes_and_show_the_last_one() -> None:
    time = SimulatedTime(0)
    metrics = VerifyMetrics(time)
    assert metrics.why_not_ready() is not None
    metrics.add(AGREED)
    time.advance(5_000)
    metrics.add(DRIFTED)
    text = metrics.render().decode()
    labels = 'left="oslo",namespace="users",right="rome"'
    for line in (
        f"floodmark_verify_keys_compared_total{{{labels}}} 2000.0",
        f"floodmark_verify_lag_keys{{{labels}}} 2.0",
        f'floodmark_verify_drift_keys{{kind="missing_right",{labels}}} 2.0',
        f'floodmark_verify_drift_keys{{kind="value_mismatch",{labels}}} 0.0',
        'floodmark_verify_passes_total{kind="whole"} 1.0',
        'floodmark_verify_passes_total{kind="changed"} 1.0',
        "floodmark_verify_whole_pass_age_seconds 5.0",
        'floodmark_verify_outcome{outcome="drift"} 1.0',
        'floodmark_verify_outcome{outcome="agree"} 0.0',
    ):
        assert line in text.splitlines()
    assert metrics.find_alarms() == ["users: oslo and rome have drifted apart in 2 keys"]


@pytest.mark.parametrize(
    "failed",
    [
        VerifySummary(sites=[], pairs=[], doubts=["the comparison did not come to its end"]),
        VerifySummary(sites=["oslo", "rome"], pairs=[pair()], doubts=["bonn cannot be compared"]),
        VerifySummary(sites=["oslo", "rome"], pairs=[]),
    ],
)
def test_pass_that_could_not_look_at_everything_does_not_count_as_a_whole_one(failed: VerifySummary) -> None:
    time = SimulatedTime(0)
    metrics = VerifyMetrics(time)
    metrics.add(failed)
    assert "\nfloodmark_verify_whole_pass_age_seconds" not in metrics.render().decode()
    metrics.add(AGREED)
    time.advance(5_000)
    metrics.add(failed)
    assert "floodmark_verify_whole_pass_age_seconds 5.0" in metrics.render().decode().splitlines()


def test_watch_serves_what_it_has_found() -> None:
    found = VerifyMetrics()

    def page(path: str) -> str:
        assert server is not None
        host, port = server.address
        try:
            with urlopen(f"http://{host}:{port}{path}", timeout=10) as answer:
                return str(answer.read().decode())
        except HTTPError as error:
            return str(error.read().decode())

    def passes() -> Generator[VerifySummary, None, None]:
        assert "the first pass" in page("/readyz")
        yield AGREED
        assert (page("/readyz"), page("/health")) == ("ok\n", "ok\n")
        yield DRIFTED
        assert "have drifted apart in 2 keys" in page("/health")
        assert 'floodmark_verify_outcome{outcome="drift"} 1.0' in page("/metrics")

    stream = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with serving_page(found, verifying.WatchOptions(metrics="127.0.0.1:0")) as server:
        assert (
            verifying._watch(passes(), Output(json=True, stream=stream), found, Event(), []) is Outcome.DRIFT
        )
    stream.seek(0)
    assert [json.loads(line)["outcome"] for line in stream] == ["agree", "drift"]


@pytest.mark.parametrize("options", [[], ["--watch"]])
def test_directory_that_cannot_be_opened_is_a_doubt_like_a_server_that_does_not_answer(
    options: list[str], directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "spark_job", None)
    assert run("verify", directory, tmp_path / "nowhere", "--json", *options).code == 66
    with floodmark.open(directory), floodmark.open(tmp_path / "rome", site="rome"):
        told = run("verify", directory, tmp_path / "rome", "--json", *options)
        assert (told.code, told.json["outcome"]) == (2, "unknown"), told.errors
        assert [doubt.partition(" cannot be opened: ")[0] for doubt in told.json["doubts"]] == [
            str(directory),
            str(tmp_path / "rome"),
        ]
        text = run("verify", directory, "grpc://127.0.0.1:1", *options).text
    assert f"unsure {directory} cannot be opened: " in text
    assert text.endswith("unknown: not all sites could be compared\n")


def test_sites_that_are_left_are_compared_and_the_doubt_stays() -> None:
    doubts = ["data/bonn cannot be opened"]
    assert verifying._with(doubts, AGREED).outcome is Outcome.UNKNOWN
    assert verifying._with(doubts, DRIFTED).outcome is Outcome.DRIFT

    def passes() -> Generator[VerifySummary, None, None]:
        yield AGREED

    found, output = VerifyMetrics(), Output(json=True, stream=io.TextIOWrapper(io.BytesIO(), "utf-8"))
    assert verifying._watch(passes(), output, found, Event(), doubts) is Outcome.UNKNOWN
    assert found.find_alarms() == doubts


def passes_until_cancelled(*summaries: VerifySummary) -> Generator[VerifySummary, None, None]:
    yield from summaries
    raise RuntimeError("the job was cancelled")


def test_watch_that_is_ended_in_a_pass_says_what_the_pass_before_said() -> None:
    stop, stream = Event(), io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    output = Output(json=True, stream=stream)
    with pytest.raises(RuntimeError, match="cancelled"):
        verifying._watch(passes_until_cancelled(DRIFTED), output, VerifyMetrics(), stop, [])
    stop.set()
    with pytest.raises(RuntimeError, match="cancelled"):
        verifying._watch(passes_until_cancelled(), output, VerifyMetrics(), stop, [])
    outcome = verifying._watch(passes_until_cancelled(AGREED, DRIFTED), output, VerifyMetrics(), stop, [])
    assert outcome is Outcome.DRIFT


def test_place_where_metrics_cannot_be_served_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "spark_job", None)
    sites = [str(tmp_path / "oslo"), str(tmp_path / "rome")]
    refused = run("verify", *sites, "--watch", "--metrics", "nowhere")
    assert (refused.code, "looks like 127.0.0.1:7100" in refused.errors) == (64, True)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        refused = run("verify", *sites, "--watch", "--metrics", f"127.0.0.1:{port}")
    assert (refused.code, f"127.0.0.1:{port}" in refused.errors) == (64, True)
