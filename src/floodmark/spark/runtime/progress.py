"""The progress of a job: stages, each with its finished steps and their total.

Spark counts its tasks only as it plans them, so a total may grow while a stage runs.  The numbers are for
display; no job decides anything by them.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread
from typing import Any, Final, Protocol
from uuid import uuid4

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

POLL_SECONDS: Final = 0.5

_GROUP: Final = "spark.jobGroup.id"


class JobProgress(Protocol):
    """A receiver of progress.  Called from several threads, one at a time for each stage."""

    def report(self, stage: str, done: int, total: int | None) -> None:
        """`done` steps of a stage are finished; `total` is None while it is unknown."""
        ...


class _Silent:
    def report(self, stage: str, done: int, total: int | None) -> None:
        pass


# Ignores progress.
SILENT: Final[JobProgress] = _Silent()


class _Tasks:
    """The tasks of several of Spark's stages, which are kept here because Spark forgets old stages."""

    def __init__(self, progress: JobProgress, stage: str) -> None:
        self._report = partial(progress.report, stage)
        self._seen: dict[int, tuple[int, int]] = {}
        self._reported: tuple[int, int] | None = None

    def report(self, stages: Iterable[tuple[int, int, int]]) -> None:
        """Add (id, finished tasks, total) of stages, and report the sums if they have changed."""
        self._seen |= {stage_id: (min(done, total), total) for stage_id, done, total in stages}
        sums = sum(done for done, _ in self._seen.values()), sum(total for _, total in self._seen.values())
        if sums != self._reported:
            self._reported = sums
            self._report(*sums)

    def finish(self) -> None:
        """Count every stage as finished, also those that Spark skipped because it had their results."""
        self.report([(stage_id, total, total) for stage_id, (_, total) in self._seen.items()])


@contextmanager
def watch_tasks(spark: SparkSession, progress: JobProgress | None, stage: str) -> Iterator[None]:
    """Report the finished tasks of the jobs that this thread runs inside the block.

    Streaming queries run in threads of their own and are not seen; they have listeners.
    """
    if progress is None or progress is SILENT:
        yield
        return
    tasks = _Tasks(progress, stage)
    progress.report(stage, 0, None)
    watching = _watch_classic if isinstance(spark, SparkSession) else _watch_connect
    with watching(spark, tasks):
        yield
    tasks.finish()


@contextmanager
def _watch_classic(spark: SparkSession, tasks: _Tasks) -> Iterator[None]:
    context = spark.sparkContext
    before = context.getLocalProperty(_GROUP)
    group = f"floodmark-{uuid4().hex}"
    ended = Event()

    def poll() -> None:
        while not ended.wait(POLL_SECONDS):
            tasks.report(_stages_of_group(context, group))

    watcher = Thread(target=poll, name="floodmark-progress", daemon=True)
    context.setLocalProperty(_GROUP, group)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        context.setLocalProperty(_GROUP, before)  # type: ignore[arg-type]  # None removes it
    tasks.report(_stages_of_group(context, group))


def _stages_of_group(context: Any, group: str) -> list[tuple[int, int, int]]:
    tracker = context.statusTracker()
    try:
        jobs = [tracker.getJobInfo(job_id) for job_id in tracker.getJobIdsForGroup(group)]
        ids = [stage_id for job in jobs if job is not None for stage_id in job.stageIds]
        stages = [(stage_id, tracker.getStageInfo(stage_id)) for stage_id in ids]
    except (Py4JError, OSError):
        # The session may be stopped; the job raises that error itself.
        return []
    return [(each, stage.numCompletedTasks, stage.numTasks) for each, stage in stages if stage is not None]


@contextmanager
def _watch_connect(spark: Any, tasks: _Tasks) -> Iterator[None]:
    def handle(stages: Iterable[Any] | None, **_: object) -> None:
        tasks.report((stage.stage_id, stage.num_completed_tasks, stage.num_tasks) for stage in stages or ())

    spark.registerProgressHandler(handle)
    try:
        yield
    finally:
        spark.removeProgressHandler(handle)
