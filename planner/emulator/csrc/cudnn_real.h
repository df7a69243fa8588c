/* The installed cuDNN behind the stand-in: descriptors, heuristics and plans are its own. */
#pragma once
#include "core.h"
#include <cudnn.h>

void *emu_real_cudnn(const char *name); /* NULL where the library lacks the function */
#define REAL(name)                                                                                           \
  ({                                                                                                         \
    static typeof(&name) symbol_;                                                                            \
    if (!symbol_) symbol_ = emu_real_cudnn(#name);                                                           \
    symbol_;                                                                                                 \
  })
#define OK return CUDNN_STATUS_SUCCESS
