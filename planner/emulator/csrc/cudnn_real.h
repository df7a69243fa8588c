/* The installed cuDNN behind the stand-in: descriptors, heuristics and plans are its own. */
#pragma once
#include "core.h"
#include <cudnn.h>

void *emu_real_cudnn(const char *name); /* NULL where the library lacks the function */
#define REAL(name)                                                                                           \
  ({                                                                                                         \
    static typeof(&name) found_;                                                                             \
    if (!found_) found_ = emu_real_cudnn(#name);                                                             \
    found_;                                                                                                  \
  })
#define OK return CUDNN_STATUS_SUCCESS
