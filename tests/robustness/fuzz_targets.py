"""A coverage-guided fuzzer of all readers: python -m tests.robustness.fuzz_targets [-max_total_time=SECONDS]
[FOLDER].

The first byte of an input chooses the reader, the rest is its file. Needs atheris (the extra `fuzz`).
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import atheris

with atheris.instrument_imports(include=["planner", "calibration"]):
    from tests.helpers.file_readers import READERS

from planner.errors import PlannerError

_NAMES = list(READERS)


def main() -> None:
    """Fuzz until stopped; a finding ends the process with its traceback."""
    with TemporaryDirectory() as seeds, TemporaryDirectory() as folder:
        for index, reader in enumerate(READERS.values()):
            (Path(seeds) / str(index)).write_bytes(bytes([index]) + reader.valid)

        def test_one(data: bytes) -> None:
            reader = READERS[_NAMES[data[0] % len(_NAMES)]] if data else READERS["sweep"]
            path = Path(folder) / reader.name
            path.write_bytes(reader.pack(data[1:]))
            try:
                reader.load(path)
            except PlannerError as error:
                if len(str(error).splitlines()) != 1:
                    raise RuntimeError(f"not one line: {error}") from error
            finally:
                for left in Path(folder).iterdir():
                    left.unlink()

        atheris.Setup([*sys.argv, seeds], test_one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
