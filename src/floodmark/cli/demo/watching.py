"""Looking on while messages flow: the board is drawn anew twice a second, until something has come about."""

from collections.abc import Callable
from threading import Event
from types import TracebackType
from typing import Final

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from floodmark.cli.demo.board import Board
from floodmark.cli.demo.pair import Pair
from floodmark.cli.demo.stage import Stage
from floodmark.clock import monotonic_ms
from floodmark.model.errors import LinkStalled

LOOK_SECONDS: Final = 0.5
WAIT_SECONDS_MAX: Final = 180.0
BAR_WIDTH: Final = 30


class Watch:
    """A look at both sites and their links.  What the board showed last stays."""

    def __init__(self, stage: Stage, pair: Pair) -> None:
        self.board = Board(stage, pair.people)
        self._stage = stage
        self._pair = pair
        self._moving = stage.moving()

    def __enter__(self) -> "Watch":
        self._moving.__enter__()
        self._look(Text())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._moving.__exit__(kind, error, traceback)
        if error is None:
            self._stage.show(self.board.draw())

    def run_for(self, seconds: float, what: str) -> None:
        """Look on for some seconds."""
        began_ms = monotonic_ms()
        while (passed := (monotonic_ms() - began_ms) / 1000) < seconds:
            bar = ProgressBar(seconds, passed, BAR_WIDTH, style="grey23", complete_style="cyan")
            note = Table.grid(padding=(0, 2))
            note.add_row(bar, Text(what, style="dim"))
            self._look(note)

    def wait(self, condition: Callable[[], bool], what: str) -> int:
        """Look on until something has come about; how many milliseconds it took."""
        began_ms = monotonic_ms()
        while not condition():
            if monotonic_ms() - began_ms > WAIT_SECONDS_MAX * 1000:
                raise self._stands_still(what)
            self._look(Text(what, style="dim"))
        took_ms = monotonic_ms() - began_ms
        self.board.take(self._pair.look())
        return took_ms

    def _look(self, note: RenderableType) -> None:
        self.board.take(self._pair.look())
        self._moving.show(self.board.draw(note), self.board.line())
        Event().wait(LOOK_SECONDS)

    def _stands_still(self, what: str) -> LinkStalled:
        reasons = [link.stalled for link in self.board.links if link.stalled is not None]
        return LinkStalled(
            f"{what}: nothing came of it in {WAIT_SECONDS_MAX:.0f} s; "
            f"{reasons[0] if reasons else 'no site says why, so try again when the machine has less to do'}"
        )
