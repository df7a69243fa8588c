/* The CUDA Runtime API (cuda_runtime_api.h): errors, devices, memory, streams and events of the described
 * GPU. Functions that the header declares and no file here defines are generated, and return
 * cudaErrorNotSupported. */
#define _GNU_SOURCE
#include "cudart.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local cudaError_t last;
cudaError_t emu_fail(cudaError_t error) {
  if (error && error != cudaErrorNotReady) last = error;
  return error;
}

/* ---- errors, versions, devices */
cudaError_t cudaGetLastError(void) {
  cudaError_t e = last;
  last = cudaSuccess;
  return e;
}
cudaError_t cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorName(cudaError_t e) {
  switch (e) {
  case cudaSuccess: return "cudaSuccess";
  case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
  case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
  case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
  case cudaErrorNoDevice: return "cudaErrorNoDevice";
  case cudaErrorNotSupported: return "cudaErrorNotSupported";
  default: return "cudaErrorUnknown";
  }
}
const char *cudaGetErrorString(cudaError_t e) {
  switch (e) {
  case cudaSuccess: return "no error";
  case cudaErrorMemoryAllocation: return "out of memory";
  case cudaErrorInvalidValue: return "invalid argument";
  case cudaErrorInvalidDevice: return "invalid device ordinal";
  case cudaErrorNoDevice: return "no CUDA-capable device is detected";
  case cudaErrorNotSupported: return "operation not supported";
  case cudaErrorPeerAccessAlreadyEnabled: return "peer access is already enabled";
  default: return "unknown error";
  }
}
cudaError_t cudaDriverGetVersion(int *v) {
  LOG();
  *v = CUDART_VERSION;
  OK;
}
cudaError_t cudaRuntimeGetVersion(int *v) {
  LOG();
  *v = CUDART_VERSION;
  OK;
}
cudaError_t cudaGetDeviceCount(int *n) {
  LOG();
  *n = emu_gpu()->count;
  return *n ? cudaSuccess : emu_fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *d) {
  *d = emu_current_device();
  OK;
}
cudaError_t cudaSetDevice(int d) {
  if (!emu_set_device(d)) return emu_fail(cudaErrorInvalidDevice);
  TOUCH_CONTEXT();
  OK;
}
cudaError_t cudaDeviceSynchronize(void) {
  TOUCH_CONTEXT();
  OK;
}
cudaError_t cudaDeviceReset(void) { OK; }
cudaError_t cudaInitDevice(int d, unsigned f, unsigned g) {
  if (d < 0 || d >= emu_gpu()->count) return emu_fail(cudaErrorInvalidDevice);
  emu_touch_context(d);
  OK;
}
cudaError_t cudaSetDeviceFlags(unsigned f) { OK; }
cudaError_t cudaGetDeviceFlags(unsigned *f) {
  *f = 0;
  OK;
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  LOG();
  if (d < 0 || d >= emu_gpu()->count) return emu_fail(cudaErrorInvalidDevice);
  return emu_attribute(a, d, v) ? cudaSuccess : emu_fail(cudaErrorInvalidValue);
}
static void fill(struct cudaDeviceProp *p, int d) {
  const emu_gpu_t *c = emu_gpu();
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", c->name);
  memcpy(p->uuid.bytes, "emulated-gpu-", 13);
  p->uuid.bytes[15] = d;
  p->totalGlobalMem = c->usable_bytes;
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = c->major;
  p->minor = c->minor;
  p->textureAlignment = 512;
  p->texturePitchAlignment = 32;
  p->multiProcessorCount = c->sm_count;
  p->canMapHostMemory = 1;
  p->concurrentKernels = 1;
  p->pciBusID = d + 1;
  p->asyncEngineCount = 2;
  p->unifiedAddressing = 1;
  p->memoryBusWidth = c->bus_bits;
  p->l2CacheSize = c->l2_bytes;
  p->maxThreadsPerMultiProcessor = c->threads_per_sm;
  p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
  p->sharedMemPerMultiprocessor = c->shared_per_sm;
  p->regsPerMultiprocessor = 65536;
  p->managedMemory = 1;
  p->computePreemptionSupported = p->cooperativeLaunch = 1;
  p->sharedMemPerBlockOptin = c->shared_per_block;
  p->maxBlocksPerMultiProcessor = c->blocks_per_sm;
  p->reservedSharedMemPerBlock = c->shared_reserved;
  p->hostRegisterSupported = p->memoryPoolsSupported = 1;
#if CUDART_VERSION < 13000
  p->clockRate = c->clock_khz;
  p->memoryClockRate = c->memory_clock_khz;
#endif
#if CUDART_VERSION >= 12000
  p->clusterLaunch = c->major >= 9;
#endif
}
#undef cudaGetDeviceProperties /* CUDA 12 defines it with a suffix */
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  LOG();
  if (d < 0 || d >= emu_gpu()->count) return emu_fail(cudaErrorInvalidDevice);
  fill(p, d);
  OK;
}
#if CUDART_VERSION < 13000
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int d) {
  return cudaGetDeviceProperties(p, d);
}
#endif
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) {
  snprintf(s, n, "0000:%02x:00.0", d + 1);
  OK;
}
cudaError_t cudaDeviceGetByPCIBusId(int *d, const char *s) {
  unsigned a = 0, b = 1;
  sscanf(s, "%x:%x", &a, &b);
  *d = (int)b - 1;
  OK;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  OK;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) {
  *can = a != b;
  OK;
}
cudaError_t cudaDeviceEnablePeerAccess(int d, unsigned f) { OK; }
cudaError_t cudaDeviceDisablePeerAccess(int d) { OK; }
cudaError_t cudaDeviceGetLimit(size_t *v, enum cudaLimit l) {
  *v = l == cudaLimitStackSize ? 1024 : 8 << 20;
  OK;
}
cudaError_t cudaDeviceSetLimit(enum cudaLimit l, size_t v) { OK; }
cudaError_t cudaDeviceGetCacheConfig(enum cudaFuncCache *c) {
  *c = 0;
  OK;
}
cudaError_t cudaDeviceSetCacheConfig(enum cudaFuncCache c) { OK; }

