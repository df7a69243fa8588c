"""Diagnose the out-of-memory message of a log by its figures and its traceback."""

import re
from collections.abc import Iterable

from msgspec.structs import replace

from planner.planning.diagnosis.diagnosis import (
    Cause,
    Diagnosis,
    Held,
    Help,
    size_text,
)
from planner.planning.diagnosis.from_frames import (
    advice_of_frames,
    cause_of_frames,
    place_of_frames,
)
from planner.planning.diagnosis.log_reader import read_messages
from planner.planning.diagnosis.messages import Message, in_bytes
from planner.planning.diagnosis.without_figures import BEFORE

_PINNING = (
    "CUDA could not pin the memory of a batch: the host has no more memory that can be pinned, or the GPU on "
    "which the loader's thread makes a context for it, the first by default, is full; try pin_memory=False"
)
_OUTSIDE_OF_TORCH = "neither free nor of PyTorch in this process: contexts, libraries, other processes"
_VARIABLE = re.compile(r"PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF")
# Joining a smaller unused share of the reserved memory gives a job hardly more: it is as large as the GPU.
_FRAGMENTED_SHARE = 0.05
_OF_WINDOWS = re.compile(r"[A-Za-z]:[\\/]")


def diagnose_log(lines: Iterable[str]) -> Diagnosis | None:
    """Diagnose the most detailed out-of-memory message of a log, or return None if there is no message.

    If several are equally detailed, the last counts, unless it repeats figures without a traceback. Figures
    say more than a library's status, and a status more than the note that a process was killed. Lines are
    read once, and few are kept.
    """
    best = of_host = None
    best_detail = count = 0
    for message in read_messages(lines):
        detail, known = message.detail or 0, message.without_figures
        is_of_host = detail < 3 and known is not None and known[0].is_of_host
        count += detail > 1 and not is_of_host
        if detail >= best_detail and not (best is not None and _repeats(message, best)):
            best, best_detail, of_host = message, detail, None
        elif is_of_host:
            of_host = message
    if best is None:
        return None
    notes = []
    if count > 1:
        notes.append(f"the log has {count} such messages; this is the most detailed, the last if several are")
    if of_host is not None:
        reason = _without_figures(of_host).reason
        notes.append(f"a later message is of the host: {of_host.text[:80]}: {reason}")
    diagnosis = _diagnose(best)
    return replace(diagnosis, notes=(*notes, *diagnosis.notes))


def _repeats(message: Message, earlier: Message) -> bool:
    """Return whether `message` has no traceback, `earlier` has one, and their figures are equal."""
    return bool(earlier.frames) and not message.frames and message.figures == earlier.figures


def _diagnose(message: Message) -> Diagnosis:
    requested, allocated = message.figure("requested"), message.figure("allocated")
    if requested is None or message.detail not in (3, 4):
        return _without_figures(message)
    reserved, total = message.reserved_bytes, message.figure("total")
    cause, reason = _cause(message, requested, allocated, reserved)
    help_ = _help(message, requested)
    live = _live(message, allocated, reserved)
    place = place_of_frames(message.frames)
    notes = (*_other_causes(message, requested, cause), *_notes(message))
    figures = requested, allocated, reserved, total
    named = _VARIABLE.search(message.text)
    variable = (
        named[0] if named else "PYTORCH_CUDA_ALLOC_CONF" if message.is_before_2_1 else "PYTORCH_ALLOC_CONF"
    )
    return Diagnosis(
        "log", cause, reason, *figures, place, live, would_help=help_, notes=notes, alloc_conf=variable
    )


def _without_figures(message: Message) -> Diagnosis:
    assert message.without_figures is not None  # else it is no message
    known, found = message.without_figures
    place = place_of_frames(message.frames if known.is_request else ())
    what = re.sub(rf"^{BEFORE}\W+|\.$", "", found[0])[:120]
    reason = known.reason.format(what=what)
    sizes = [in_bytes(size) for size in found.groups() if size]
    requested = sizes[0] if sizes else None
    if known.is_of_host:
        return Diagnosis("log", Cause.UNKNOWN, reason, requested, site=place, is_of_host=True)
    if any(frame.file.endswith("pin_memory.py") for frame in message.frames):
        reason = _PINNING
    is_decided = known.cause is not Cause.UNKNOWN or known.detail < 2
    of_frames = None if is_decided else cause_of_frames(message.frames)
    return Diagnosis("log", *(of_frames or (known.cause, reason)), requested, site=place)


