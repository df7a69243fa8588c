/* The CUDA Driver API: device and pinned memory, copies, and virtual memory management, which torch's
 * expandable segments use. */
#define _GNU_SOURCE
#include "driver.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* ---- memory */
CUresult cuMemGetInfo_v2(size_t *f, size_t *t) {
  emu_memory_info(emu_current_device(), f, t);
  OK;
}
CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n) {
  LOG();
  *p = (CUdeviceptr)emu_alloc(emu_current_device(), n);
  return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemFree_v2(CUdeviceptr p) {
  LOG();
  return !p || emu_free((void *)p) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemAllocAsync(CUdeviceptr *p, size_t n, CUstream s) { return cuMemAlloc_v2(p, n); }
CUresult cuMemFreeAsync(CUdeviceptr p, CUstream s) { return cuMemFree_v2(p); }
CUresult cuMemHostAlloc(void **p, size_t n, unsigned f) {
  *p = emu_host_alloc(n);
  return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAllocHost_v2(void **p, size_t n) { return cuMemHostAlloc(p, n, 0); }
CUresult cuMemFreeHost(void *p) {
  emu_host_free(p);
  OK;
}
CUresult cuMemHostRegister_v2(void *p, size_t n, unsigned f) {
  emu_host_register(p, n);
  OK;
}
CUresult cuMemHostUnregister(void *p) {
  emu_host_unregister(p);
  OK;
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *d, void *p, unsigned f) {
  *d = (CUdeviceptr)p;
  OK;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *b, size_t *n, CUdeviceptr p) {
  void *base;
  size_t size;
  if (emu_device_of((void *)p, &base, &size) < 0) return CUDA_ERROR_NOT_FOUND;
  if (b) *b = (CUdeviceptr)base;
  if (n) *n = size;
  OK;
}
CUresult cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p) {
  LOG();
  void *base;
  size_t size;
  int d = emu_device_of((void *)p, &base, &size);
  bool pinned = d < 0 && emu_is_pinned((void *)p);
  if (d < 0 && !pinned) return CUDA_ERROR_INVALID_VALUE;
  switch (a) {
  case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)v = emu_context_of(d < 0 ? 0 : d); OK;
  case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    *(unsigned *)v = pinned ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    OK;
  case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
  case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(CUdeviceptr *)v = p; OK;
  case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)v = d < 0 ? 0 : d; OK;
  case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    if (pinned) return CUDA_ERROR_NOT_SUPPORTED;
    *(CUdeviceptr *)v = (CUdeviceptr)base;
    OK;
  case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    if (pinned) return CUDA_ERROR_NOT_SUPPORTED;
    *(size_t *)v = size;
    OK;
  case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)v = 0; OK;
  case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)v = (unsigned long long)base; OK;
  default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}
CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *a, void **v, CUdeviceptr p) {
  for (unsigned i = 0; i < n; i++) cuPointerGetAttribute(v[i], a[i], p);
  OK;
}
CUresult cuPointerSetAttribute(const void *v, CUpointer_attribute a, CUdeviceptr p) { OK; }
#define COPY(name, ...)                                                                                      \
  CUresult name(__VA_ARGS__) {                                                                               \
    LOG();                                                                                                   \
    emu_copy((void *)t, (void *)f, n);                                                                       \
    OK;                                                                                                      \
  }
COPY(cuMemcpy, CUdeviceptr t, CUdeviceptr f, size_t n)
COPY(cuMemcpyAsync, CUdeviceptr t, CUdeviceptr f, size_t n, CUstream s)
COPY(cuMemcpyHtoD_v2, CUdeviceptr t, const void *f, size_t n)
COPY(cuMemcpyHtoDAsync_v2, CUdeviceptr t, const void *f, size_t n, CUstream s)
COPY(cuMemcpyDtoH_v2, void *t, CUdeviceptr f, size_t n)
COPY(cuMemcpyDtoHAsync_v2, void *t, CUdeviceptr f, size_t n, CUstream s)
COPY(cuMemcpyDtoD_v2, CUdeviceptr t, CUdeviceptr f, size_t n)
COPY(cuMemcpyDtoDAsync_v2, CUdeviceptr t, CUdeviceptr f, size_t n, CUstream s)
CUresult cuMemsetD8_v2(CUdeviceptr p, unsigned char v, size_t n) {
  emu_fill((void *)p, v, n);
  OK;
}
CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char v, size_t n, CUstream s) {
  emu_fill((void *)p, v, n);
  OK;
}
CUresult cuMemsetD32_v2(CUdeviceptr p, unsigned v, size_t n) { OK; }
CUresult cuMemsetD32Async(CUdeviceptr p, unsigned v, size_t n, CUstream s) { OK; }

/* ---- virtual memory management: torch's expandable segments */
typedef struct {
  size_t size;
  int device, refs;
} physical;
CUresult cuMemGetAllocationGranularity(size_t *g, const CUmemAllocationProp *p,
                                       CUmemAllocationGranularity_flags f) {
  *g = 2 << 20;
  OK;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *p,
                     unsigned long long f) {
  LOG();
  if (emu_no_device(p->location.id)) return CUDA_ERROR_INVALID_DEVICE;
  if (!emu_take(p->location.id, n)) return CUDA_ERROR_OUT_OF_MEMORY;
  physical *m = malloc(sizeof *m);
  if (!m) {
    emu_give(p->location.id, n);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *m = (physical){n, p->location.id, 1};
  *h = (CUmemGenericAllocationHandle)m;
  OK;
}
typedef struct {
  CUdeviceptr at;
  physical *memory;
} mapping;
static mapping *mappings;
static size_t mapping_count, mapping_room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void release(physical *m) { /* the caller holds the lock */
  if (--m->refs) return;
  emu_give(m->device, m->size);
  free(m);
}
CUresult cuMemRelease(CUmemGenericAllocationHandle h) {
  LOG();
  pthread_mutex_lock(&lock);
  release((physical *)h);
  pthread_mutex_unlock(&lock);
  OK;
}
CUresult cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t a, CUdeviceptr w, unsigned long long f) {
  LOG();
  *p = (CUdeviceptr)emu_reserve(n);
  return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr p, size_t n) {
  emu_unreserve((void *)p);
  OK;
}
CUresult cuMemMap(CUdeviceptr p, size_t n, size_t o, CUmemGenericAllocationHandle h, unsigned long long f) {
  LOG();
  physical *m = (physical *)h;
  emu_bind((void *)p, m->device);
  pthread_mutex_lock(&lock);
  mapping *grown = emu_grown(mappings, &mapping_room, mapping_count, sizeof(mapping));
  if (grown) {
    mappings = grown;
    m->refs++;
    mappings[mapping_count++] = (mapping){p, m};
  }
  pthread_mutex_unlock(&lock);
  return grown ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemUnmap(CUdeviceptr p, size_t n) {
  LOG();
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < mapping_count;) {
    if (mappings[i].at < p || mappings[i].at >= p + n) {
      i++;
      continue;
    }
    release(mappings[i].memory);
    mappings[i] = mappings[--mapping_count];
  }
  pthread_mutex_unlock(&lock);
  OK;
}
CUresult cuMemSetAccess(CUdeviceptr p, size_t n, const CUmemAccessDesc *d, size_t c) { OK; }
CUresult cuMemGetAccess(unsigned long long *f, const CUmemLocation *l, CUdeviceptr p) {
  *f = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  OK;
}
