"""Stored answers of cuDNN, for machines without cuDNN.

The answers are for the convolutions of common models. The file holds the answers of one version of cuDNN: for
each convolution the workspace as a piecewise linear function of the batch size, for some GPUs, types and
memory layouts. `tools/store_convolutions.py` writes it. A convolution that is not stored takes the median
answer of the three most similar convolutions, scaled by the elements of input, output and weight.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from planner.hardware.cudnn.answers_file import (
    ANSWERS_FILE,
    AnswersFile,
    Kind,
    StoredGpus,
    open_answers,
)
from planner.hardware.cudnn.curves import Curve, value_at
from planner.hardware.cudnn.keys import key_of
from planner.hardware.cudnn.similar import Candidate, Similar, candidates_of, family_of, find_similar
from planner.program import Capability, Convolution, ConvWorkspaceSource, WorkspaceAccount, Workspaces

FAR = 2  # sum of doublings that convolutions over images of another size than the stored size hardly exceed


class Own(NamedTuple):
    """The stored answer for a convolution: its workspace at any batch size."""

    curve: Curve

    def at(self, batch: int) -> int:
        """Return the workspace in bytes at a batch size."""
        return value_at(self.curve, batch)


class Borrowed(NamedTuple):
    """The answer for a convolution that is not stored, derived from similar convolutions."""

    lenders: tuple[tuple[Curve, Similar], ...]

    @property
    def distance(self) -> float:
        """Return the largest size difference from a similar convolution, in doublings over all dimensions."""
        return max(similar.distance for _, similar in self.lenders)

    def at(self, batch: int) -> int:
        """Return the median of similar convolutions' workspaces in bytes, each scaled to this convolution."""
        return round(median(value_at(curve, batch) * one.factor(batch) for curve, one in self.lenders))


@dataclass(frozen=True)
class StoredKeys:
    """The keys of the stored convolutions of one type and layout, which are the same for all GPUs."""

    places: Mapping[str, int]  # the index of each key
    _families: dict[str, list[Candidate]] = field(default_factory=dict)  # as far as they were needed

    def family(self, family: str) -> list[Candidate]:
        """Return the stored convolutions of a family, computed once."""
        if family not in self._families:
            self._families[family] = candidates_of(family, self.places)
        return self._families[family]


@dataclass(frozen=True)
class Answers:
    """The stored workspace curves of one data type and layout on one group of GPUs."""

    cudnn: str
    gpus: StoredGpus  # the GPUs that the answers are for
    keys: StoredKeys
    curves: Sequence[Curve | None]
    _families: dict[str, list[Candidate]] = field(default_factory=dict)  # only convolutions with a curve
    _borrowed: dict[str, Borrowed | None] = field(default_factory=dict)  # by key

    def find(self, key: str) -> Curve | None:
        """Return the workspace curve for a key, or None if no curve is stored."""
        place = self.keys.places.get(key)
        return None if place is None else self.curves[place]

    def find_similar(self, key: str) -> Borrowed | None:
        """Return an answer derived from the most similar stored convolutions, or None if none is similar."""
        if key not in self._borrowed:
            self._borrowed[key] = self._borrow(key)
        return self._borrowed[key]

    def _borrow(self, key: str) -> Borrowed | None:
        family = family_of(key)
        if family not in self._families:
            of_family = self.keys.family(family)
            self._families[family] = [one for one in of_family if self.curves[one.place] is not None]
        found = ((self.curves[one.place], one) for one in find_similar(key, self._families[family]))
        lenders = tuple((curve, one) for curve, one in found if curve is not None)
        return Borrowed(lenders) if lenders else None


@dataclass(slots=True)
class _Answered:
    """The convolutions looked up for one kind of GPU, and how they were answered."""

    elements: dict[str, int] = field(default_factory=dict)  # by key, of input and output of a sample
    similar: dict[str, float] = field(default_factory=dict)  # by key, distance to the farthest lender
    unknown: set[str] = field(default_factory=set)  # keys without an answer
    cudnn: str = ""  # the version that answered
    other: StoredGpus | None = None  # the GPUs whose answers are taken, if not this kind's own

    @property
    def is_uncounted(self) -> bool:
        """Return whether no convolution that was looked up has an answer."""
        return self.unknown == self.elements.keys()

    @property
    def far(self) -> list[str]:
        """Return the keys of the convolutions whose answers come from much larger or smaller convolutions."""
        return [key for key, distance in self.similar.items() if distance > FAR]

    def share(self, keys: Iterable[str]) -> float:
        """Return the share of the convolutions `keys` in all convolutions looked up, weighted by elements.

        Each distinct convolution counts once. The elements of a convolution are the elements of its input and
        output for one sample.
        """
        some = sum(self.elements[key] for key in keys)
        return some / sum(self.elements.values()) if some else 0.0


