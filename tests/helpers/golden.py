"""Expected outputs in files under tests/golden, which `--record-golden` writes again."""

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "golden"
_recording: list[bool] = []


def record_golden() -> None:
    """Write each golden file with the output that it is compared to, from now on."""
    _recording.append(True)


def expected(name: str, output: str) -> str:
    """Return the content of a golden file; if golden files are recorded, write the output into it first."""
    path = FOLDER / name
    if _recording:
        path.write_text(output, encoding="utf-8")
    return path.read_text(encoding="utf-8")
