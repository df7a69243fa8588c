from .assumptions import (
    short_op as short_op,
)
from .layout import (
    wrapped as wrapped,
)
from .run_summary import (
    summary_of_run as summary_of_run,
)
from .summary import (
    summary_of as summary_of,
)
from .terminal_explain import (
    advice_view as advice_view,
    explanation_view as explanation_view,
)
from .terminal_gpus import (
    devices_view as devices_view,
    gpus_view as gpus_view,
)
from .terminal_plan import (
    estimate_view as estimate_view,
    max_batch_view as max_batch_view,
)
from .units import (
    is_endless as is_endless,
    mib as mib,
)
