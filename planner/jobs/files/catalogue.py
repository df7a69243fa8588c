"""Read models.yaml, a catalogue of named jobs.

Checks are strict; an error names the line and the key. The file maps names to entries. An entry's keys:
`source` (SOURCE:NAME or FILE.py:NAME) and `about` (one sentence with the origin), both required; `args`
(constructor keywords), `inputs` (a list of samples such as 3x224x224), `batch`, `target` and the options of a
job as the command line names them.
"""

from collections.abc import Collection
from pathlib import Path

from planner._support.strict_yaml import Entry, read_entry
from planner.jobs.files.yaml_fields import parse_entry, read_arguments, read_count, read_options, read_source
from planner.jobs.job import CatalogueEntry
from planner.jobs.options import FIELD_OPTIONS
from planner.jobs.parse import SOURCES
from planner.jobs.resolve import complete_job, default_job, is_completed_by_library, merge_job

MAX_BATCH = 2**31

_REQUIRED = ("source", "about")
_OPTIONAL = ("args", "inputs", "target", *FIELD_OPTIONS, "optimizer_arg", "batch")


def load_catalogue(path: Path | None = None, sources: Collection[str] = SOURCES) -> dict[str, CatalogueEntry]:
    """Read the named jobs of a catalogue file, by default the planner's own models.yaml.

    `sources` are the sources that the file may name. Raises DataFileError, also for a FILE.py:NAME if "file"
    is not an allowed source, since importing the file would run code.
    """
    entries = read_entry(path or _own_path()).mapping()
    return {name: _read_job(name, entry, sources) for name, entry in entries.items()}


def _own_path() -> Path:
    """Return the path of the planner's own models.yaml, in the package or else at the repository's root."""
    package = Path(__file__).parent
    installed = package / "models.yaml"
    return installed if installed.exists() else package.parents[2] / "models.yaml"


def _read_job(name: str, entry: Entry, sources: Collection[str]) -> CatalogueEntry:
    if not name or ":" in name or name.endswith(".py"):
        raise entry.broken("a name that --model could take for a source or a file; take another")
    values = entry.children(_REQUIRED, _OPTIONAL)
    inputs = {"input": values["inputs"]} if "inputs" in values else {}
    options = read_options(values | inputs, sources)
    if "args" in values:
        options["model_args"] = tuple(read_arguments(values["args"]))
    batch = read_count(values["batch"], MAX_BATCH) if "batch" in values else 1
    job = merge_job(default_job(name, _source(values["source"], sources)), options)
    if not job.samples.inputs and not is_completed_by_library(job):
        raise entry.broken("missing inputs, for which its source has no default")
    parse_entry(entry, complete_job, job)
    return CatalogueEntry(job, batch, values["about"].text())


def _source(entry: Entry, sources: Collection[str]) -> str:
    source = entry.text()
    if not read_source(entry, source, sources):
        raise entry.broken(f"expected SOURCE:NAME or FILE.py:NAME, got {source!r}")
    return source
