from .comparison import (
    ALLOCATED as ALLOCATED, COUNTS as COUNTS, Comparison as Comparison, Measured as Measured, NAMES as NAMES,
    PROCESS as PROCESS, ResidentModel as ResidentModel, Row as Row, compare as compare,
    find_measured as find_measured, measured_by_run as measured_by_run,
    resident_bytes_after as resident_bytes_after,
)
from .methods import (
    Method as Method, TITLES as TITLES, find_method as find_method,
    reject_unsupported_options as reject_unsupported_options, takes_loss as takes_loss,
)
from .peers import MEBIBYTE_BYTES as MEBIBYTE_BYTES
from .published import RESERVED as RESERVED, Source as Source, load_measured as load_measured
from .run import (
    model_builder as model_builder, plan_by_formula as plan_by_formula, run_estimator as run_estimator,
    run_estimators as run_estimators,
)
from .static_estimate import FormulaPlan as FormulaPlan, StaticEstimate as StaticEstimate
