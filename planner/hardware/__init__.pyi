from .budget import (
    Budget as Budget, EVEN_ODDS as EVEN_ODDS, check_confidence as check_confidence, is_fitted as is_fitted,
    judge_budget as judge_budget, make_budget as make_budget, process_bytes as process_bytes,
    upper_process_bytes as upper_process_bytes, with_config as with_config,
    with_likeness as with_likeness,
)
from .database import (
    EMULATED as EMULATED, device_key as device_key, find_device as find_device, load_devices as load_devices,
    load_other_devices as load_other_devices,
    search_devices as search_devices, search_words as search_words,
)
from .device import (
    Device as Device, GENERIC_CAPABILITY as GENERIC_CAPABILITY, LARGEST_TOTAL_MIB as LARGEST_TOTAL_MIB,
    MIB as MIB, ProductLine as ProductLine, SourcedBytes as SourcedBytes, SourcedValue as SourcedValue,
    UNLIMITED_BYTES as UNLIMITED_BYTES, generic_device as generic_device,
    unlimited_device as unlimited_device, Vendor as Vendor,
)
from .likeness import Likeness as Likeness, margins_of as margins_of
from .local_gpu import (
    check_detected as check_detected, detected_device as detected_device, local_device as local_device,
)
from .nccl.buffers import GPUS_OF_A_NODE as GPUS_OF_A_NODE
from .nccl.of_job import communicators_of as communicators_of, with_nccl_of as with_nccl_of
from .oom_probability import (
    estimate_oom_probability as estimate_oom_probability, oom_probability_at as oom_probability_at,
)
from .prices import Offer as Offer, PriceList as PriceList, read_prices as read_prices
from .scheduler_names import (
    Vocabulary as Vocabulary, known_names as known_names, load_names as load_names, mig_slice as mig_slice,
)
from .vendors import NOT_MODELLED as NOT_MODELLED
