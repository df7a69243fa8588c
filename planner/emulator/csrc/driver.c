/* The CUDA Driver API (cuda.h): initialization, devices, contexts, and functions by name. Functions that the
 * header declares and no file here defines, among them cuGetExportTable, are generated and return
 * CUDA_ERROR_NOT_SUPPORTED. */
#define _GNU_SOURCE
#include "driver.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static struct {
  int device;
} contexts[EMU_MAX_GPUS];
CUcontext emu_context_of(int device) {
  contexts[device].device = device;
  return (CUcontext)&contexts[device];
}
static int device_of(CUcontext context) { return *(int *)context; }
bool emu_no_device(int device) { return device < 0 || device >= emu_gpu()->count; }

CUresult cuInit(unsigned f) {
  LOG();
  return emu_gpu()->count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}
CUresult cuDriverGetVersion(int *v) {
  LOG();
  *v = CUDA_VERSION;
  OK;
}
CUresult cuGetErrorName(CUresult e, const char **s) {
  *s = e == CUDA_SUCCESS               ? "CUDA_SUCCESS"
       : e == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
                                       : "CUDA_ERROR_NOT_SUPPORTED";
  OK;
}
CUresult cuGetErrorString(CUresult e, const char **s) {
  *s = e == CUDA_SUCCESS               ? "no error"
       : e == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory"
                                       : "operation not supported";
  OK;
}
CUresult cuDeviceGetCount(int *n) {
  LOG();
  *n = emu_gpu()->count;
  OK;
}
CUresult cuDeviceGet(CUdevice *d, int i) {
  LOG();
  if (emu_no_device(i)) return CUDA_ERROR_INVALID_DEVICE;
  *d = i;
  OK;
}
CUresult cuDeviceGetName(char *s, int n, CUdevice d) {
  snprintf(s, n, "%s", emu_gpu()->name);
  OK;
}
CUresult cuDeviceGetUuid_v2(CUuuid *u, CUdevice d) {
  memset(u, 0, sizeof *u);
  memcpy(u->bytes, "emulated-gpu-", 13);
  u->bytes[15] = d;
  OK;
}
#undef cuDeviceGetUuid
CUresult cuDeviceGetUuid(CUuuid *u, CUdevice d) { return cuDeviceGetUuid_v2(u, d); }
CUresult cuDeviceTotalMem_v2(size_t *n, CUdevice d) {
  *n = emu_gpu()->usable_bytes;
  OK;
}
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
  LOG();
  if (emu_no_device(d)) return CUDA_ERROR_INVALID_DEVICE;
  emu_attribute(a, d, v);
  OK;
}
CUresult cuDeviceComputeCapability(int *a, int *b, CUdevice d) {
  *a = emu_gpu()->major;
  *b = emu_gpu()->minor;
  OK;
}
CUresult cuDeviceGetPCIBusId(char *s, int n, CUdevice d) {
  snprintf(s, n, "0000:%02x:00.0", d + 1);
  OK;
}
CUresult cuDeviceCanAccessPeer(int *c, CUdevice a, CUdevice b) {
  *c = a != b;
  OK;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) {
  LOG();
  if (emu_no_device(d)) return CUDA_ERROR_INVALID_DEVICE;
  emu_touch_context(d);
  *c = emu_context_of(d);
  OK;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d) { OK; }
CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice d, unsigned f) { OK; }
CUresult cuDevicePrimaryCtxReset_v2(CUdevice d) { OK; }
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *f, int *a) {
  LOG();
  if (emu_no_device(d)) return CUDA_ERROR_INVALID_DEVICE;
  *f = 0;
  *a = emu_context_active(d);
  OK;
}
CUresult cuCtxGetCurrent(CUcontext *c) {
  LOG();
  int d = emu_current_device();
  *c = emu_context_active(d) ? emu_context_of(d) : NULL;
  OK;
}
CUresult cuCtxSetCurrent(CUcontext c) {
  if (c) {
    emu_set_device(device_of(c));
    emu_touch_context(device_of(c));
  }
  OK;
}
CUresult cuCtxPushCurrent_v2(CUcontext c) { return cuCtxSetCurrent(c); }
CUresult cuCtxPopCurrent_v2(CUcontext *c) {
  if (c) *c = emu_context_of(emu_current_device());
  OK;
}
CUresult cuCtxGetDevice(CUdevice *d) {
  *d = emu_current_device();
  OK;
}
CUresult cuCtxSynchronize(void) { OK; }
CUresult cuCtxGetApiVersion(CUcontext c, unsigned *v) {
  *v = CUDA_VERSION;
  OK;
}
CUresult cuCtxGetStreamPriorityRange(int *a, int *b) {
  if (a) *a = 0;
  if (b) *b = -5;
  OK;
}
CUresult cuCtxGetFlags(unsigned *f) {
  *f = 0;
  OK;
}
CUresult cuCtxGetLimit(size_t *v, CUlimit l) {
  *v = 1024;
  OK;
}
CUresult cuCtxSetLimit(CUlimit l, size_t v) { OK; }

/* ---- functions by name */
static void *named(const char *name) {
  static void *self;
  if (!self) {
    Dl_info i;
    dladdr((void *)named, &i);
    self = dlopen(i.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }
  char text[256];
  void *function;
  for (int v = 3; v >= 2; v--) {
    snprintf(text, sizeof text, "%s_v%d", name, v);
    if ((function = dlsym(self, text))) return function;
  }
  return dlsym(self, name);
}
#undef cuGetProcAddress
CUresult cuGetProcAddress_v2(const char *name, void **f, int v, cuuint64_t g,
                             CUdriverProcAddressQueryResult *r) {
  if (emu_tracing >= 2) fprintf(stderr, "emulated GPU: cuGetProcAddress %s\n", name);
  *f = named(name);
  if (r) *r = *f ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *f ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
CUresult cuGetProcAddress(const char *name, void **f, int v, cuuint64_t g) {
  return cuGetProcAddress_v2(name, f, v, g, NULL);
}
