from .contribution import check_contribution as check_contribution, pack as pack
from .files import (
    Origins as Origins, add_points as add_points, calibration_text as calibration_text,
    check_folders as check_folders, key_of as key_of,
    file_name as file_name, load_calibration as load_calibration, load_folders as load_folders,
    search_path as search_path, write_calibration as write_calibration,
)
from .fit import fit_points as fit_points
from .lookup import (
    CalibrationQuery as CalibrationQuery, Correction as Correction, find_calibration as find_calibration,
    find_run as find_run, is_same_job as is_same_job,
)
from .model import (
    Calibration as Calibration, Fit as Fit, Key as Key, NoFit as NoFit, Observation as Observation,
    Point as Point, Settings as Settings, Versions as Versions, fitted_peak_bytes as fitted_peak_bytes,
    origin_of as origin_of,
)
