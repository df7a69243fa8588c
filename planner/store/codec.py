"""Encode programs as files of compressed JSON, and decode them.

Decoding checks strictly and executes no code. `kind` is a string with one letter per event: a for an
allocation, f for a free, e for a free after which the cache is emptied, m for the start of a phase. `alloc`,
`free`, `mark` and `sites` have one column for each field. A file also contains the job, so that plans can be
made from it alone: `traces` has the tensor events of each program, `loops` its kernel calls and the variants
of their workspaces, with the convolutions whose workspaces a library reports.
"""

import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from planner._support.atomic_write import save
from planner._support.gzip_text import pack, read_packed
from planner.errors import DataFileError
from planner.program import (
    AffineAlloc,
    Capability,
    ConvolutionExpr,
    ConvWorkspace,
    Free,
    GrowthSource,
    Guard,
    GuardedOps,
    KernelCall,
    OpExpr,
    OpKind,
    PhaseStart,
    Program,
    ProgramEvent,
    Site,
    TensorProvenance,
    Variants,
    validate_ops,
    validate_program,
)
from planner.store.layout import (
    About,
    AllocColumns,
    AnyDocument,
    CallColumns,
    ConvolutionArray,
    ConvolutionColumns,
    EventsObject,
    FreeColumns,
    GrowthColumns,
    KernelsObject,
    PhaseColumns,
    ProgramDocument,
    ProvenanceColumns,
    SiteColumns,
    TargetObject,
    VariantArray,
)

LARGEST_FILE_BYTES = 2**26  # decompressed; a Llama of 70 B takes 2 * 10**6; decoded it takes 20 times as much
FORMAT = 1
# Limits for a program from a file, so that the program specializes in seconds: events of its kernels, and
# nodes to evaluate. BERT's three steps have some 10**4 events and 500 nodes.
MOST_KERNEL_EVENTS = 2**24
MOST_NODES = 2**20


class EncodedProgram(Struct, frozen=True):
    """A program from a file; its kernel variants are decoded on demand."""

    program: Program
    kernels: KernelsObject

    def load_target(self, capability: Capability) -> bool:
        """Decode the variants for a compute capability into `program`; return False if the file lacks them.

        Raises ValueError, LookupError or TypeError for broken variants.
        """
        if capability in self.program.targets:
            return True
        chip = self.kernels.chips.get(_name(capability))
        if chip is not None:
            self.program.targets[capability] = _variants(self.program, self.kernels, chip)
        return chip is not None


class ProgramFile(Struct, frozen=True):
    """The programs of a file, and all other data of the file (`about`)."""

    programs: tuple[EncodedProgram, ...]
    about: About


def save_programs(programs: Sequence[Program], path: Path, about: About) -> None:
    """Write programs, and the JSON data `about` them, to a file.

    The write is atomic, and equal programs give equal files. Raises DataFileError.
    """
    save(path, pack(msgspec.json.encode(_document(programs, about)).decode()), "the trace")


def load_programs(path: Path) -> ProgramFile:
    """Read a file that `save_programs` wrote. Raises DataFileError."""
    try:
        return _decode(read_packed(path, LARGEST_FILE_BYTES))
    except OSError as error:
        raise DataFileError(f"{path}: cannot read the trace: {error.strerror or error}") from error
    except (ValueError, LookupError, RecursionError, zlib.error) as error:
        raise DataFileError(f"{path}: broken trace file: {str(error)[:200]}; capture it again") from error


# ---- decoding


def _decode(content: bytes) -> ProgramFile:
    version = msgspec.json.decode(content, type=AnyDocument).format
    if version != FORMAT:
        raise ValueError(f"its format is {version}, this version reads {FORMAT}")
    file = msgspec.json.decode(content, type=ProgramDocument)
    pairs = zip(file.traces, file.loops, strict=True)
    return ProgramFile(tuple(_encoded(events, kernels) for events, kernels in pairs), file.about)


def _encoded(events: EventsObject, kernels: KernelsObject) -> EncodedProgram:
    program = Program(
        tuple(_decode_events(events)),
        tuple(Site(*row) for row in _rows(events.sites)),
        tuple(_decode_calls(kernels)),
        unknown_ops=tuple(events.unknown_ops),
        notes=tuple(events.notes),
        facts=frozenset(events.facts),
        provenance=tuple(TensorProvenance(*row) for row in _rows(events.details)),
        conv_workspaces=tuple(ConvWorkspace(*row) for row in _rows(events.asked)),
        growth_sources=tuple(GrowthSource(*row) for row in _rows(events.growth_sources)),
        pinned=tuple((fixed, per_sample) for fixed, per_sample in events.pinned),
        unit=events.unit,
    )
    validate_program(program, events.batches)
    return EncodedProgram(program, kernels)


