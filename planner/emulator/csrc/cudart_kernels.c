/* The CUDA Runtime API: kernels and their attributes and occupancy, variables on the device, and the driver's
 * functions by name. Launches of kernels do nothing. Entry points that the compiler calls are from
 * crt/host_runtime.h. */
#define _GNU_SOURCE
#include "cudart.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- kernels */
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *s);
static _Thread_local struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} configs[16];
static _Thread_local int depth;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *s) {
  if (depth < 16) {
    configs[depth].grid = grid;
    configs[depth].block = block;
    configs[depth].shared = shared;
    configs[depth].stream = s;
    depth++;
  }
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *s) {
  if (depth) {
    depth--;
    *grid = configs[depth].grid;
    *block = configs[depth].block;
    *shared = configs[depth].shared;
    *(void **)s = configs[depth].stream;
  }
  OK;
}
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) {
  LOG();
  TOUCH_CONTEXT();
  emu_ran_kernel();
  OK;
}
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) {
  LOG();
  TOUCH_CONTEXT();
  emu_ran_kernel();
  OK;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) {
  LOG();
  TOUCH_CONTEXT();
  emu_ran_kernel();
  OK;
}
#if CUDART_VERSION >= 12010
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) {
  *k = (cudaKernel_t)f;
  OK;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) {
  LOG();
  TOUCH_CONTEXT();
  emu_ran_kernel();
  OK;
}
cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s) {
  emu_ran_kernel();
  OK;
}
cudaError_t cudaGetKernel(cudaKernel_t *k, const void *f) {
  *k = (cudaKernel_t)f;
  OK;
}
#endif
cudaError_t cudaGetFuncBySymbol(cudaFunction_t *k, const void *f) {
  *k = (cudaFunction_t)f;
  OK;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  LOG();
  memset(a, 0, sizeof *a);
  const emu_gpu_t *c = emu_gpu();
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = emu_kernel_image();
  a->maxDynamicSharedSizeBytes = 49152;
  a->preferredShmemCarveout = -1;
  OK;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { OK; }
cudaError_t cudaFuncSetCacheConfig(const void *f, enum cudaFuncCache c) { OK; }
cudaError_t cudaFuncGetName(const char **n, const void *f) {
  *n = "kernel";
  OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block,
                                                                   size_t shared, unsigned g) {
  LOG();
  const emu_gpu_t *c = emu_gpu(); /* limits: threads, blocks, dynamic shared memory; registers are unknown */
  int most = block > 0 ? c->threads_per_sm / ((block + 31) / 32 * 32) : 0;
  if (most > c->blocks_per_sm) most = c->blocks_per_sm;
  size_t each = shared + c->shared_reserved;
  if (each && (size_t)most > c->shared_per_sm / each) most = c->shared_per_sm / each;
  *n = most;
  OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, block, shared, 0);
}
cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t *n, const void *f, int blocks, int block) {
  *n = 49152;
  OK;
}
cudaError_t cudaOccupancyMaxActiveClusters(int *n, const void *f, const cudaLaunchConfig_t *c) {
  *n = emu_gpu()->sm_count / 2;
  OK;
}
cudaError_t cudaOccupancyMaxPotentialClusterSize(int *n, const void *f, const cudaLaunchConfig_t *c) {
  *n = 8;
  OK;
}
#if CUDART_VERSION >= 12080
cudaError_t cudaLibraryLoadData(cudaLibrary_t *l, const void *c, enum cudaJitOption *o, void **v, unsigned n,
                                enum cudaLibraryOption *p, void **w, unsigned m) {
  *l = emu_handle();
  OK;
}
cudaError_t cudaLibraryUnload(cudaLibrary_t l) { OK; }
cudaError_t cudaLibraryGetKernel(cudaKernel_t *k, cudaLibrary_t l, const char *n) {
  *k = emu_handle();
  OK;
}
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t k, enum cudaFuncAttribute a, int v, int d) { OK; }
#endif
/* the compiler's registration of kernels and variables */
void **__cudaRegisterFatBinary(void *f) {
  static void *one;
  return &one;
}
void __cudaRegisterFatBinaryEnd(void **h) {}
void __cudaUnregisterFatBinary(void **h) {}
char __cudaInitModule(void **h) { return 1; }
void __cudaRegisterFunction(void **h, const char *host, char *device, const char *name, int limit, void *tid,
                            void *bid, dim3 *b, dim3 *g, int *w) {}
typedef struct {
  const void *host;
  size_t size;
  void *at[EMU_MAX_GPUS];
} variable;
static variable *vars;
static size_t n_vars, var_room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
void __cudaRegisterVar(void **h, char *host, char *device, const char *name, int ext, size_t size,
                       int constant, int global) {
  pthread_mutex_lock(&lock);
  variable *grown = emu_grown(vars, &var_room, n_vars, sizeof(variable));
  if (grown) {
    vars = grown;
    vars[n_vars++] = (variable){.host = host, .size = size};
  }
  pthread_mutex_unlock(&lock);
}
void __cudaRegisterManagedVar(void **h, void **host, char *device, const char *name, int ext, size_t size,
                              int constant, int global) {
  if (host && !*host) *host = emu_new(size);
}
cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) {
  int d = emu_current_device();
  *p = NULL;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < n_vars && !*p; i++)
    if (vars[i].host == symbol) {
      if (!vars[i].at[d]) {
        vars[i].at[d] = emu_reserve(vars[i].size);
        if (vars[i].at[d]) emu_bind(vars[i].at[d], d);
      }
      *p = vars[i].at[d];
    }
  pthread_mutex_unlock(&lock);
  return *p ? cudaSuccess : emu_fail(cudaErrorInvalidSymbol);
}
cudaError_t cudaGetSymbolSize(size_t *n, const void *symbol) {
  *n = 0;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < n_vars; i++)
    if (vars[i].host == symbol) *n = vars[i].size;
  pthread_mutex_unlock(&lock);
  OK;
}

/* ---- the driver's functions by name, from the stand-in libcuda.so.1 */
static void *library;
static void open_driver(void) { library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL); }
static void *driver(const char *name) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, open_driver);
  if (!library) return NULL;
  char text[256];
  void *symbol;
  for (int v = 3; v >= 2; v--) {
    snprintf(text, sizeof text, "%s_v%d", name, v);
    if ((symbol = dlsym(library, text))) return symbol;
  }
  return dlsym(library, name);
}
static cudaError_t entry(const char *name, void **f, enum cudaDriverEntryPointQueryResult *r) {
  *f = driver(name);
  if (r) *r = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *f || r ? cudaSuccess : emu_fail(cudaErrorSymbolNotFound);
}
#undef cudaGetDriverEntryPoint
cudaError_t cudaGetDriverEntryPoint(const char *name, void **f, unsigned long long g,
                                    enum cudaDriverEntryPointQueryResult *r) {
  LOG();
  return entry(name, f, r);
}
#if CUDART_VERSION >= 12050
#undef cudaGetDriverEntryPointByVersion
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long long g,
                                             enum cudaDriverEntryPointQueryResult *r) {
  LOG();
  return entry(name, f, r);
}
#endif
