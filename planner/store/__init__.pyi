from .cache_dir import CacheStats as CacheStats, open_cache as open_cache
from .codec import load_programs as load_programs, save_programs as save_programs
from .file_store import SavedJob as SavedJob, open_saved as open_saved
from .fingerprint import fingerprint_of as fingerprint_of
from .saving import save_job as save_job
from .source import ProgramSource as ProgramSource
from .store import (
    BundledStore as BundledStore, ProgramStore as ProgramStore, UserCache as UserCache,
    complete_cached as complete_cached,
)
