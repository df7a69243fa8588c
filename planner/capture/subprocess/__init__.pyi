from .client import apart_of as apart_of, isolated_workload as isolated_workload
from .devices import FromApart as FromApart