def _cause(
    message: Message, requested: int, allocated: int | None, reserved: int | None
) -> tuple[Cause, str]:
    total, free, asked = message.figure("total"), message.figure("free"), size_text(requested)
    if total is not None and requested >= total:
        return Cause.ONE_REQUEST, f"{asked} were asked for at once; the GPU has {size_text(total)} in all"
    is_limited = message.figure("allowed") is not None
    if free is not None and free >= requested and (is_limited or message.had_pages_free):
        return _refused_despite_free(message, free, asked)
    if allocated is not None and requested > allocated:
        rest = f"all tensors alive together took {size_text(allocated)}"
        if not _is_held_elsewhere(message, requested):
            return Cause.ONE_REQUEST, f"{asked} were asked for at once; {rest}"
    held, unused_bytes = _held_elsewhere(message, requested), _enough_unused_bytes(message, requested)
    if held is not None and held[0] >= unused_bytes:
        return Cause.OTHER_PROCESS, held[1]
    if unused_bytes > _FRAGMENTED_SHARE * (reserved or 0):
        return Cause.FRAGMENTATION, _pieces_text(unused_bytes, requested)
    of_code = cause_of_frames(message.frames)
    if of_code is not None:
        return of_code
    if allocated is None:
        lack = "the message does not say how much this process had allocated"
        return Cause.UNKNOWN, f"the GPU was full, and {lack}" if _is_full(message, requested) else lack
    if reserved is None and not message.is_of_cuda_pools:
        return Cause.UNKNOWN, "the message was cut off before it says how much was reserved and unused"
    return Cause.TOO_LARGE, _shortage(message, requested, allocated)


def _held_elsewhere(message: Message, requested: int) -> tuple[int, str] | None:
    """Return the bytes held outside of PyTorch and a sentence, if they would have served the request.

    Returns None if they would not have been enough with what is free, or if the message lacks the free bytes.
    """
    free, others, unexplained = message.figure("free"), message.other_bytes, message.unexplained_bytes
    if free is None:
        return None
    if others and free + others >= requested:
        return others, (
            f"other processes hold {size_text(others)} of the GPU; with the {size_text(free)} that are free, "
            f"that is enough for the {size_text(requested)} asked for"
        )
    if unexplained and free + unexplained >= requested:
        return unexplained, (
            f"{size_text(message.outside_bytes or 0)} of the GPU are neither free nor PyTorch's in this "
            "process, and no CUDA context takes so much: another process, or a library in this one, has "
            "them; see nvidia-smi"
        )
    outside = message.outside_bytes or 0
    if outside > (message.reserved_bytes or 0) and free + outside >= requested:
        return outside, (
            f"{size_text(outside)} of the GPU are neither free nor PyTorch's in this process, more than "
            "PyTorch has: the CUDA context, a library or another process has them; see nvidia-smi"
        )
    return None


def _is_full(message: Message, requested: int) -> bool:
    """Return whether as much was free as asked for, but maybe not in whole pages."""
    free = message.figure("free")
    return free is not None and free >= requested and not message.had_pages_free


def _enough_unused_bytes(message: Message, requested: int) -> int:
    """Return the reserved and unused bytes, or 0 if they were not enough for the request or are unknown."""
    allocated, reserved = message.figure("allocated"), message.reserved_bytes
    unused = 0 if allocated is None or reserved is None else reserved - allocated
    return unused if unused >= requested else 0


def _pieces_text(unused_bytes: int, requested: int) -> str:
    unused = f"{size_text(unused_bytes)} were reserved and unused"
    return f"{unused}, more than the {size_text(requested)} asked for, but in pieces"


def _refused_despite_free(message: Message, free: int, asked: str) -> tuple[Cause, str]:
    more = f"{size_text(free)} were free on the GPU, more than the {asked} asked for"
    allowed, reserved = message.figure("allowed"), message.reserved_bytes
    if allowed is not None and reserved is not None:
        limit = f"the process may take {size_text(allowed)} and had reserved {size_text(reserved)}"
        return Cause.TOO_LARGE, f"{more}, but {limit}; see set_per_process_memory_fraction"
    return Cause.UNKNOWN, (
        f"{more}, and yet CUDA refused: another process held memory at that moment, or the operating system "
        "limits what CUDA may take; look at nvidia-smi while the job runs"
    )


