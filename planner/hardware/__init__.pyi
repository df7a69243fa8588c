from .budget import (
    Budget as Budget,
    chance_out_of_memory as chance_out_of_memory,
    is_fitted as is_fitted,
    judge_budget as judge_budget,
    make_budget as make_budget,
    process_bytes as process_bytes,
    upper_process_bytes as upper_process_bytes,
)
from .device import (
    EMULATED as EMULATED,
    ENDLESS_BYTES as ENDLESS_BYTES,
    GENERIC_CAPABILITY as GENERIC_CAPABILITY,
    GENERIC_CONTEXT as GENERIC_CONTEXT,
    LARGEST_TOTAL_MIB as LARGEST_TOTAL_MIB,
    MIB as MIB,
    Device as Device,
    FigureKind as FigureKind,
    Line as Line,
    Measured as Measured,
    Noted as Noted,
    card_key as card_key,
    find_device as find_device,
    generic_device as generic_device,
    generic_usable as generic_usable,
    load_devices as load_devices,
    search_devices as search_devices,
    unlimited_device as unlimited_device,
)
from .likeness import (
    Likeness as Likeness,
    margins_of as margins_of,
)
from .local_gpu import (
    local_device as local_device,
)
