from .bundled_store import ShippedShelf as ShippedShelf
from .cache_dir import Usage as Usage, open_cache as open_cache
from .codec import load_trace as load_trace, save_trace as save_trace
from .fingerprint import key_of as key_of
from .kept_cards import KeptCards as KeptCards
from .kept_tracer import Fresh as Fresh, KeptTracer as KeptTracer, Shelves as Shelves
from .kept_traces import UserShelf as UserShelf
from .saved_traces import SavedTraces as SavedTraces, open_saved as open_saved
from .saving import save_job as save_job
