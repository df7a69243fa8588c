"""Make programs of one job at many sizes of its samples, from runs at a few sizes.

Programs at some sizes are fitted to formulas in the size, as two runs are fitted to lines in the batch size.
Only programs with the same events and kernels have common formulas. Events and kernels mostly depend on the
power of two that divides the size (its order), since attention pads rows that are not aligned. So two sizes
of each order are captured. If their programs have the same structure, other sizes of the order are assumed to
have it too; otherwise, or if no formula holds, the size itself is captured. Two further runs for each
dimension of the size, at sizes and a batch size to which no formula was fitted, validate the formulas.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from planner.capture.symbolic.builder import ProgramBuilder, open_builder, with_target
from planner.capture.symbolic.kernel_calls import KernelSignature
from planner.capture.symbolic.rules import SignatureRules
from planner.capture.symbolic.size_formulas import Formula, FormulaFit, Size, values_at
from planner.errors import UsageError
from planner.jobs import Job
from planner.program import (
    FIT_BATCHES,
    AffineAlloc,
    Free,
    NotAffineError,
    OnProgress,
    Program,
    ProgramEvent,
    Target,
)

FEW_SIZES = 10  # up to this many sizes are all captured
HIGHEST_ORDER = 6  # order of all sizes that 64 divides
HIGHEST_OF_TWO = 4  # order of all sizes that 16 divides, if samples have two or more sizes
POINTS = 5  # a family is fitted to at least this many sizes: formulas have up to three terms
MOST_POINTS = 16  # a family captures up to this many sizes for each dimension of the size
MOST_CAPTURED = 100  # most captured sizes if samples have several sizes
VALIDATED_BATCH = 7


class _Family(Struct, frozen=True):
    """Formulas for programs that have the same events and kernels at different sizes."""

    program: Program  # a program at one size, whose structure the others have
    events: tuple[tuple[Formula, Formula] | None, ...]  # fixed and per-sample bytes; None if no allocation
    signatures: tuple[KernelSignature, ...]  # with numbers replaced by formulas
    of_call: tuple[int, ...]  # index of each call's signature


@dataclass(slots=True)
class SizeFamily:
    """The programs of a job at all needed sizes of its samples, for GPUs of one compute capability."""

    open_builder: Callable[[Size], ProgramBuilder]
    sizes: tuple[Size, ...]  # needed sizes, ascending; if in several ranges, a selection with the largest
    target: Target
    only_batch: int = 0  # the only batch size for which programs are made; 0 if for all batch sizes
    builders: dict[Size, ProgramBuilder] = field(default_factory=dict)
    captured: dict[Size, Program | None] = field(default_factory=dict)
    _formed: dict[Size, Program] = field(default_factory=dict)  # programs from formulas
    _structures: dict[Size, Hashable] = field(default_factory=dict)  # structures of captured programs
    _families: dict[Hashable, _Family | None] = field(default_factory=dict)
    _max_batch: int = 0  # largest validated batch size at the largest size
    _is_open: bool = False

    def program(self, size: Size) -> Program | None:
        """Return the program at a size, or None if each batch size needs a run of the model.

        Raises the errors of a capture.
        """
        self._open()
        if size not in self.captured and size not in self._formed:
            fitted = self._fitted(size)
            if fitted is None:
                self._capture(size)
            else:
                self._formed[size] = fitted
        program = self._formed.get(size) or self.captured[size]
        if program is not None and isinstance(program.rules, SignatureRules) and self._max_batch:
            least = self.only_batch or FIT_BATCHES[0]
            most = self.only_batch or max(least, self._max_batch * prod(self.sizes[-1]) // prod(size))
            with_target(program, self.target, least, most)
        return program

    def builder(self, size: Size) -> ProgramBuilder:
        """Return the builder of programs at a size, opened at the first call."""
        if size not in self.builders:
            self.builders[size] = self.open_builder(size)
        return self.builders[size]

    # ---- which sizes are captured

    def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        largest = self._programs(self.sizes[-1])
        if largest:
            self._add(self.sizes[-1], largest[0])
            self._max_batch = largest[0].targets[self.target.capability].max_batch
        if len(self.sizes) <= FEW_SIZES or len(self.sizes[-1]) > 2 or not largest:
            return
        by_order: dict[Size, list[Size]] = {}
        for size in self.sizes:
            by_order.setdefault(_order(size), []).append(size)
        for order, sizes in by_order.items():
            self._capture(sizes[-1])
            number = sum(place * power for place, power in enumerate(order, 1))
            self._capture(sizes[len(sizes) * (2 * number % 7) // 7])  # positions differ between orders
        for key, alike in self._alike().items():
            self._families[key] = self._fit(alike)
        self._validate()

    def _programs(self, size: Size) -> tuple[Program, ...]:
        """Return the validated programs at a size, or () if no program fits the runs.

        With `only_batch`, return the program of one run at that batch size.
        """
        if self.only_batch:
            return (self.builder(size).run(self.only_batch, self.target),)
        return self.builder(size).programs(self.target)

    def _capture(self, size: Size) -> None:
        if size not in self.captured:
            if len(size) > 1 and len(self.captured) >= MOST_CAPTURED:
                raise UsageError(
                    f"--input: no formula gives the memory at all sizes, and more than {MOST_CAPTURED} are "
                    "needed; pad them to a multiple, such as --pad-to 32"
                )
            builder = self.builder(size)
            is_any = not self.only_batch
            self._add(size, builder.fit(self.target) if is_any else self._programs(size)[0])

    def _add(self, size: Size, program: Program | None) -> None:
        self.captured[size] = program
        self._structures[size] = hash(_structure(program)) if program and _can_be_fitted(program) else None

    def _alike(self) -> dict[Hashable, list[Size]]:
        """Return the captured sizes that formulas may fit, by the structure of their programs."""
        found: dict[Hashable, list[Size]] = {}
        for size, structure in sorted(self._structures.items()):
            if structure is not None:
                found.setdefault(structure, []).append(size)
        return found

    def _fitted(self, size: Size) -> Program | None:
        """Return the program that formulas give at a size, or None if the size must be captured."""
        order = _order(size)
        found = {structure for known, structure in self._structures.items() if _order(known) == order}
        family = self._families.get(found.pop()) if len(found) == 1 else None
        if family is None:
            return None
        return _program_at(family, size, self.builder(size).job, self.target)

    def _fit(self, alike: Sequence[Size]) -> _Family | None:
        """Fit formulas to programs of equal structure, capturing further sizes, or return None if none fits.

        `alike` are the sizes of the programs. Further sizes are captured until equally simple formulas agree
        at all remaining sizes, or `MOST_POINTS` sizes for each dimension of the size are captured. None is
        also returned if a further size has another structure, or if all sizes are captured first.
        """
        orders, known = {_order(size) for size in alike}, list(alike)
        while True:
            others = [size for size in self.sizes if _order(size) in orders and size not in self.captured]
            doubtful = next(iter(_spread(others, 1)), None)
            if len(known) >= POINTS:
                fit = FormulaFit(known)
                try:
                    family = _fit(fit, [p for size in known if (p := self.captured[size]) is not None])
                except NotAffineError:
                    return None
                doubtful = fit.most_doubtful(others)
                if doubtful is None or len(known) >= MOST_POINTS * len(known[0]):
                    return family
            if doubtful is None:  # all sizes are captured
                return None
            self._capture(doubtful)
            if self._structures[doubtful] != self._structures[known[0]]:
                return None
            known.append(doubtful)

    def _validate(self) -> None:
        """Run the model at a few sizes that are not captured, and drop all formulas if a run differs."""
        unseen = [size for size in self.sizes if size not in self.captured]
        for size in _spread(unseen, 2 * len(self.sizes[-1])):
            program = self._fitted(size)
            batch = self.only_batch or VALIDATED_BATCH
            if program is not None and self.builder(size).divergence(program, batch, self.target):
                self._families.clear()
                return


def _order(size: Size) -> Size:
    """Return, for each dimension of a size, how often two divides it, up to a limit."""
    highest = HIGHEST_ORDER if len(size) == 1 else HIGHEST_OF_TWO
    return tuple(min(highest, (one & -one).bit_length() - 1) for one in size)


def _spread(sizes: Sequence[Size], count: int) -> Iterable[Size]:
    """Return `count` evenly spread sizes, or all sizes if there are at most `count`."""
    if len(sizes) <= count:
        return sizes
    return [sizes[(2 * number + 1) * len(sizes) // (2 * count)] for number in range(count)]


# ---- programs of one structure


def _can_be_fitted(program: Program) -> bool:
    """Return whether a program has rules, no pinned memory, and a unit of one sample, as formulas need."""
    return isinstance(program.rules, SignatureRules) and not program.pinned and program.unit == 1


def _structure(program: Program) -> Hashable:
    """Return a program's events and kernel calls without their sizes.

    Blocks are numbered in the order of their allocation.
    """
    blocks: dict[int, int] = {}
    events: list[Hashable] = []
    for event in program.events:
        if isinstance(event, AffineAlloc):
            blocks[event.block] = len(blocks)
            events.append((event.category, program.sites[event.site], event.may_fail))
        elif isinstance(event, Free):
            events.append((blocks[event.block], event.empties_cache))
        else:
            events.append(event)
    rules = program.rules
    assert isinstance(rules, SignatureRules)
    calls = (
        (program.sites[c.site], c.position, c.outputs, c.first_blas_call, rules.signatures[c.signature][0])
        for c in program.calls
    )
    return tuple(events), tuple(calls)


def _fit(fit: FormulaFit, programs: Sequence[Program]) -> _Family:
    """Return a `_Family` of formulas fitted to programs of equal structure.

    Raises NotAffineError if a number has no formula.
    """
    events: list[tuple[Formula, Formula] | None] = []
    for of_each in zip(*(program.events for program in programs), strict=True):
        allocs = [event for event in of_each if isinstance(event, AffineAlloc)]
        if allocs:
            fixed = fit.fit(tuple(event.fixed_bytes for event in allocs))
            events.append((fixed, fit.fit(tuple(event.bytes_per_sample for event in allocs))))
        else:
            events.append(None)
    numbers: dict[tuple[int, ...], int] = {}
    signatures: list[KernelSignature] = []
    of_call: list[int] = []
    for calls in zip(*(program.calls for program in programs), strict=True):
        key = tuple(call.signature for call in calls)
        if key not in numbers:
            numbers[key] = len(signatures)
            each = [_signatures(program)[number] for program, number in zip(programs, key, strict=True)]
            _, args, out = (fit.fit_values(column) for column in zip(*each, strict=True))
            signatures.append((each[0][0], args, out))
        of_call.append(numbers[key])
    return _Family(programs[-1], tuple(events), tuple(signatures), tuple(of_call))


def _signatures(program: Program) -> tuple[KernelSignature, ...]:
    assert isinstance(program.rules, SignatureRules)
    return program.rules.signatures


def _program_at(family: _Family, size: Size, job: Job, target: Target) -> Program:
    base = family.program
    bytes_of: dict[int, int] = {}

    def at(formula: Formula) -> int:
        if id(formula) not in bytes_of:
            bytes_of[id(formula)] = formula.at(size)
        return bytes_of[id(formula)]

    events: list[ProgramEvent] = []
    for event, formulas in zip(base.events, family.events, strict=True):
        if formulas is None:
            events.append(event)
        else:
            assert isinstance(event, AffineAlloc)
            fixed, slope = map(at, formulas)
            events.append(replace(event, fixed_bytes=fixed, bytes_per_sample=slope))
    signatures = tuple(
        (func, values_at(args, size), values_at(out, size)) for func, args, out in family.signatures
    )
    calls = tuple(
        replace(call, signature=number) for call, number in zip(base.calls, family.of_call, strict=True)
    )
    program = Program(
        tuple(events),
        base.sites,
        calls,
        unknown_ops=base.unknown_ops,
        notes=base.notes,
        facts=base.facts,
        growth_sources=base.growth_sources,
        torch=base.torch,
        rules=SignatureRules(job, signatures),
    )
    return with_target(program, target, FIT_BATCHES[0], FIT_BATCHES[1])


def open_size_family(
    job_at: Callable[[Size], Job],
    sizes: Sequence[Size],
    target: Target,
    on_progress: OnProgress,
    constructor: Callable[..., object] | None = None,
    only_batch: int = 0,
) -> SizeFamily:
    """Return the family of a job's programs at several sizes of its samples.

    `job_at` makes the job for a size. With `only_batch`, programs are made for that batch size alone. The
    library of the job's model is imported when a size is first captured. Calls that capture a size raise
    UsageError or ModelError.
    """

    def open_at(size: Size) -> ProgramBuilder:
        return open_builder(
            job_at(size), lambda line: on_progress(f"{line}, size {'x'.join(map(str, size))}"), constructor
        )

    return SizeFamily(open_at, tuple(sizes), target, only_batch)
