"""Complete command lines in shells: commands, options, values, GPUs and models.

typer writes the scripts for the shells (`planner --install-completion`), which pass the command line and the
cursor's position in environment variables. typer could answer the scripts too, but not in bash, which ends
words at `:`. This module answers for bash and zsh.
"""

import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from planner.cli.parser import COMMANDS, build_command, find_command

ASKED = "_PLANNER_COMPLETE"  # set by the scripts of typer/_completion_shared.py


@dataclass(frozen=True, slots=True)
class Candidate:
    """A completion for the word at the cursor, with its help text."""

    word: str
    help: str = ""


def answer_shell(environment: Mapping[str, str]) -> str | None:
    """Return the reply to a completion request of bash or zsh, or None without a request.

    typer answers the requests of all other shells.
    """
    match environment.get(ASKED):
        case "complete_bash":
            return _for_bash(environment.get("COMP_WORDS", ""), environment.get("COMP_CWORD", ""))
        case "complete_zsh":
            return _for_zsh(environment.get("_TYPER_COMPLETE_ARGS", ""))
    return None


def _for_bash(line: str, place: str) -> str:
    """Return the completions of the word at the cursor for bash, one per line.

    A prefix that bash treats as separate words is removed.
    """
    parts = _split(line)
    number = int(place) if place.isdigit() else len(parts)
    parts = parts[: number + 1] + [""] * (number + 1 - len(parts))
    words, replaced = [parts[0]], ""  # `replaced`: the prefix of the last word that bash splits off
    for part in parts[1:]:
        joins = part[:1] in (":", "=") or (replaced and words[-1].endswith((":", "=")))
        if joins and len(words) > 1 and words[-1]:
            words[-1] += part
            replaced = words[-1] if part in (":", "=") else replaced
        else:
            words.append(part)
            replaced = ""
    *before, word = words
    prefix = replaced if word.startswith(replaced) else ""
    return "\n".join(candidate.word.removeprefix(prefix) for candidate in candidates(before[1:], word))


def _for_zsh(line: str) -> str:
    """Return zsh code that offers completions of the last word of a command line.

    Without completions, the code completes file names.
    """
    words = _split(line)[1:]
    word = words.pop() if words and not line[-1:].isspace() else ""
    matches = candidates(words, word)
    if not matches:
        return "_files"
    if any(match.help for match in matches):
        entries = (f"{match.word.replace(':', chr(92) + ':')}:{match.help}" for match in matches)
        rows = " ".join(map(shlex.quote, entries))
        return f"local -a matches; matches=({rows}); _describe -V planner matches -U"
    ends = "-S ''" if all(match.word.endswith(":") for match in matches) else ""
    return f"compadd -U {ends} -- {' '.join(shlex.quote(match.word) for match in matches)}"


def _split(line: str) -> list[str]:
    """Split a command line, which may end within quotes, into words."""
    for closing in ("", '"', "'"):
        try:
            return shlex.split(line + closing)
        except ValueError:
            continue
    return line.split()


# ---- candidates


def candidates(before: Sequence[str], word: str) -> list[Candidate]:
    """Return the completions of `word` after the words `before` on a command line of `planner`."""
    if not before:
        commands = [Candidate(name, _summary(find_command(name))) for name in COMMANDS]
        commands += [Candidate(option) for option in ("--install-completion", "--show-completion", "--help")]
        return _beginning(commands, word)
    if before[0] not in COMMANDS:
        return []
    parameters = build_command(before[0]).params
    flags = {flag: each for each in parameters for flag in (*each.opts, *each.secondary_opts) if "-" in flag}
    flag, equals, value = word.partition("=")
    if equals and flag in flags:
        return [Candidate(f"{flag}={each}") for each in _values(before[0], flags[flag].name, value)]
    if before[-1] in flags and not flags[before[-1]].is_flag:
        return [Candidate(each) for each in _values(before[0], flags[before[-1]].name, word)]
    if word.startswith("-"):
        options = [Candidate(flag, each.help) for flag, each in flags.items()]
        return _beginning([*options, Candidate("--help", "Show all options.")], word)
    places = [each.name for each in parameters if each.param_type_name == "argument"]
    return [Candidate(each) for name in places for each in _values(before[0], name, word)]


def _summary(command: Callable[..., object]) -> str:
    return (inspect.getdoc(command) or "").partition("\n")[0]


def _beginning(offered: Sequence[Candidate], word: str) -> list[Candidate]:
    return [candidate for candidate in offered if candidate.word.startswith(word)]


def _values(command: str, field: str, beginning: str) -> list[str]:
    """Return the known values of a parameter that start with `beginning`.

    Returns [] for a parameter without a list of values, such as a file, a number or free text.
    """
    if field == "model":
        from planner.cli.completion.model_names import model_names

        return model_names(beginning)
    if field in ("gpu", "filter") or (command, field) == ("devices", "words"):
        return gpu_names(beginning)
    return [value for value in _choices(command).get(field, ()) if value.startswith(beginning)]


def _choices(command: str) -> dict[str, Sequence[str]]:
    from planner.api import PRICE_SORTS, SORTS
    from planner.jobs import JOB_OPTIONS
    from planner.planning.check import FailOn
    from planner.planning.estimators import Method
    from planner.report import FORMATS

    return {
        **{one.name: [*one.choices, *one.more_words] for one in JOB_OPTIONS if one.choices is not None},
        "method": list(Method),
        "sort": [*SORTS, *PRICE_SORTS] if command == "gpus" else (),
        "alloc_conf": ("expandable_segments:True",),
        "fail_on": list(FailOn),
        "framework": ("torch", "tensorflow"),
        "engine": ("local", "dask"),
        "form": list(FORMATS),
    }


def gpu_names(beginning: str) -> list[str]:
    """Return one name of each GPU that has a name starting with `beginning`.

    Hyphens replace blanks. Case and punctuation are ignored. With an empty `beginning`, only GPUs of NVIDIA
    are returned.
    """
    from planner.hardware import device_key, load_devices, load_other_devices

    key = device_key(beginning)
    names = []
    for device in (*load_devices(), *(load_other_devices() if key else ())):
        spellings = [name for name in (device.name, *device.aliases) if device_key(name).startswith(key)]
        if spellings:
            names.append(min(spellings, key=len).replace(" ", "-") if key else device.name.replace(" ", "-"))
    return names
