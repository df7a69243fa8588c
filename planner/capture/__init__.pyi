from .cudnn_target import notes_on_cudnn as notes_on_cudnn
from .session import record as record
