from .file import (
    ProcessFile as ProcessFile, find_process_file as find_process_file, read_process as read_process,
)
from .model import (
    Account as Account, Define as Define, Delete as Delete, Heading as Heading, Place as Place,
    Print as Print, Process as Process, Reading as Reading, ResetPeak as ResetPeak, Step as Step,
    Summary as Summary, Train as Train,
)
from .run import TRACED_STEPS as TRACED_STEPS, run_process as run_process