class StoredWorkspaces:
    """A source of convolution workspaces that looks them up in the stored answers."""

    name = "stored"

    def __init__(self, *, benchmark: bool, path: Path = ANSWERS_FILE) -> None:
        self._benchmark, self._path = benchmark, path
        self._found: dict[tuple[Any, ...], Own | Borrowed] = {}
        self._answered: defaultdict[tuple[Capability, int], _Answered] = defaultdict(_Answered)

    def __call__(self, capability: Capability, sm_count: int, convolution: Convolution) -> Workspaces:
        """Return the workspace of a convolution, or 0 bytes if there is no answer.

        A stored answer is preferred to an answer from similar convolutions.
        """
        one = convolution  # by all but its batch size
        key = (
            *(capability, sm_count, one.dtype, one.channels_last, one.direction, one.x[1:], one.w),
            *(one.padding, one.stride, one.dilation),
        )
        if key not in self._found:
            self._found[key] = self._find(capability, sm_count, convolution)
        return Workspaces(self._found[key].at(convolution.x[0]))

    def following(
        self, capability: Capability, sm_count: int, convolution: Convolution, size_bytes: int
    ) -> tuple[int, ...] | None:
        """Return None: the workspace that follows a refused workspace is not known."""
        return None

    def account(self, capability: Capability, sm_count: int) -> WorkspaceAccount:
        """Return an account of the answers given for a GPU so far: exact, approximate or missing.

        Notes are included. Answers are approximate if some come from similar convolutions or other GPUs, or
        with `benchmark`.
        """
        answered = self._answered[capability, sm_count]
        exact = not answered.similar and not self._benchmark and answered.other is None
        source = ConvWorkspaceSource.STORED if exact else ConvWorkspaceSource.SIMILAR
        if answered.is_uncounted:
            source = ConvWorkspaceSource.UNCOUNTED
        shares = answered.share(answered.unknown), answered.share(answered.far)
        return WorkspaceAccount(source, *shares, notes=tuple(self._notes(answered)))

    def _notes(self, answered: _Answered) -> Iterator[str]:
        """Yield notes on the source of the answers, and on uncertain or missing answers."""
        count = len(answered.elements)
        note = f"convolutions take the workspaces that cuDNN {answered.cudnn} requests, by stored answers"
        if answered.other is not None:
            note += f" for {answered.other}"
        if answered.similar:
            farthest = 2 ** max(answered.similar.values())
            note += (
                f"; {len(answered.similar)} of {count} are not among them and borrow those of similar "
                f"ones, whose channels and extents differ by a factor of up to {farthest:,.1f} in all (with "
                "an installed cuDNN, such as that of torch for CUDA, it is queried instead)"
            )
        if not answered.is_uncounted:
            yield note
        if answered.far:
            yield (
                f"where retries begin is uncertain: {len(answered.far)} of {count} convolutions borrow from "
                "much larger or smaller ones, and may ask for several times as much or as little"
            )
        if answered.unknown:
            yield f"no workspace is counted for {len(answered.unknown)} of {count} convolutions"
        if self._benchmark:
            yield "stored answers lack the engines that cudnn.benchmark times; an installed cuDNN names them"

    def _find(self, capability: Capability, sm_count: int, convolution: Convolution) -> Own | Borrowed:
        key, answered = key_of(convolution), self._answered[capability, sm_count]
        answers = stored_answers(
            *(capability, sm_count, convolution.dtype),
            channels_last=convolution.channels_last,
            path=self._path,
        )
        answered.elements[key] = prod(convolution.x[1:]) + prod(convolution.y[1:])
        if answers is None:
            answered.unknown.add(key)
            return NOTHING
        answered.cudnn = answers.cudnn
        if not answers.gpus.has_answer(capability, sm_count):
            answered.other = answers.gpus
        curve = answers.find(key)
        if curve is not None:
            return Own(curve)
        borrowed = answers.find_similar(key)
        if borrowed is None:
            answered.unknown.add(key)
            return NOTHING
        answered.similar[key] = borrowed.distance
        return borrowed


NOTHING = Own(((1,), (0,)))


def stored_answers(
    capability: Capability, sm_count: int, dtype: str, *, channels_last: bool, path: Path = ANSWERS_FILE
) -> Answers | None:
    """Return the answers for a type and layout on the nearest stored GPUs, or None if none are stored.

    The nearest GPUs have the capability, else the next lower stored capability, else the lowest; and of the
    GPUs with that capability the nearest number of multiprocessors, if it matters. Answers for float16 are
    also used for bfloat16, which cuDNN mostly answers alike. Raises DataFileError.
    """
    file = _opened(path)
    kind = Kind("float16" if dtype == "bfloat16" else dtype, channels_last)
    stored = file.gpus(kind)
    if not stored:
        return None
    nearest = max((one.capability for one in stored if one.capability <= capability), default=stored[0][0])
    alike = [one for one in stored if one.capability == nearest]
    gpus = min(alike, key=lambda one: abs((one.sm_count or sm_count) - sm_count))
    return _answers(path, kind, gpus)


@cache
def _answers(path: Path, kind: Kind, gpus: StoredGpus) -> Answers:
    file = _opened(path)
    return Answers(file.cudnn, gpus, _stored_keys(path, kind), file.curves(kind, gpus))


@cache
def _stored_keys(path: Path, kind: Kind) -> StoredKeys:
    return StoredKeys({key: place for place, key in enumerate(_opened(path).keys(kind))})


@cache
def _opened(path: Path) -> AnswersFile:
    return open_answers(path)