/* ---- memory */
cudaError_t cudaMalloc(void **p, size_t n) {
  LOG();
  if (!n) {
    *p = NULL;
    OK;
  }
  *p = emu_alloc(emu_current_device(), n);
  return *p ? cudaSuccess : emu_fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void *p) {
  LOG();
  TOUCH_CONTEXT();
  return !p || emu_free(p) ? cudaSuccess : emu_fail(cudaErrorInvalidValue);
}
cudaError_t cudaMallocManaged(void **p, size_t n, unsigned f) {
  *p = emu_host_alloc(n);
  return *p ? cudaSuccess : emu_fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaMallocPitch(void **p, size_t *pitch, size_t w, size_t h) {
  *pitch = (w + 511) & ~(size_t)511;
  return cudaMalloc(p, *pitch * h);
}
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return cudaMalloc(p, n); }
cudaError_t cudaMallocFromPoolAsync(void **p, size_t n, cudaMemPool_t m, cudaStream_t s) {
  return cudaMalloc(p, n);
}
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) {
  LOG();
  emu_memory_info(emu_current_device(), f, t);
  OK;
}
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) {
  LOG();
  TOUCH_CONTEXT();
  *p = emu_host_alloc(n);
  return *p ? cudaSuccess : emu_fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaMallocHost(void **p, size_t n) { return cudaHostAlloc(p, n, 0); }
cudaError_t cudaFreeHost(void *p) {
  LOG();
  if (p) emu_host_free(p);
  OK;
}
cudaError_t cudaHostRegister(void *p, size_t n, unsigned f) {
  return emu_host_register(p, n) ? cudaSuccess : emu_fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaHostUnregister(void *p) {
  return emu_host_unregister(p) ? cudaSuccess : emu_fail(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned f) {
  *d = h;
  OK;
}
cudaError_t cudaHostGetFlags(unsigned *f, void *p) {
  *f = 0;
  OK;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  LOG();
  memset(a, 0, sizeof *a);
  int d = emu_device_of(p, NULL, NULL);
  a->device = -2;
  if (d >= 0) {
    a->type = cudaMemoryTypeDevice;
    a->device = d;
    a->devicePointer = (void *)p;
  } else if (emu_is_pinned(p)) {
    a->type = cudaMemoryTypeHost;
    a->device = 0;
    a->devicePointer = a->hostPointer = (void *)p;
  } else {
    a->type = cudaMemoryTypeUnregistered;
    a->hostPointer = (void *)p;
  }
  OK;
}
cudaError_t cudaMemcpy(void *t, const void *f, size_t n, enum cudaMemcpyKind k) {
  LOG();
  TOUCH_CONTEXT();
  emu_copy(t, f, n);
  OK;
}
cudaError_t cudaMemcpyAsync(void *t, const void *f, size_t n, enum cudaMemcpyKind k, cudaStream_t s) {
  LOG();
  TOUCH_CONTEXT();
  emu_copy(t, f, n);
  OK;
}
cudaError_t cudaMemcpyPeer(void *t, int td, const void *f, int fd, size_t n) {
  emu_copy(t, f, n);
  OK;
}
cudaError_t cudaMemcpyPeerAsync(void *t, int td, const void *f, int fd, size_t n, cudaStream_t s) {
  LOG();
  emu_copy(t, f, n);
  OK;
}
cudaError_t cudaMemcpy2D(void *t, size_t tp, const void *f, size_t fp, size_t w, size_t h,
                         enum cudaMemcpyKind k) {
  for (size_t i = 0; i < h; i++) emu_copy((char *)t + i * tp, (const char *)f + i * fp, w);
  OK;
}
cudaError_t cudaMemcpy2DAsync(void *t, size_t tp, const void *f, size_t fp, size_t w, size_t h,
                              enum cudaMemcpyKind k, cudaStream_t s) {
  LOG();
  return cudaMemcpy2D(t, tp, f, fp, w, h, k);
}
cudaError_t cudaMemset(void *p, int v, size_t n) {
  LOG();
  TOUCH_CONTEXT();
  emu_fill(p, v, n);
  OK;
}
cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) {
  LOG();
  TOUCH_CONTEXT();
  emu_fill(p, v, n);
  OK;
}
cudaError_t cudaMemset2DAsync(void *p, size_t pitch, int v, size_t w, size_t h, cudaStream_t s) {
  for (size_t i = 0; i < h; i++) emu_fill((char *)p + i * pitch, v, w);
  OK;
}
cudaError_t cudaMemcpyToSymbol(const void *sym, const void *f, size_t n, size_t o, enum cudaMemcpyKind k) {
  OK;
}
cudaError_t cudaMemcpyToSymbolAsync(const void *sym, const void *f, size_t n, size_t o, enum cudaMemcpyKind k,
                                    cudaStream_t s) {
  OK;
}
cudaError_t cudaMemcpyFromSymbol(void *t, const void *sym, size_t n, size_t o, enum cudaMemcpyKind k) {
  memset(t, 0, n);
  OK;
}

/* ---- memory pools, which are treated as plain memory */
static struct pool {
  uint64_t threshold;
} pools[EMU_MAX_GPUS];
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *m, int d) {
  *m = (cudaMemPool_t)&pools[d];
  OK;
}
cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *m, int d) {
  *m = (cudaMemPool_t)&pools[d];
  OK;
}
cudaError_t cudaDeviceSetMemPool(int d, cudaMemPool_t m) { OK; }
cudaError_t cudaMemPoolCreate(cudaMemPool_t *m, const struct cudaMemPoolProps *p) {
  *m = emu_handle();
  OK;
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t m) { OK; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t m, const struct cudaMemAccessDesc *d, size_t n) { OK; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t m, enum cudaMemPoolAttr a, void *v) { OK; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t m, enum cudaMemPoolAttr a, void *v) {
  size_t f, t;
  emu_memory_info(emu_current_device(), &f, &t);
  if (a >= cudaMemPoolAttrReleaseThreshold) *(uint64_t *)v = a == cudaMemPoolAttrReleaseThreshold ? 0 : t - f;
  else *(int *)v = 1;
  OK;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t m, size_t n) { OK; }

