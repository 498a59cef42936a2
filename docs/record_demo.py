"""Make docs/demo.svg: run the demo, and draw what a terminal shows of it.

    .venv/bin/python docs/record_demo.py [FILE]

It takes as long as the demo does, and needs nothing that the demo does not need.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from floodmark.cli.demo.stage import Stage
from floodmark.cli.demo.story import perform

PICTURE: Final = Path(__file__).with_name("demo.svg")
COLUMNS: Final = 100

THEME: Final = TerminalTheme(
    (13, 17, 23),
    (201, 209, 217),
    [
        (72, 79, 88),
        (255, 123, 114),
        (86, 211, 100),
        (210, 153, 34),
        (88, 166, 255),
        (188, 140, 255),
        (86, 194, 214),
        (177, 186, 196),
    ],
)

# Rich's own frame names a font on the web; a picture in a repository should need nothing from elsewhere.
FRAME: Final = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg"
     xml:space="preserve">
<style>
.{unique_id}-matrix {{
    font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
    font-size: {char_height}px;
    line-height: {line_height}px;
    font-variant-east-asian: full-width;
}}
.{unique_id}-title {{
    font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
    font-size: 16px;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main(picture: Path) -> int:
    """Record a run; 0 if all that it claimed held."""
    console = Console(record=True, force_terminal=True, width=COLUMNS, highlight=False, soft_wrap=True)
    stage = Stage(console, unicode=True, live=False)
    with TemporaryDirectory(prefix="floodmark-demo-") as home:
        perform(stage, Path(home), kept=False)
    if not stage.passed:
        print("a check failed, so there is no new picture", file=sys.stderr)
        return 1
    console.save_svg(str(picture), title="floodmark demo", theme=THEME, code_format=FRAME, unique_id="demo")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE))
