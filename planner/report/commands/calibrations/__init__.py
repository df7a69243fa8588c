"""Reports on stored calibrations and on the measurements for them."""
