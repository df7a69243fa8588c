from .batch_sizes import ANY_BATCH_SIZE as ANY_BATCH_SIZE, BatchSizes as BatchSizes
from .bounds import LowerBound as LowerBound, live_bytes_bound as live_bytes_bound
from .kernels.convolution import (
    ConvWorkspace as ConvWorkspace, ConvWorkspaceQuery as ConvWorkspaceQuery,
    ConvWorkspaceSource as ConvWorkspaceSource, Convolution as Convolution,
    ConvolutionExpr as ConvolutionExpr, Direction as Direction, Engine as Engine,
    WorkspaceAccount as WorkspaceAccount, Workspaces as Workspaces,
)
from .kernels.cublas import (
    LT_BYTES as LT_BYTES, LtWorkspace as LtWorkspace, lt_workspace as lt_workspace,
    parse_workspace_config as parse_workspace_config, workspace_bytes as workspace_bytes,
)
from .extrapolation.depth import (
    CHECKED as CHECKED, SHALLOW as SHALLOW, compare_depths as compare_depths,
)
from .extrapolation.repeated_block import (
    BLOCK as BLOCK, NotRepeatedError as NotRepeatedError, Origin as Origin, RepeatedBlock as RepeatedBlock,
)
from .diff import first_divergence as first_divergence
from .events import (
    Alloc as Alloc, Category as Category, Event as Event, Free as Free, GRAPH_POOL as GRAPH_POOL,
    GrowthSource as GrowthSource,
    Outcome as Outcome, Phase as Phase, PhaseStart as PhaseStart, Fact as Fact,
    LEFT_OUT_NOTE as LEFT_OUT_NOTE, Site as Site,
    NextWorkspaces as NextWorkspaces, TensorProvenance as TensorProvenance,
    Trace as Trace,
)
from .expr import (
    BATCH as BATCH, COMPARISONS as COMPARISONS, CONSTANT as CONSTANT, Guard as Guard,
    GuardedOps as GuardedOps, Node as Node, OPERATIONS as OPERATIONS, OpExpr as OpExpr, SM_COUNT as SM_COUNT,
    constant_ops as constant_ops, express_ops as express_ops, first_matching as first_matching,
    validate_ops as validate_ops,
)
from .extrapolation.fit import (
    Affine as Affine, NotAffineError as NotAffineError, Quadratic as Quadratic,
    SizesNotAffineError as SizesNotAffineError, fit_by_site as fit_by_site, fit_events as fit_events,
    fit_pinned as fit_pinned, fit_quadratic_events as fit_quadratic_events, fit_traces as fit_traces,
    nearest_affine as nearest_affine, polynomial_through as polynomial_through,
    rounded_affine as rounded_affine, scaled_program as scaled_program, tensors_diverge as tensors_diverge,
)
from .growth import (
    FEWEST_STEPS as FEWEST_STEPS, GrowingSite as GrowingSite, Growth as Growth, STREAM_POOL as STREAM_POOL,
    find_growth as find_growth, growing_blocks as growing_blocks,
)
from .kernels.expansion import OpKind as OpKind
from .pieces import (
    FIRST_LASTING as FIRST_LASTING, Joiner as Joiner, NotJoinedError as NotJoinedError, Piece as Piece,
    ProgramPiece as ProgramPiece, Variable as Variable, cut_program as cut_program, cut_trace as cut_trace,
    first_step as first_step, is_periodic as is_periodic,
)
from .pinned import pinned_bytes as pinned_bytes
from .program import (
    AffineAlloc as AffineAlloc, KernelCall as KernelCall, KernelWorkspaces as KernelWorkspaces,
    LARGEST_BATCH as LARGEST_BATCH, Program as Program, ProgramEvent as ProgramEvent, Variants as Variants,
    answer_convolutions as answer_convolutions, constant_program as constant_program,
    has_convolutions as has_convolutions, sample_batches as sample_batches,
    validate_program as validate_program,
)
from .source import (
    FIT_BATCHES as FIT_BATCHES, OnProgress as OnProgress, ProgramBuilder as ProgramBuilder,
    ProgramSet as ProgramSet, TraceSource as TraceSource, ignore_progress as ignore_progress,
)
from .target import (
    Capability as Capability, SM_LIMITS as SM_LIMITS, Target as Target, threads_per_sm as threads_per_sm,
)
from .torch_version import (
    NEWEST_TORCH as NEWEST_TORCH, TorchVersion as TorchVersion, format_torch_version as format_torch_version,
    parse_torch_option as parse_torch_option, torch_version_of as torch_version_of,
)
