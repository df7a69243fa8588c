from .advise import (
    advice_text as advice_text,
    advice_to_json as advice_to_json,
)
from .as_json import (
    SCHEMA as SCHEMA,
    device_to_json as device_to_json,
    estimate_to_json as estimate_to_json,
    plan_to_json as plan_to_json,
)
from .compare import (
    comparison_text as comparison_text,
    comparison_to_json as comparison_to_json,
)
from .devices import (
    devices_text as devices_text,
    devices_to_json as devices_to_json,
)
from .explain import (
    explanation_text as explanation_text,
)
from .explain_json import (
    explanation_to_json as explanation_to_json,
)
from .gpus import (
    gpus_text as gpus_text,
    gpus_to_csv as gpus_to_csv,
    gpus_to_json as gpus_to_json,
)
from .growth import (
    growth_text as growth_text,
)
from .max_batch import (
    estimate_text as estimate_text,
    max_batch_text as max_batch_text,
)
from .quick_estimate import (
    quick_estimate_text as quick_estimate_text,
    quick_estimate_to_json as quick_estimate_to_json,
    quick_plan_text as quick_plan_text,
    quick_plan_to_json as quick_plan_to_json,
)
from .replay import (
    LineForm as LineForm,
    account_text as account_text,
    account_to_json as account_to_json,
    tensorflow_line as tensorflow_line,
    torch_line as torch_line,
)
from .run import (
    command_plan_to_json as command_plan_to_json,
    plan_text as plan_text,
    run_text as run_text,
    run_to_json as run_to_json,
)
from .sweep import (
    sweep_csv as sweep_csv,
    sweep_parquet as sweep_parquet,
    sweep_text as sweep_text,
    sweep_to_json as sweep_to_json,
)
from .tables import (
    Shelf as Shelf,
    calibration_text as calibration_text,
    calibration_to_json as calibration_to_json,
    tables_text as tables_text,
    tables_to_json as tables_to_json,
)
from .verify import (
    LimitReport as LimitReport,
    Report as Report,
)
