"""What may stand at the cursor of a command line: commands, options, and values of options, GPUs, models.

typer writes the scripts for the shells (`planner --install-completion`) and could answer them, with commands
and options alone and after an import of its own. For bash and zsh the answers come from here. Its scripts
tell the command line and the place of the cursor in environment variables.
"""

import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from planner.cli.parse import COMMANDS, find_command
from planner.cli.words import Argument, spellings, words_of

ASKED = "_PLANNER_COMPLETE"  # set by the scripts of typer/_completion_shared.py


@dataclass(frozen=True, slots=True)
class Candidate:
    """A word that may stand there, and what it means."""

    word: str
    help: str = ""


def answer_shell(environment: Mapping[str, str]) -> str | None:
    """The answer to a shell's script; None for shells that are left to typer."""
    match environment.get(ASKED):
        case "complete_bash":
            return _for_bash(environment.get("COMP_WORDS", ""), environment.get("COMP_CWORD", ""))
        case "complete_zsh":
            return _for_zsh(environment.get("_TYPER_COMPLETE_ARGS", ""))
    return None


def _for_bash(line: str, place: str) -> str:
    """One word a line. Bash ends words at `:` and `=` and takes them for words of their own."""
    parts = _split(line)
    number = int(place) if place.isdigit() else len(parts)
    parts = parts[: number + 1] + [""] * (number + 1 - len(parts))
    words, replaced = [parts[0]], ""  # `replaced`: what of the last word bash would put in another place
    for part in parts[1:]:
        joins = part[:1] in (":", "=") or (replaced and words[-1].endswith((":", "=")))
        if joins and len(words) > 1 and words[-1]:
            words[-1] += part
            replaced = words[-1] if part in (":", "=") else replaced
        else:
            words.append(part)
            replaced = ""
    *before, word = words
    kept = replaced if word.startswith(replaced) else ""
    return "\n".join(found.word.removeprefix(kept) for found in candidates(before[1:], word))


def _for_zsh(line: str) -> str:
    """A call of zsh's completion functions, which the script evaluates."""
    words = _split(line)[1:]
    word = words.pop() if words and not line[-1:].isspace() else ""
    found = candidates(words, word)
    if not found:
        return "_files"
    if any(candidate.help for candidate in found):
        told = (f"{one.word.replace(':', chr(92) + ':')}:{one.help}" for one in found)
        return f"local -a found; found=({' '.join(map(shlex.quote, told))}); _describe -V planner found -U"
    ends = "-S ''" if all(candidate.word.endswith(":") for candidate in found) else ""
    return f"compadd -U {ends} -- {' '.join(shlex.quote(candidate.word) for candidate in found)}"


def _split(line: str) -> list[str]:
    """The words of a line that need not be finished: a quote may be open."""
    for closing in ("", '"', "'"):
        try:
            return shlex.split(line + closing)
        except ValueError:
            continue
    return line.split()


# ---- what may stand there


def candidates(before: Sequence[str], word: str) -> list[Candidate]:
    """What may stand in place of `word` after the words of a command line, without `planner` itself."""
    if not before:
        found = [Candidate(name, _summary(find_command(name))) for name in COMMANDS]
        found += [Candidate(option) for option in ("--install-completion", "--show-completion", "--help")]
        return _beginning(found, word)
    if before[0] not in COMMANDS:
        return []
    words = words_of(find_command(before[0]))
    known = spellings(words)
    name, equals, value = word.partition("=")
    if equals and name in known:
        return [Candidate(f"{name}={found}") for found in _values(before[0], known[name][0], value)]
    if before[-1] in known and known[before[-1]][1] is None:
        return [Candidate(found) for found in _values(before[0], known[before[-1]][0], word)]
    if word.startswith("-"):
        options = [Candidate(spelled, words[field][1].help) for spelled, (field, _) in known.items()]
        return _beginning([*options, Candidate("--help", "Show all options.")], word)
    places = [field for field, (_, kind) in words.items() if isinstance(kind, Argument)]
    return [Candidate(found) for field in places for found in _values(before[0], field, word)]


def _summary(command: Callable[..., object]) -> str:
    return (inspect.getdoc(command) or "").partition("\n")[0]


def _beginning(found: Sequence[Candidate], word: str) -> list[Candidate]:
    return [candidate for candidate in found if candidate.word.startswith(word)]


def _values(command: str, field: str, beginning: str) -> list[str]:
    """What a parameter may be; nothing for files, numbers and texts, which the shell completes its way."""
    if field == "model":
        from planner.cli.completion.model_names import model_names

        return model_names(beginning)
    if field in ("gpu", "filter") or (command, field) == ("devices", "words"):
        return gpu_names(beginning)
    return [value for value in _choices(command).get(field, ()) if value.startswith(beginning)]


def _choices(command: str) -> dict[str, Sequence[str]]:
    from planner import jobs
    from planner.api import SORTS
    from planner.planning.estimators import Method

    enums: dict[str, type[StrEnum]] = {
        "mode": jobs.Mode,
        "loss": jobs.Loss,
        "optimizer": jobs.Optimizer,
        "optimizer_impl": jobs.OptimizerImpl,
        "precision": jobs.Precision,
        "memory_format": jobs.MemoryFormat,
        "checkpoint": jobs.Checkpoint,
        "clip_gradients": jobs.ClipGradients,
        "lengths": jobs.Lengths,
        "zero_grad": jobs.ZeroGrad,
        "method": Method,
    }
    choices: dict[str, Sequence[str]] = {
        field: [str(value) for value in kind] for field, kind in enums.items()
    }
    return choices | {
        "sort": list(SORTS) if command == "gpus" else (),
        "alloc_conf": ("expandable_segments:True",),
    }


def gpu_names(beginning: str) -> list[str]:
    """One spelling of each card that begins so, without blanks; case and punctuation do not matter."""
    from planner.hardware import device_key, load_devices

    wanted = device_key(beginning)
    found = []
    for device in load_devices():
        known = [name for name in (device.name, *device.aliases) if device_key(name).startswith(wanted)]
        if known:
            found.append(min(known, key=len).replace(" ", "-") if wanted else device.name.replace(" ", "-"))
    return found