/* ---- streams and events */
static cudaError_t stream(cudaStream_t *s, unsigned f, int p) {
  TOUCH_CONTEXT();
  *s = (cudaStream_t)emu_new_stream(f, p);
  OK;
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { return stream(s, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return stream(s, f, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) {
  LOG();
  return stream(s, f, p);
}
cudaError_t cudaStreamDestroy(cudaStream_t s) {
  if ((uintptr_t)s > 2) free(s);
  OK;
}
cudaError_t cudaStreamQuery(cudaStream_t s) { OK; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  LOG();
  OK;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { OK; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) {
  *p = emu_stream_of(s)->priority;
  OK;
}
cudaError_t cudaStreamGetFlags(cudaStream_t s, unsigned *f) {
  *f = emu_stream_of(s)->flags;
  OK;
}
cudaError_t cudaStreamGetId(cudaStream_t s, unsigned long long *id) {
  *id = emu_stream_of(s)->id;
  OK;
}
cudaError_t cudaStreamGetDevice(cudaStream_t s, int *d) {
  *d = emu_stream_of(s)->device;
  OK;
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *u, unsigned g) {
  f(s, cudaSuccess, u);
  OK;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *u) {
  f(u);
  OK;
}
cudaError_t cudaStreamAttachMemAsync(cudaStream_t s, void *p, size_t n, unsigned f) { OK; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) {
  TOUCH_CONTEXT();
  emu_event *v = emu_new(sizeof *v);
  v->flags = f;
  *e = (cudaEvent_t)v;
  OK;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  free(e);
  OK;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  emu_record((emu_event *)e);
  OK;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) {
  return cudaEventRecord(e, s);
}
cudaError_t cudaEventQuery(cudaEvent_t e) { OK; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { OK; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
  *ms = emu_elapsed((emu_event *)a, (emu_event *)b);
  OK;
}
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e) {
  memset(h, 0, sizeof *h);
  OK;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t h) { return cudaEventCreate(e); }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p) {
  void *base = p;
  size_t n = 0;
  if (emu_device_of(p, &base, &n) < 0) return emu_fail(cudaErrorInvalidValue);
  memset(h, 0, sizeof *h);
  memcpy(h, &base, sizeof base);
  memcpy((char *)h + 8, &n, sizeof n);
  OK;
}
cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h,
                                 unsigned f) { /* reserves only addresses for the other process's memory */
  size_t n;
  memcpy(&n, (char *)&h + 8, sizeof n);
  *p = emu_reserve(n);
  emu_bind(*p, emu_current_device());
  OK;
}
cudaError_t cudaIpcCloseMemHandle(void *p) {
  emu_unreserve(p);
  OK;
}
