/* Access to the installed cuDNN, which makes the descriptors, heuristics and plans of the stand-in. */
#pragma once
#include "core.h"
#include <cudnn.h>

void *emu_real_cudnn(const char *name); /* the library's function of this name; NULL if it lacks it */
#define REAL(name)                                                                                           \
  ({                                                                                                         \
    static typeof(&name) symbol_;                                                                            \
    if (!symbol_) symbol_ = emu_real_cudnn(#name);                                                           \
    symbol_;                                                                                                 \
  })
#define OK return CUDNN_STATUS_SUCCESS
