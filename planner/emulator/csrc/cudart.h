/* Functions that the parts of the stand-in for the runtime share. */
#pragma once
#include "core.h"
#include <cuda_runtime_api.h>

cudaError_t emu_fail(cudaError_t error); /* stores the error for cudaGetLastError, and returns it */
#define OK return cudaSuccess
#define TOUCH_CONTEXT() emu_touch_context(emu_current_device())
