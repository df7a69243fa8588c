"""Sources of convolution workspaces. They are an installed cuDNN, stored answers, or published runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from msgspec.structs import replace

from planner.emulator.compiled import open_cudnn_with_cublaslt
from planner.errors import UsageError
from planner.hardware.cudnn import Cudnn, PublishedWorkspaces, StoredWorkspaces
from planner.jobs import INSTALLED, PUBLISHED, STORED, Job
from planner.program import (
    Convolution,
    ConvWorkspaceQuery,
    ConvWorkspaceSource,
    WorkspaceAccount,
    Workspaces,
    torch_version_of,
)

_ANSWERING_TORCH = (2, 8)  # comes with cuDNN 9.10; 2.7 with 9.5


def open_convolutions(job: Job, cache_folder: Path | None = None) -> ConvWorkspaceQuery:
    """Return the source of a job's convolution workspaces.

    The answers of a cuDNN are cached in `cache_folder`. By default, versions of torch that come with a cuDNN
    before 9.8 have the workspaces of published runs. Raises UsageError if the job names a cuDNN that does not
    answer.
    """
    where, benchmark = job.environment.cudnn, job.environment.cudnn_benchmark
    if where == PUBLISHED or (not where and _is_published(job)):
        return PublishedWorkspaces()
    if not where:
        return DefaultWorkspaces(benchmark, cache_folder)
    if where == STORED:
        return StoredWorkspaces(benchmark=benchmark)
    return CudnnWorkspaces(open_cudnn_with_cublaslt(where, cache_folder), benchmark)


def default_source(job: Job) -> str:
    """Return PUBLISHED before torch 2.8, INSTALLED if a whole cuDNN is installed, or else STORED."""
    if _is_published(job):
        return PUBLISHED
    return STORED if _installed(None) is None else INSTALLED


def _is_published(job: Job) -> bool:
    return torch_version_of(job.environment.torch) < _ANSWERING_TORCH


@cache
def _installed(cache_folder: Path | None) -> Cudnn | None:
    """Return a client of the installed cuDNN if it answers with all its engines, else None."""
    try:
        library = open_cudnn_with_cublaslt(INSTALLED, cache_folder)
    except UsageError:
        return None
    return None if library.lacks else library


@dataclass(frozen=True)
class DefaultWorkspaces:
    """The workspaces of the installed cuDNN or else of stored answers, opened at the first convolution."""

    benchmark: bool
    cache_folder: Path | None = None

    @cached_property
    def _source(self) -> ConvWorkspaceQuery:
        library = _installed(self.cache_folder)
        if library is None:
            return StoredWorkspaces(benchmark=self.benchmark)
        return CudnnWorkspaces(library, self.benchmark)

    @property
    def name(self) -> str:
        """Return the name of the source. If no installed cuDNN answers, the source is the stored answers."""
        return self._source.name

    def __call__(self, capability: tuple[int, int], sm_count: int, convolution: Convolution) -> Workspaces:
        """Return the workspaces of a convolution on a GPU."""
        return self._source(capability, sm_count, convolution)

    def following(
        self, capability: tuple[int, int], sm_count: int, convolution: Convolution, size_bytes: int
    ) -> tuple[int, ...] | None:
        """Return the sizes in bytes to try after a refused workspace, or None if they are not known."""
        return self._source.following(capability, sm_count, convolution, size_bytes)

    def account(self, capability: tuple[int, int], sm_count: int) -> WorkspaceAccount:
        """Return the source of the workspaces, and the share of convolutions with uncertain workspaces."""
        return self._source.account(capability, sm_count)


@dataclass(frozen=True, slots=True)
class CudnnWorkspaces:
    """The workspaces of convolutions as an installed cuDNN chooses them."""

    library: Cudnn
    benchmark: bool
    # By capability and convolution (at a batch size of 1): whether an engine ran it at a queried batch size.
    _has_engine: dict[tuple[int, int], dict[Convolution, bool]] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """Return the library's version, and whether cuBLASLt is missing and `benchmark` is set, as text."""
        lacks = " without cuBLASLt" if self.library.lacks else ""
        return f"cuDNN {self.library.version}{lacks}{' benchmark' if self.benchmark else ''}"

    def __call__(self, capability: tuple[int, int], sm_count: int, convolution: Convolution) -> Workspaces:
        """Return the workspaces that the library requests. Whether the library has an engine is recorded."""
        query = self.library.benchmarked if self.benchmark else self.library.workspaces
        answer = query(capability, sm_count, convolution)
        has_engine = self._has_engine.setdefault(capability, {})
        key = replace(convolution, x=(1, *convolution.x[1:]), y=(1, *convolution.y[1:]))
        has_engine[key] = has_engine.get(key, False) or answer.engine is not None
        return answer

    def following(
        self, capability: tuple[int, int], sm_count: int, convolution: Convolution, size_bytes: int
    ) -> tuple[int, ...] | None:
        """Return the sizes in bytes to try after a refused workspace.

        The sizes are the workspaces of the other engines. They are in the order of the heuristics. A larger
        size may follow: it may still fit if the segment of 20 MiB for a smaller size does not.

        If the refused size is the size for timing all engines (`benchmark`), the sizes are half of it, a
        quarter of it, and so on (Conv_v8.cpp, generate_and_filter_plans).
        """
        if self.benchmark:
            answer = self.library.benchmarked(capability, sm_count, convolution)
            if size_bytes == answer.searched_bytes:
                return tuple(size_bytes >> shift for shift in range(1, size_bytes.bit_length() + 1))
        engines = self.library.engines(capability, sm_count, convolution, every=True)
        sizes = dict.fromkeys(engine.workspace_bytes for engine in engines)
        sizes.pop(size_bytes, None)
        return tuple(sizes)

    def account(self, capability: tuple[int, int], sm_count: int) -> WorkspaceAccount:
        """Return the source of the workspaces, with notes on missing answers and engines.

        The source is UNCOUNTED if the library does not answer for the GPU, SIMILAR if it lacks the engines
        that are built on cuBLASLt, else LIBRARY.
        """
        library = self.library
        if capability in library.silent:
            place = "compute capability {}.{}".format(*capability)
            about = f"cuDNN {library.version} does not answer for {place}"
            note = f"{about}: no workspaces of convolutions are counted"
            return WorkspaceAccount(ConvWorkspaceSource.UNCOUNTED, uncounted_share=1.0, notes=(note,))
        source = ConvWorkspaceSource.SIMILAR if library.lacks else ConvWorkspaceSource.LIBRARY
        notes = (*self._notes_on_answers(), *self._notes_on_refusals(capability))
        return WorkspaceAccount(source, notes=notes)

    def _notes_on_answers(self) -> tuple[str, ...]:
        library = self.library
        note = f"convolutions take the workspaces that cuDNN {library.version} requests"
        if self.benchmark:
            note += ": the largest while it times its engines, then that of its first choice"
        if library.lacks:
            return (note, f"cuDNN's engines that are built on cuBLASLt are left out: {library.lacks}")
        return (note,)

    def _notes_on_refusals(self, capability: tuple[int, int]) -> tuple[str, ...]:
        """Return a note on the convolutions without an engine, or () if all have engines."""
        has_engine = self._has_engine.get(capability, {})
        refused = [convolution for convolution, is_run in has_engine.items() if not is_run]
        if not refused:
            return ()
        one = refused[0]
        place = "compute capability {}.{}".format(*capability)
        layout = "channels_last" if one.channels_last else "contiguous"
        return (
            f"this training fails: on {place} cuDNN {self.library.version} has no engine for {len(refused)} "
            f"of {len(has_engine)} convolutions, such as that of x {_extents(one.x[1:])} and "
            f"w {_extents(one.w)} ({one.direction}, {one.dtype}, {layout})",
        )


def _extents(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