def _other_causes(message: Message, requested: int, cause: Cause) -> tuple[str, ...]:
    """Return sentences on other causes that apply: a full GPU, the traceback, other processes, or pieces."""
    notes, unused_bytes = [], _enough_unused_bytes(message, requested)
    if _is_full(message, requested):
        notes.append(
            f"the GPU was full, although {size_text(message.figure('free') or 0)} were free for the "
            f"{size_text(requested)} asked for: CUDA gives whole pages of 2 MiB, and these may be parts"
        )
    of_code, held = cause_of_frames(message.frames), _held_elsewhere(message, requested)
    if of_code is not None and of_code[0] is not cause:
        notes.append(of_code[1])
    is_short = cause not in (Cause.OTHER_PROCESS, Cause.UNKNOWN) and message.figure("allowed") is None
    if is_short and held is not None:
        notes.append(held[1])
    if cause in (Cause.OTHER_PROCESS, Cause.EVALUATION, Cause.FIRST_STEP) and unused_bytes:
        notes.append(_pieces_text(unused_bytes, requested))
    return tuple(notes)


def _is_held_elsewhere(message: Message, requested: int) -> bool:
    """Return whether free memory and memory in use outside of PyTorch would have served a request.

    Memory of other processes counts too. Returns False if the message lacks the free bytes.
    """
    free = message.figure("free")
    return free is not None and free + max(message.other_bytes, message.unexplained_bytes) >= requested


def _shortage(message: Message, requested: int, allocated: int) -> str:
    left, free = message.left_bytes, message.free_bytes
    held = f"tensors took {size_text(allocated)}, and {size_text(requested)} more were asked for"
    if left is None and free is not None:
        return f"{held}; {size_text(free)} were free, and how much was reserved and unused is not known"
    if left is None:
        return f"{held}; the message does not say how much of the GPU was free"
    if left >= requested:
        return f"{held}; {size_text(left)} were free or reserved and unused, in pieces"
    return f"{held}; {size_text(requested - left)} were missing, even if all that was left had been one piece"


def _help(message: Message, requested: int) -> tuple[Help, ...]:
    """Return allocator settings and whether each might have served the request, or () if unknown.

    It is unknown if the message lacks a figure or is of another backend than CUDA and ROCm.
    """
    left, expandable = message.left_bytes, "expandable_segments:True"
    if left is None or not message.is_of_cuda:
        return ()
    if left < requested:
        return (Help(expandable, False, None, f"only {size_text(left)} were left in all"),)
    if message.is_before_2_1:
        without = Help(
            expandable, False, None, "torch has it since 2.1, and the message is of an older torch"
        )
        split = Help("max_split_size_mb:128", None, None, "it may leave larger pieces; try it")
        return (without, split) if "max_split_size_mb" in message.text else (without,)
    if any(_OF_WINDOWS.match(frame.file) for frame in message.frames):
        return (Help(expandable, False, None, "torch does not have it on Windows"),)
    reason = "it joins unused blocks; a recorded history would tell how many"
    if "HIP out of memory" in message.text:
        reason = "it joins unused blocks, on ROCm 7 and newer, with a torch that has it there"
    return (Help(expandable, None, None, reason),)


def _live(message: Message, allocated: int | None, reserved: int | None) -> tuple[Held, ...]:
    own, unused, outside_torch = message.own_bytes, None, None
    if reserved is not None and allocated is not None:
        unused = reserved - allocated
    if reserved is not None and own is not None:
        outside_torch = own - reserved
    outside = (message.outside_bytes or 0) - message.other_bytes
    found = [
        ("tensors and workspaces of PyTorch", allocated),
        ("reserved by PyTorch and unused", unused),
        ("private pools of CUDA graphs, counted among tensors", message.figure("pools")),
        ("this process outside of PyTorch: CUDA context, libraries", outside_torch),
        ("allocations of Metal outside of PyTorch's pools", message.figure("metal")),
        ("other processes", message.other_bytes),
        (
            _OUTSIDE_OF_TORCH if own is None else "neither free nor of a process that the message names",
            outside,
        ),
    ]
    return tuple(Held(what, size) for what, size in found if size is not None and size > 0)


def _notes(message: Message) -> tuple[str, ...]:
    notes = [*advice_of_frames(message.frames)]
    allowed = message.figure("allowed")
    if allowed is not None and not message.is_of_metal:
        notes.append(f"the process was limited to {size_text(allowed)} by set_per_process_memory_fraction")
    if not message.frames:
        notes.append("no traceback is before the message, so the code that asked is not known")
    total, allocated = message.figure("total"), message.figure("allocated")
    if total is not None and allocated is not None and allocated > total:
        notes.append(
            f"{size_text(allocated)} were allocated on a GPU of {size_text(total)}: the driver lent "
            "memory of the host, as it does on Windows, which is much slower"
        )
    told = "a history (torch.cuda.memory._record_memory_history, since torch 2.1) tells whether memory grew"
    if not message.is_of_cuda:
        told = "whether memory grew is not known"
    notes.append(f"a message shows the moment of the failure alone: {told}")
    return tuple(notes)
