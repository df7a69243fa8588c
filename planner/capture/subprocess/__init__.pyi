from .client import (
    apart_of as apart_of, limit_of as limit_of, opener_of as opener_of, refuse_isolation as refuse_isolation,
)
from .devices import FromApart as FromApart
