/* What the parts of the runtime stand-in share. */
#pragma once
#include "core.h"
#include <cuda_runtime_api.h>

cudaError_t emu_fail(cudaError_t error); /* remember the error for cudaGetLastError, and return it */
#define OK return cudaSuccess
#define TOUCH_CONTEXT() emu_touch_context(emu_current_device())
