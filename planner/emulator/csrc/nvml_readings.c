/* libnvidia-ml: readings of a GPU besides memory. The emulated GPU computes nothing, so its utilization,
 * power, energy and temperature are 0. Readings that a GPU need not support return "not supported". */
#define _GNU_SOURCE
#include "core.h"
#include <sched.h>
#include <stdio.h>
#include <string.h>
#define OK return 0
#define NOT_SUPPORTED 3

typedef struct {
  unsigned version;
  unsigned long long total, reserved, free, used;
} memory_v2;
typedef struct {
  unsigned gpu, memory;
} utilization;
typedef struct {
  char legacy_id[16];
  unsigned domain, bus, device, ids, subsystem;
  char id[32];
} pci;
typedef struct {
  unsigned version, sensor;
  int degrees;
} temperature;

static int index_of(void *d) { return (int)(uintptr_t)d - 1; }

/* ---- memory and processes, in other versions of their functions */
int nvmlDeviceGetMemoryInfo_v2(void *d, memory_v2 *m) {
  const emu_gpu_t *gpu = emu_gpu();
  m->total = gpu->total_bytes;
  m->reserved = gpu->total_bytes - gpu->usable_bytes;
  size_t taken = emu_taken(index_of(d));
  m->used = taken < gpu->usable_bytes ? taken : gpu->usable_bytes;
  m->free = gpu->usable_bytes - m->used;
  OK;
}
#define NONE_RUNNING(name)                                                                                   \
  int name(void *d, unsigned *n, void *p) {                                                                  \
    *n = 0;                                                                                                  \
    OK;                                                                                                      \
  }
NONE_RUNNING(nvmlDeviceGetGraphicsRunningProcesses)
NONE_RUNNING(nvmlDeviceGetGraphicsRunningProcesses_v3)
NONE_RUNNING(nvmlDeviceGetMPSComputeRunningProcesses_v3)

/* ---- load */
int nvmlDeviceGetUtilizationRates(void *d, utilization *u) {
  *u = (utilization){0, 0};
  OK;
}
int nvmlDeviceGetTemperatureV(void *d, temperature *t) {
  t->degrees = 0;
  OK;
}
int nvmlDeviceGetTemperature(void *d, int sensor, unsigned *t) {
  *t = 0;
  OK;
}
int nvmlDeviceGetPowerUsage(void *d, unsigned *milliwatts) {
  *milliwatts = 0;
  OK;
}
int nvmlDeviceGetTotalEnergyConsumption(void *d, unsigned long long *millijoules) {
  *millijoules = 0;
  OK;
}
static int clock_of(int type, unsigned *mhz) { /* type 2 is the memory's clock */
  *mhz = (type == 2 ? emu_gpu()->memory_clock_khz : emu_gpu()->clock_khz) / 1000;
  OK;
}
int nvmlDeviceGetClockInfo(void *d, int type, unsigned *mhz) { return clock_of(type, mhz); }
int nvmlDeviceGetMaxClockInfo(void *d, int type, unsigned *mhz) { return clock_of(type, mhz); }
int nvmlDeviceGetClock(void *d, int type, int which, unsigned *mhz) { return clock_of(type, mhz); }
int nvmlDeviceGetPerformanceState(void *d, int *state) {
  *state = 0;
  OK;
}

/* ---- properties of the GPU */
int nvmlSystemGetNVMLVersion(char *s, unsigned n) {
  snprintf(s, n, "13.580.00");
  OK;
}
int nvmlDeviceGetArchitecture(void *d, unsigned *a) {
  int capability = 10 * emu_gpu()->major + emu_gpu()->minor;
  *a = capability >= 100  ? 10 /* Blackwell, Hopper, Ada, Ampere, Turing, Volta */
       : capability == 90 ? 9
       : capability == 89 ? 8
       : capability >= 80 ? 7
       : capability == 75 ? 6
                          : 5;
  OK;
}
int nvmlDeviceGetPciInfo_v3(void *d, pci *p) {
  memset(p, 0, sizeof *p);
  p->bus = index_of(d) + 1;
  snprintf(p->legacy_id, sizeof p->legacy_id, "0000:%02X:00.0", p->bus);
  snprintf(p->id, sizeof p->id, "00000000:%02X:00.0", p->bus);
  OK;
}
int nvmlDeviceGetMinorNumber(void *d, unsigned *n) {
  *n = index_of(d);
  OK;
}
int nvmlDeviceGetMemoryBusWidth(void *d, unsigned *bits) {
  *bits = emu_gpu()->bus_bits;
  OK;
}
int nvmlDeviceGetComputeMode(void *d, int *mode) {
  *mode = 0;
  OK;
}
int nvmlDeviceGetPersistenceMode(void *d, int *mode) {
  *mode = 0;
  OK;
}
int nvmlDeviceIsMigDeviceHandle(void *d, unsigned *is) {
  *is = 0;
  OK;
}
int nvmlDeviceGetMaxMigDeviceCount(void *d, unsigned *n) {
  *n = 0;
  OK;
}
int nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, int *level) {
  *level = 50; /* NVML_TOPOLOGY_SYSTEM: connected through the link between processors */
  OK;
}
int nvmlDeviceGetCpuAffinity(void *d, unsigned words, unsigned long *set) {
  memset(set, 0, words * sizeof *set);
  sched_getaffinity(0, words * sizeof *set, (cpu_set_t *)set);
  OK;
}
int nvmlDeviceGetCpuAffinityWithinScope(void *d, unsigned words, unsigned long *set, unsigned scope) {
  return nvmlDeviceGetCpuAffinity(d, words, set);
}
int nvmlDeviceSetCpuAffinity(void *d) { OK; }
int nvmlDeviceClearCpuAffinity(void *d) { OK; }

/* ---- readings that consumer GPUs do not support either */
#define LEFT_OPEN(name)                                                                                      \
  int name(void *d) { return NOT_SUPPORTED; }
LEFT_OPEN(nvmlDeviceGetEccMode)
LEFT_OPEN(nvmlDeviceGetMigMode)
LEFT_OPEN(nvmlDeviceGetSerial)
LEFT_OPEN(nvmlDeviceGetBrand)
LEFT_OPEN(nvmlDeviceGetFanSpeed)
LEFT_OPEN(nvmlDeviceGetNumGpuCores)
LEFT_OPEN(nvmlDeviceGetEnforcedPowerLimit)
LEFT_OPEN(nvmlDeviceGetPowerManagementLimit)
LEFT_OPEN(nvmlDeviceGetPowerManagementLimitConstraints)
LEFT_OPEN(nvmlDeviceGetCurrPcieLinkGeneration)
LEFT_OPEN(nvmlDeviceGetCurrPcieLinkWidth)
LEFT_OPEN(nvmlDeviceGetMaxPcieLinkGeneration)
LEFT_OPEN(nvmlDeviceGetMaxPcieLinkWidth)
LEFT_OPEN(nvmlDeviceGetPcieThroughput)
LEFT_OPEN(nvmlDeviceGetBAR1MemoryInfo)
LEFT_OPEN(nvmlDeviceGetCurrentClocksThrottleReasons)
LEFT_OPEN(nvmlDeviceGetEncoderUtilization)
LEFT_OPEN(nvmlDeviceGetDecoderUtilization)
LEFT_OPEN(nvmlDeviceGetProcessUtilization)
LEFT_OPEN(nvmlDeviceGetVbiosVersion)
