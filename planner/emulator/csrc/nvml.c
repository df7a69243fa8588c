/* libnvidia-ml: the part of NVML's documented API that torch uses (expandable segments, OOM messages, device
 * counts). */
#include "core.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#define OK return 0
#define INSUFFICIENT_SIZE 7
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
  m->free = gpu->usable_bytes - emu_used((int)(uintptr_t)d - 1);
  m->used = m->total - m->free;
  OK;
}
int nvmlDeviceGetCudaComputeCapability(void *d, int *a, int *b) {
  *a = emu_gpu()->major;
  *b = emu_gpu()->minor;
  OK;
}
/* Lists this process if it has a context on the GPU; other processes are not known. */
static int running(void *d, unsigned *n, process *p) {
  int device = (int)(uintptr_t)d - 1, room = (int)*n;
  *n = emu_context_active(device) ? 1 : 0;
  if (!*n) OK;
  if (!room) return INSUFFICIENT_SIZE;
  p->pid = (unsigned)getpid();
  p->used = emu_used(device);
  OK;
}
int nvmlDeviceGetComputeRunningProcesses(void *d, unsigned *n, process *p) { return running(d, n, p); }
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, partitioned_process *p) {
  int e = running(d, n, p ? &p->of : NULL);
  if (!e && *n) p->gpu_instance = p->compute_instance = ~0u; /* the GPU is not partitioned (MIG) */
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
