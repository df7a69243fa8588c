from .compiled import compiled_dir as compiled_dir
from .convolution_workspaces import default_source as default_source, open_convolutions as open_convolutions
from .history import (
    ScriptLog as ScriptLog, ScriptMark as ScriptMark, Holder as Holder, PLACED as PLACED,
    ProcessHistory as ProcessHistory, trace_of as trace_of,
)
from .launch import RunOptions as RunOptions, run_emulated as run_emulated
from .record import (
    EmulatedRun as EmulatedRun, GpuRecord as GpuRecord, OutOfMemory as OutOfMemory, GpuPeaks as GpuPeaks,
    SharedGpu as SharedGpu, program_name as program_name,
)
