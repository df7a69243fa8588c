from .files import (
    LARGEST_FILE_BYTES as LARGEST_FILE_BYTES,
    SCHEMA as SCHEMA,
    check_folders as check_folders,
    load_calibration as load_calibration,
    load_folders as load_folders,
    search_path as search_path,
)
from .fit import (
    fit_points as fit_points,
    includes_context as includes_context,
)
from .model import (
    Calibration as Calibration,
    Correction as Correction,
    Fit as Fit,
    Key as Key,
    Point as Point,
    Refusal as Refusal,
    Wanted as Wanted,
    find_run as find_run,
    is_card as is_card,
    is_whole as is_whole,
    label as label,
    look_up as look_up,
    measured_bytes as measured_bytes,
)
from .observation import (
    Observation as Observation,
    Origin as Origin,
    Settings as Settings,
    Versions as Versions,
    origin_of as origin_of,
)
