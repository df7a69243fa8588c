from .diagnosis import (
    Cause as Cause, Diagnosis as Diagnosis, GpusServing as GpusServing, Help as Help, Held as Held,
    Place as Place, retries_text as retries_text,
)
from .from_history import diagnose_history as diagnose_history
from .from_log import diagnose_log as diagnose_log
from .from_run import diagnose_run as diagnose_run
