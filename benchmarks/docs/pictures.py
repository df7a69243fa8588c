"""The pictures of README and docs: terminal, all GPUs, the timeline, the page. `--out` takes another folder.

The page is photographed in Chromium by playwright.
"""

import argparse
import re
import tempfile
from io import StringIO
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import TerminalTheme

import planner
from planner.api.explain import batch_curve

DOCS = Path(__file__).parents[2] / "docs"
# Black on white, so that it can be printed; the colours of the verdicts by Okabe and Ito.
PAPER = TerminalTheme(
    (255, 255, 255),
    (31, 35, 40),
    [
        *((31, 35, 40), (190, 65, 0), (0, 120, 80), (150, 100, 0)),
        *((0, 90, 160), (150, 70, 120), (0, 110, 150), (90, 98, 108)),
    ],
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DOCS)
    out = parser.parse_args().out
    result = planner.max_batch("vit_b_16", gpu_mib=24_000)
    draw_terminal(result, "planner max-batch --model vit_b_16 --gpu-mib 24000", out / "terminal.svg")
    planner.gpus("vit_b_16").draw(out / "gpus.png")
    planner.explain("resnet50", 64, top=4, depth=1).draw(out / "explain.png")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        planner.explain("resnet50", 64, gpu="RTX 4090").save_page(
            page, batch_curve("resnet50", 64, gpu="RTX 4090")
        )
        photograph(page, out / "page.png", (1100, 2990))


def draw_terminal(result: object, command: str, path: Path) -> None:
    """Draw a report as on a terminal of 100 columns, without the fonts that rich would fetch."""
    console = Console(
        file=StringIO(), record=True, width=100, force_terminal=True, color_system="truecolor",
        highlight=False, markup=False, emoji=False,
    )  # fmt: skip
    console.print(result)
    drawn = console.export_svg(title=command, theme=PAPER, unique_id="planner")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    path.write_text(drawn.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas"), encoding="utf-8")


def photograph(file: Path, path: Path, size: tuple[int, int]) -> None:
    """Take a picture of a page in Chromium."""
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": size[0], "height": size[1]})
        page.goto(file.resolve().as_uri())
        page.wait_for_timeout(1500)
        page.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    main()
