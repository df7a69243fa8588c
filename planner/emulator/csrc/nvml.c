/* libnvidia-ml: the part of NVML's documented API that torch uses (expandable segments, OOM messages, device
 * counts). */
#include "core.h"
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#define OK return 0
#define INSUFFICIENT_SIZE 7
#define PROCESSES 1024 /* listed at most */
static pthread_mutex_t listing = PTHREAD_MUTEX_INITIALIZER;
typedef struct {
  unsigned long long total, free, used;
} memory;
typedef struct {
  unsigned pid;
  unsigned long long used;
} process;
typedef struct {
  process of;
  unsigned gpu_instance, compute_instance;
} partitioned_process;
int nvmlInit_v2(void) { OK; }
int nvmlInit(void) { OK; }
int nvmlInitWithFlags(unsigned f) { OK; }
int nvmlShutdown(void) { OK; }
const char *nvmlErrorString(int e) { return e ? "Not Supported" : "Success"; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) {
  *v = 13000;
  OK;
}
int nvmlSystemGetCudaDriverVersion(int *v) {
  *v = 13000;
  OK;
}
int nvmlSystemGetDriverVersion(char *s, unsigned n) {
  snprintf(s, n, "580.00");
  OK;
}
int nvmlDeviceGetCount_v2(unsigned *n) {
  *n = emu_gpu()->count;
  OK;
}
static int by_index(unsigned i, void **d) {
  if (i >= (unsigned)emu_gpu()->count) return 2;
  *d = (void *)(uintptr_t)(i + 1);
  OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { return by_index(i, d); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *s, void **d) {
  unsigned a = 0, b = 1;
  sscanf(s, "%x:%x", &a, &b);
  return by_index(b - 1, d);
}
int nvmlDeviceGetHandleByUUID(const char *s, void **d) { return by_index(0, d); }
int nvmlDeviceGetIndex(void *d, unsigned *i) {
  *i = (unsigned)(uintptr_t)d - 1;
  OK;
}
int nvmlDeviceGetName(void *d, char *s, unsigned n) {
  snprintf(s, n, "%s", emu_gpu()->name);
  OK;
}
int nvmlDeviceGetUUID(void *d, char *s, unsigned n) {
  snprintf(s, n, "GPU-656d756c-6174-6564-2d67-70752d0000%02x", (unsigned)(uintptr_t)d - 1);
  OK;
}
int nvmlDeviceGetMemoryInfo(void *d, memory *m) {
  const emu_gpu_t *gpu = emu_gpu(); /* a query creates no context */
  m->total = gpu->total_bytes;
  size_t taken = emu_taken((int)(uintptr_t)d - 1);
  m->free = taken < gpu->usable_bytes ? gpu->usable_bytes - taken : 0;
  m->used = m->total - m->free;
  OK;
}
int nvmlDeviceGetCudaComputeCapability(void *d, int *a, int *b) {
  *a = emu_gpu()->major;
  *b = emu_gpu()->minor;
  OK;
}
/* Lists the processes that have a context on the GPU. The callers' structures begin with a `process` and have
 * `size` bytes. */
static int running(void *d, unsigned *n, void *list, size_t size) {
  static unsigned pids[PROCESSES];
  static size_t used[PROCESSES];
  unsigned room = list ? *n : 0;
  pthread_mutex_lock(&listing);
  *n = (unsigned)emu_processes((int)(uintptr_t)d - 1, PROCESSES, pids, used);
  for (unsigned i = 0; i < *n && *n <= room; i++)
    *(process *)((char *)list + i * size) = (process){pids[i], used[i]};
  pthread_mutex_unlock(&listing);
  return *n > room ? INSUFFICIENT_SIZE : 0;
}
int nvmlDeviceGetComputeRunningProcesses(void *d, unsigned *n, process *p) {
  return running(d, n, p, sizeof(process));
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, partitioned_process *p) {
  int e = running(d, n, p, sizeof(partitioned_process));
  for (unsigned i = 0; !e && i < *n; i++)
    p[i].gpu_instance = p[i].compute_instance = ~0u; /* the GPU is not partitioned (MIG) */
  return e;
}
int nvmlDeviceGetGpuFabricInfoV(void *d, void *info) { OK; } /* the caller set `info` to "not supported" */
int nvmlDeviceGetNvLinkRemoteDeviceType(void *d, unsigned l, void *t) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *d, unsigned l, void *t) { return 3; }
int nvmlDeviceGetNvLinkState(void *d, unsigned l, void *t) { return 3; }
int nvmlDeviceGetP2PStatus(void *a, void *b, int k, int *s) {
  *s = 0;
  OK;
}
