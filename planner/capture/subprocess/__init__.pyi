from .client import TracerProcess as TracerProcess
