"""Reports on stored calibrations, on runs that calibrate or verify, and on contributed measurements."""
