/* The CUDA Driver API: streams, events, modules and kernels. Launches of kernels do nothing. */
#define _GNU_SOURCE
#include "driver.h"
#include <stdlib.h>
#include <string.h>

/* ---- streams and events */
static CUresult new_stream(CUstream *s, unsigned f, int p) {
  *s = (CUstream)emu_new_stream(f, p);
  OK;
}
CUresult cuStreamCreate(CUstream *s, unsigned f) { return new_stream(s, f, 0); }
CUresult cuStreamCreateWithPriority(CUstream *s, unsigned f, int p) { return new_stream(s, f, p); }
CUresult cuStreamDestroy_v2(CUstream s) {
  if ((uintptr_t)s > 2) free(s);
  OK;
}
CUresult cuStreamSynchronize(CUstream s) { OK; }
CUresult cuStreamQuery(CUstream s) { OK; }
CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned f) { OK; }
CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *c) {
  *c = emu_stream_of(s)->capturing;
  OK;
}
CUresult cuStreamGetCtx(CUstream s, CUcontext *c) {
  *c = emu_context_of(emu_stream_of(s)->device);
  OK;
}
CUresult cuStreamGetPriority(CUstream s, int *p) {
  *p = emu_stream_of(s)->priority;
  OK;
}
CUresult cuStreamWriteValue32_v2(CUstream s, CUdeviceptr p, cuuint32_t v, unsigned f) { OK; }
CUresult cuStreamWaitValue32_v2(CUstream s, CUdeviceptr p, cuuint32_t v, unsigned f) { OK; }
CUresult cuLaunchHostFunc(CUstream s, CUhostFn f, void *u) {
  f(u);
  OK;
}
CUresult cuEventCreate(CUevent *e, unsigned f) {
  *e = emu_new(sizeof(emu_event));
  OK;
}
CUresult cuEventDestroy_v2(CUevent e) {
  free(e);
  OK;
}
CUresult cuEventRecord(CUevent e, CUstream s) {
  emu_record((emu_event *)e);
  OK;
}
CUresult cuEventQuery(CUevent e) { OK; }
CUresult cuEventSynchronize(CUevent e) { OK; }
#undef cuEventElapsedTime
CUresult cuEventElapsedTime(float *ms, CUevent a, CUevent b) {
  *ms = emu_elapsed((emu_event *)a, (emu_event *)b);
  OK;
}
CUresult cuEventElapsedTime_v2(float *ms, CUevent a, CUevent b) { return cuEventElapsedTime(ms, a, b); }

/* ---- modules and kernels, which do nothing */
CUresult cuModuleLoad(CUmodule *m, const char *n) {
  *m = emu_handle();
  OK;
}
CUresult cuModuleLoadData(CUmodule *m, const void *i) {
  LOG();
  *m = emu_handle();
  OK;
}
CUresult cuModuleLoadDataEx(CUmodule *m, const void *i, unsigned n, CUjit_option *o, void **v) {
  LOG();
  *m = emu_handle();
  OK;
}
CUresult cuModuleLoadFatBinary(CUmodule *m, const void *i) {
  *m = emu_handle();
  OK;
}
CUresult cuModuleUnload(CUmodule m) {
  free(m);
  OK;
}
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *n) {
  LOG();
  *f = emu_handle();
  OK;
}
CUresult cuModuleGetGlobal_v2(CUdeviceptr *p, size_t *n, CUmodule m, const char *s) {
  static void *at;
  if (!at) at = emu_reserve(1 << 20);
  if (p) *p = (CUdeviceptr)at;
  if (n) *n = 8;
  OK;
}
CUresult cuLibraryLoadData(CUlibrary *l, const void *c, CUjit_option *o, void **v, unsigned n,
                           CUlibraryOption *p, void **w, unsigned m) {
  *l = emu_handle();
  OK;
}
CUresult cuLibraryUnload(CUlibrary l) { OK; }
CUresult cuLibraryGetKernel(CUkernel *k, CUlibrary l, const char *n) {
  *k = emu_handle();
  OK;
}
CUresult cuLibraryGetModule(CUmodule *m, CUlibrary l) {
  *m = emu_handle();
  OK;
}
CUresult cuKernelGetFunction(CUfunction *f, CUkernel k) {
  *f = (CUfunction)k;
  OK;
}
CUresult cuKernelSetAttribute(CUfunction_attribute a, int v, CUkernel k, CUdevice d) { OK; }
static int function_attribute(CUfunction_attribute a) {
  switch (a) {
  case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
  case CU_FUNC_ATTRIBUTE_NUM_REGS: return 32;
  case CU_FUNC_ATTRIBUTE_PTX_VERSION:
  case CU_FUNC_ATTRIBUTE_BINARY_VERSION: return 10 * emu_gpu()->major + emu_gpu()->minor;
  case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: return 49152;
  default: return 0;
  }
}
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) {
  LOG();
  *v = function_attribute(a);
  OK;
}
CUresult cuKernelGetAttribute(int *v, CUfunction_attribute a, CUkernel k, CUdevice d) {
  *v = function_attribute(a);
  OK;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { OK; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { OK; }
CUresult cuFuncGetModule(CUmodule *m, CUfunction f) {
  *m = emu_handle();
  OK;
}
CUresult cuLaunchKernel(CUfunction f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g,
                        unsigned m, CUstream s, void **p, void **x) {
  LOG();
  emu_ran_kernel();
  OK;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **x) {
  LOG();
  emu_ran_kernel();
  OK;
}
CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e,
                                   unsigned g, unsigned m, CUstream s, void **p) {
  LOG();
  emu_ran_kernel();
  OK;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int block, size_t shared) {
  *n = block > 0 ? emu_gpu()->threads_per_sm / block : 0;
  OK;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, CUfunction f, int block, size_t shared,
                                                              unsigned g) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(n, f, block, shared);
}
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) {
  *n = emu_gpu()->sm_count / 2;
  OK;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *m, CUtensorMapDataType t, cuuint32_t r, void *a,
                                const cuuint64_t *d, const cuuint64_t *s, const cuuint32_t *b,
                                const cuuint32_t *e, CUtensorMapInterleave i, CUtensorMapSwizzle w,
                                CUtensorMapL2promotion l, CUtensorMapFloatOOBfill f) {
  memset(m, 0, sizeof *m);
  OK;
}