def _rows(columns: Struct | None) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table that is stored by columns, or nothing if `columns` is None.

    Raises ValueError if the columns differ in length.
    """
    return iter(()) if columns is None else zip(*msgspec.structs.astuple(columns), strict=True)


def _decode_events(document: EventsObject) -> Iterator[ProgramEvent]:
    allocs = document.alloc
    if allocs.optional is None:
        allocs.optional = [False] * len(allocs.block)
    if allocs.stream is None:
        allocs.stream = [0] * len(allocs.block)
    if allocs.per_pair_bytes is None:
        allocs.per_pair_bytes = [0] * len(allocs.block)
    frees = iter(document.free.block)
    queues: dict[str, Iterator[ProgramEvent]] = {
        "a": iter([AffineAlloc(*row) for row in _rows(allocs)]),
        "f": (Free(block) for block in frees),
        "e": (Free(block, empties_cache=True) for block in frees),
        "m": iter([PhaseStart(*row) for row in _rows(document.mark)]),
    }
    for letter in document.kind:
        event = next(queues[letter], None)
        if event is None:
            raise ValueError(f"kind: {document.kind.count(letter)} times {letter!r}, but fewer such events")
        yield event
    if any(next(queue, None) for queue in queues.values()):
        raise ValueError("kind: fewer letters than events")


def _decode_calls(kernels: KernelsObject) -> Iterator[KernelCall]:
    outputs = [tuple(bit == "1" for bit in bits) for bits in kernels.outputs]
    columns = kernels.kernels
    blas = set(columns.takes_blas)
    streams = [0] * len(columns.kind) if columns.stream is None else columns.stream
    rows = zip(columns.kind, columns.site, accumulate(columns.before), columns.outputs, streams, strict=True)
    for number, (signature, site, position, shape, stream) in enumerate(rows):
        yield KernelCall(signature, site, position, _at(outputs, shape), number in blas, stream)


def _variants(program: Program, kernels: KernelsObject, chip: TargetObject) -> Variants:
    if chip.blas_bytes < 0 or not 1 <= chip.first <= chip.last:
        raise ValueError(f"batch sizes {chip.first} to {chip.last}, {chip.blas_bytes} bytes for cuBLAS")
    used = {number for numbers in chip.cases for number in numbers}
    asked = kernels.convolutions
    decoded = {number: _decode_ops(_at(kernels.pool, number), asked.get(number, ())) for number in used}
    by_signature = [[decoded[number] for number in numbers] for numbers in chip.cases]
    nodes = sum(len(ops.nodes) + len(ops.guards) + 1 for variants in by_signature for ops in variants)
    if nodes > MOST_NODES:
        raise ValueError(f"{nodes} nodes are too many to evaluate")
    steps = [max((len(ops.ops) for ops in variants), default=0) for variants in by_signature]
    made = sum(2 * _at(steps, call.signature) + len(call.outputs) + 2 for call in program.calls)
    if made > MOST_KERNEL_EVENTS:
        raise ValueError(f"more than {MOST_KERNEL_EVENTS} events of kernels")
    return Variants(chip.blas_bytes, chip.first, chip.last, by_signature)


def _decode_ops(case: VariantArray, asked: Sequence[ConvolutionArray]) -> GuardedOps:
    low, high, operations, lefts, rights, comparisons, compared, kinds, places = case
    triples = zip(compared[::3], compared[1::3], compared[2::3], strict=True)
    guards = tuple(
        Guard(letter, left, right, expected == 1)
        for letter, (left, right, expected) in zip(comparisons, triples, strict=True)
    )
    ops = tuple(OpExpr(OpKind(letter), place) for letter, place in zip(kinds, places, strict=True))
    convolutions = tuple(ConvolutionExpr(*one) for one in asked)
    nodes = tuple(zip(operations, lefts, rights, strict=True))
    variant = GuardedOps(low, high, nodes, guards, ops, convolutions)
    validate_ops(variant)
    return variant


def _at(values: Sequence[Any], number: int) -> Any:
    if number < 0:
        raise IndexError(f"index {number}")
    return values[number]


def _name(capability: Capability) -> str:
    return ".".join(map(str, capability))


# ---- encoding


def _document(programs: Sequence[Program], about: About) -> ProgramDocument:
    events = [_encode_events(program) for program in programs]
    return ProgramDocument(FORMAT, about, events, [_encode_kernels(program) for program in programs])


def _encode_events(program: Program) -> EventsObject:
    low = min((known.min_batch for known in program.targets.values()), default=1) // program.unit
    high = max((known.max_batch for known in program.targets.values()), default=1) // program.unit
    allocs = [event for event in program.events if isinstance(event, AffineAlloc)]
    frees = [event.block for event in program.events if isinstance(event, Free)]
    marks = [event for event in program.events if isinstance(event, PhaseStart)]
    return EventsObject(
        batches=[low] if low == high else [max(low, 2), max(low, 2) + 1],
        unknown_ops=list(program.unknown_ops),
        notes=list(program.notes),
        sites=SiteColumns([site.module for site in program.sites], [site.op for site in program.sites]),
        kind="".join(map(_letter, program.events)),
        alloc=_alloc_columns(allocs),
        free=FreeColumns(frees),
        mark=PhaseColumns([mark.step for mark in marks], [mark.phase for mark in marks]),
        details=_table(ProvenanceColumns, TensorProvenance, program.provenance),
        asked=_table(ConvolutionColumns, ConvWorkspace, program.conv_workspaces),
        growth_sources=_table(GrowthColumns, GrowthSource, program.growth_sources),
        pinned=[list(line) for line in program.pinned],
        unit=program.unit,
        facts=sorted(program.facts),
    )


_LETTERS: dict[type, str] = {AffineAlloc: "a", Free: "f", PhaseStart: "m"}


def _letter(event: ProgramEvent) -> str:
    return "e" if isinstance(event, Free) and event.empties_cache else _LETTERS[type(event)]


def _columns(noun: Any, rows: Sequence[Any]) -> list[list[Any]]:
    return [[getattr(row, name) for row in rows] for name in noun.__struct_fields__]


def _alloc_columns(allocs: Sequence[AffineAlloc]) -> AllocColumns:
    columns = AllocColumns(*_columns(AffineAlloc, allocs))
    columns.stream = _or_none(columns.stream)
    columns.per_pair_bytes = _or_none(columns.per_pair_bytes)
    return columns


def _or_none(numbers: list[int] | None) -> list[int] | None:
    return numbers if numbers and any(numbers) else None


def _table(table: type[Any], noun: type[Any], rows: Sequence[Any]) -> Any:
    return table(*_columns(noun, rows)) if rows else None


def _encode_kernels(program: Program) -> KernelsObject:
    shapes = sorted({call.outputs for call in program.calls})
    positions = [call.position for call in program.calls]
    pool: dict[GuardedOps, int] = {}
    chips = {
        _name(capability): TargetObject(
            known.cublas_bytes,
            known.min_batch,
            known.max_batch,
            [[pool.setdefault(ops, len(pool)) for ops in variants] for variants in known.by_signature],
        )
        for capability, known in program.targets.items()
    }
    calls = CallColumns(
        [call.signature for call in program.calls],
        [call.site for call in program.calls],
        [position - before for position, before in zip(positions, [0, *positions], strict=False)],
        [shapes.index(call.outputs) for call in program.calls],
        [number for number, call in enumerate(program.calls) if call.first_blas_call],
        _or_none([call.stream for call in program.calls]),
    )
    outputs = ["".join("01"[takes] for takes in shape) for shape in shapes]
    asked: dict[int, list[Any]] = {
        number: [msgspec.structs.astuple(one) for one in ops.convolutions]
        for ops, number in pool.items()
        if ops.convolutions
    }
    return KernelsObject(outputs, calls, [_encode_ops(ops) for ops in pool], chips, asked)


def _encode_ops(variant: GuardedOps) -> VariantArray:
    nodes, guards = variant.nodes, variant.guards
    return (
        *(variant.min_batch, variant.max_batch, "".join(node[0] for node in nodes)),
        *([node[1] for node in nodes], [node[2] for node in nodes]),
        "".join(guard.comparison for guard in guards),
        [number for guard in guards for number in (guard.left, guard.right, int(guard.expected))],
        "".join(op.kind for op in variant.ops),
        [op.node for op in variant.ops],
    )
