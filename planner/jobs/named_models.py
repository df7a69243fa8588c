"""Models that a data file names: any of a registered source, and code of a FILE.py only where allowed.

A file that somebody sent may be read without a thought, because nothing that it names is ever executed. Code
runs only if the user named it on the command line, or allowed the file to name it with --allow-code.
"""

from collections.abc import Collection, Mapping
from typing import Unpack

from planner._support.strict_yaml import Entry
from planner.errors import UsageError
from planner.jobs.job import SOURCES, CatalogueEntry, Job, is_code, parse_loss, split_model
from planner.jobs.resolve import JobOptions, resolve_job

FILE = "file"  # what `split_model` calls a FILE.py:NAME
ANY_SOURCE = (*SOURCES, FILE)  # for --allow-code


def allowed_sources(options: Mapping[str, object]) -> Collection[str]:
    """The sources that data files may name, by the option `allow_code`."""
    return ANY_SOURCE if options.get("allow_code") else SOURCES


def check_source(item: Entry, model: str, sources: Collection[str]) -> str:
    """The source of a model that a file names, "" for a name of the catalogue. Raises DataFileError."""
    try:
        source = split_model(model).source
    except UsageError as error:
        raise item.broken(str(error)) from None
    if source == FILE and FILE not in sources:
        raise item.broken(f"{model!r} would run code; --allow-code lets files name code that you trust")
    return source


def loss_named_in(item: Entry, sources: Collection[str]) -> str:
    """The loss that a file names. Raises DataFileError, also where it would run code that is not allowed."""
    text = item.text()
    try:
        loss = parse_loss(text)
    except UsageError as error:
        raise item.broken(str(error).removeprefix("--loss: ")) from None
    if is_code(loss) and FILE not in sources:
        raise item.broken(f"{text!r} would run code; --allow-code lets files name code that you trust")
    return text


def job_named_in(
    item: Entry,
    catalogue: Mapping[str, CatalogueEntry],
    sources: Collection[str] = SOURCES,
    **options: Unpack[JobOptions],
) -> Job:
    """The job of a model that a file names. Raises DataFileError with file, line and key."""
    name = item.text()
    check_source(item, name, sources)
    try:
        return resolve_job(name, catalogue, **options)
    except UsageError as error:
        raise item.broken(str(error)) from None
