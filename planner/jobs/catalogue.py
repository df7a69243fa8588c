"""The reader of models.yaml: named jobs, read strictly; an error names the line and the key.

The file maps names to entries. An entry's keys: `source` (SOURCE:NAME or FILE.py:NAME) and `about` (one
sentence with the origin), both required; `args` (constructor keywords), `inputs` (a list of samples such as
3x224x224), `target`, `loss`, `mode`, `optimizer`, `precision`, `lengths`, `steps`,
`batch`.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from planner._support.strict_yaml import Entry, read_entry
from planner.errors import UsageError
from planner.jobs.job import (
    SOURCES,
    CatalogueEntry,
    Lengths,
    Mode,
    Optimizer,
    Precision,
)
from planner.jobs.named_models import check_source, loss_named_in
from planner.jobs.resolve import MAX_STEPS, complete_job, default_job, is_completed_by_library, merge_job
from planner.jobs.yaml_fields import arguments_of, count_of, sample_of, targets_of

MAX_BATCH = 2**31

_REQUIRED = ("source", "about")
_OPTIONAL = (
    "args",
    "inputs",
    "target",
    "loss",
    "mode",
    "optimizer",
    "precision",
    "lengths",
    "steps",
    "batch",
)


def load_catalogue(path: Path | None = None, sources: Collection[str] = SOURCES) -> dict[str, CatalogueEntry]:
    """Read a catalogue, by default the planner's own, whose entries come from these sources.

    Raises `DataFileError`, also for a FILE.py:NAME where "file" is none of the sources: it would run code.
    """
    entries = read_entry(path or _own_path()).mapping()
    return {name: _read_job(name, entry, sources) for name, entry in entries.items()}


def _own_path() -> Path:
    """In an installed package the file lies beside the modules, in a checkout at the repository's root."""
    package = Path(__file__).parent
    installed = package / "models.yaml"
    return installed if installed.exists() else package.parents[1] / "models.yaml"


def _read_job(name: str, entry: Entry, sources: Collection[str]) -> CatalogueEntry:
    if not name or ":" in name or name.endswith(".py"):
        raise entry.broken("a name that --model could take for a source or a file; take another")
    values = entry.children(_REQUIRED, _OPTIONAL)
    fields: dict[str, Any] = {}
    if "loss" in values:
        fields["loss"] = loss_named_in(values["loss"], sources)
    kinds = (("mode", Mode), ("optimizer", Optimizer), ("precision", Precision), ("lengths", Lengths))
    for key, kind in kinds:
        if key in values:
            fields[key] = values[key].choice(list(kind))
    if "args" in values:
        fields["model_args"] = tuple(arguments_of(values["args"]))
    if "inputs" in values:
        fields["inputs"] = tuple(sample_of(item) for item in values["inputs"].items())
    if "target" in values:
        fields |= targets_of(values["target"])
    if "steps" in values:
        fields["steps"] = count_of(values["steps"], MAX_STEPS)
    batch = count_of(values["batch"], MAX_BATCH) if "batch" in values else 1
    job = merge_job(default_job(name, _source(values["source"], sources)), fields)
    if not job.inputs and not is_completed_by_library(job):
        raise entry.broken("missing inputs, for which its source has no default")
    try:
        complete_job(job)
    except UsageError as error:
        raise entry.broken(str(error)) from None
    return CatalogueEntry(job, batch, values["about"].text())


def _source(entry: Entry, sources: Collection[str]) -> str:
    source = entry.text()
    if not check_source(entry, source, sources):
        raise entry.broken(f"SOURCE:NAME or FILE.py:NAME is wanted, not {source!r}")
    return source
