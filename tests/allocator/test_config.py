"""Reading the text of PYTORCH_ALLOC_CONF."""

import pytest

from planner.allocator.config import MIB, AllocatorConfig, format_alloc_conf, parse_alloc_conf
from planner.errors import UsageError


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("", AllocatorConfig()),
        ("backend:native,", AllocatorConfig()),
        ("max_split_size_mb:20", AllocatorConfig(max_split_bytes=20 * MIB)),
        (
            " max_split_size_mb : 64 , max_non_split_rounding_mb:30",
            AllocatorConfig(max_split_bytes=64 * MIB, max_non_split_rounding_bytes=30 * MIB),
        ),
        (
            "max_split_size_mb:40,large_segment_size_mb:40",
            AllocatorConfig(
                max_split_bytes=40 * MIB,
                max_non_split_rounding_bytes=40 * MIB,
                large_segment_bytes=40 * MIB,
            ),
        ),
        ("max_split_size_mb:30,max_split_size_mb:31", AllocatorConfig(max_split_bytes=31 * MIB)),
        ("garbage_collection_threshold:0.8", AllocatorConfig(garbage_collection_threshold=0.8)),
        ("expandable_segments:True", AllocatorConfig(expandable_segments=True)),
        ("expandable_segments:False", AllocatorConfig()),
        ("per_process_memory_fraction:0", AllocatorConfig(per_process_memory_fraction=0.0)),
        ("throw_on_cudamalloc_oom:True", AllocatorConfig(throw_on_cudamalloc_oom=True)),
        ("roundup_power2_divisions:8", AllocatorConfig(roundup_power2_divisions=(8,) * 16)),
        (
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
            AllocatorConfig(roundup_power2_divisions=(1,) * 9 + (2, 4) + (8,) * 5),
        ),
        (
            "roundup_power2_divisions:[64:8,1024:4]",
            AllocatorConfig(roundup_power2_divisions=(8,) * 7 + (0,) * 3 + (4,) + (0,) * 5),
        ),
        (
            "roundup_power2_divisions:[256:2,64:4,>:8]",
            AllocatorConfig(roundup_power2_divisions=(2,) * 6 + (4,) + (8,) * 9),
        ),
        ("roundup_power2_divisions:[>:4]", AllocatorConfig(roundup_power2_divisions=(0,) + (4,) * 15)),
        (
            "roundup_power2_divisions:[64:0,>:2]",
            AllocatorConfig(roundup_power2_divisions=(0,) * 7 + (2,) * 9),
        ),
        ("roundup_power2_divisions:[131072:2]", AllocatorConfig(roundup_power2_divisions=(2,) * 16)),
        ("roundup_power2_divisions:[]", AllocatorConfig()),
        ("roundup_power2_divisions:[>:2,],", AllocatorConfig(roundup_power2_divisions=(0,) + (2,) * 15)),
        (
            "pinned_use_background_threads:True,pinned_use_cuda_host_register:True,"
            "pinned_free_catch_all:False,pinned_num_register_threads:8,pinned_reserve_segment_size_mb:64,"
            "pinned_max_cached_size_mb:1,pinned_max_round_threshold_mb:1,release_lock_on_cudamalloc:True,"
            "graph_capture_record_stream_reuse:True",
            AllocatorConfig(),
        ),
    ],
)
def test_configurations_that_are_understood(text: str, config: AllocatorConfig) -> None:
    """Each text gives this configuration; torch 2.13's own parser gives the same figures."""
    assert parse_alloc_conf(text) == config
    assert parse_alloc_conf(format_alloc_conf(config)) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size:64", "unknown option 'max_split_size'; did you mean 'max_split_size_mb'?"),
        ("speed:11", "unknown option 'speed'"),
        ("max_split_size_mb", "cannot read 'max_split_size_mb'; write NAME:VALUE, separated by commas"),
        ("max_split_size_mb=64", "cannot read 'max_split_size_mb=64'; write NAME:VALUE, separated by commas"),
        ("expandable_segments:", "cannot read 'expandable_segments:'; write NAME:VALUE, separated by commas"),
        (
            "max_split_size_mb:64:32",
            "cannot read 'max_split_size_mb:64:32'; write NAME:VALUE, separated by commas",
        ),
        (",backend:native", "cannot read ',backend:native'; write NAME:VALUE, separated by commas"),
        ("max_split_size_mb:64MB", "max_split_size_mb takes a whole number, not '64MB'"),
        ("max_split_size_mb:-1", "max_split_size_mb takes a whole number, not '-1'"),
        ("max_split_size_mb:19", "max_split_size_mb must be at least 20, not 19"),
        ("large_segment_size_mb:40,max_split_size_mb:39", "max_split_size_mb must be at least 40, not 39"),
        (f"max_split_size_mb:{'9' * 5000}", "max_split_size_mb: more than 18 digits; use a smaller number"),
        ("max_non_split_rounding_mb:19", "max_non_split_rounding_mb must be at least 20, not 19"),
        ("large_segment_size_mb:10", "large_segment_size_mb must be at least 11, not 10"),
        ("expandable_segments:true", "expandable_segments takes True or False, not 'true'"),
        ("pinned_free_catch_all:1", "pinned_free_catch_all takes True or False, not '1'"),
        ("pinned_num_register_threads:x", "pinned_num_register_threads takes a whole number, not 'x'"),
        (
            "garbage_collection_threshold:1.0",
            "garbage_collection_threshold must be between 0 and 1, both excluded, not 1.0",
        ),
        (
            "garbage_collection_threshold:0",
            "garbage_collection_threshold must be between 0 and 1, both excluded, not 0",
        ),
        ("per_process_memory_fraction:1.5", "per_process_memory_fraction must be between 0 and 1, not 1.5"),
        ("per_process_memory_fraction:nan", "per_process_memory_fraction must be between 0 and 1, not nan"),
        ("per_process_memory_fraction:half", "per_process_memory_fraction takes a number, not 'half'"),
        ("roundup_power2_divisions:0", "roundup_power2_divisions must be at least 1, not 0"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions takes powers of two, not 3"),
        ("roundup_power2_divisions:[48:2]", "roundup_power2_divisions takes powers of two, not 48"),
        (
            "roundup_power2_divisions:[64]",
            "roundup_power2_divisions: cannot read '64'; write SIZE_MB:DIVISIONS or >:DIVISIONS",
        ),
        (
            "backend:cudaMallocAsync",
            "backend:cudaMallocAsync is not simulated, it leaves memory to CUDA; use backend:native",
        ),
        ("backend:jemalloc", "unknown backend 'jemalloc'; only native is simulated"),
    ],
)
def test_configurations_that_are_refused(text: str, message: str) -> None:
    """Each text is refused with this one line."""
    with pytest.raises(UsageError) as error:
        parse_alloc_conf(text)
    assert str(error.value) == f"allocator configuration: {message}"
