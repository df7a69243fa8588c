from .file import (
    ProcessFile as ProcessFile, find_process_file as find_process_file, read_process as read_process,
)
from .model import (
    Define as Define, Delete as Delete, Heading as Heading, MemoryReading as MemoryReading, Place as Place,
    Print as Print, Process as Process, ProcessLog as ProcessLog, ResetPeak as ResetPeak, Step as Step,
    Summary as Summary, Train as Train,
)
from .run import TRACED_STEPS as TRACED_STEPS, run_process as run_process
