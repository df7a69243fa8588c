/* Functions that the parts of the stand-in for the driver share. */
#pragma once
#include "core.h"
#include <cuda.h>

CUcontext emu_context_of(int device);
bool emu_no_device(int device);
#define OK return CUDA_SUCCESS
