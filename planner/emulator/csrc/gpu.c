/* The described GPU, read once from PLANNER_EMULATED_GPU, a list of KEY=VALUE pairs joined by semicolons. */
#define _GNU_SOURCE
#include "core.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static emu_gpu_t gpu;
static char cudnn_description[2048];
static int kernel_image;
static int machine_gpus[EMU_MAX_GPUS]; /* the machine's indices of the visible GPUs */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const char *text_of(const char *key) {
  const char *all = getenv("PLANNER_EMULATED_GPU");
  size_t length = strlen(key);
  for (const char *at = all; at && *at; at = strchr(at, ';') ? strchr(at, ';') + 1 : NULL)
    if (!strncmp(at, key, length) && at[length] == '=') return at + length + 1;
  return NULL;
}
static size_t number_of(const char *key) {
  const char *text = text_of(key);
  if (!text) {
    fprintf(stderr, "emulated GPU: PLANNER_EMULATED_GPU has no %s; start the program with planner run\n",
            key);
    _Exit(2);
  }
  return strtoull(text, NULL, 10);
}

/* Returns the number of GPUs that CUDA_VISIBLE_DEVICES makes visible, and lists them in `machine_gpus`. It is
 * a list of indices, and the first invalid index ends the list (CUDA C++ Programming Guide). */
static int visible(int count) {
  const char *text = getenv("CUDA_VISIBLE_DEVICES");
  int listed = 0;
  if (!text)
    for (int i = 0; i < count; i++) machine_gpus[i] = i;
  if (!text) return count;
  while (*text && listed < count) {
    char *end;
    long index = strtol(text, &end, 10);
    if (end == text || index < 0 || index >= count) break;
    machine_gpus[listed++] = (int)index;
    text = *end == ',' ? end + 1 : end;
    if (!*end) break;
  }
  return listed;
}

static void describe(void) {
  const char *name = text_of("name");
  snprintf(gpu.name, sizeof gpu.name, "%.*s", name ? (int)strcspn(name, ";") : 0, name ? name : "");
  gpu.major = number_of("major");
  gpu.minor = number_of("minor");
  gpu.sm_count = number_of("sm_count");
  gpu.total_bytes = number_of("total_bytes");
  gpu.usable_bytes = number_of("usable_bytes");
  gpu.context_bytes = number_of("context_bytes");
  gpu.threads_per_sm = number_of("threads_per_sm");
  gpu.blocks_per_sm = number_of("blocks_per_sm");
  gpu.shared_per_block = number_of("shared_per_block");
  gpu.shared_per_sm = number_of("shared_per_sm");
  gpu.shared_reserved = number_of("shared_reserved");
  gpu.l2_bytes = number_of("l2_bytes");
  gpu.clock_khz = number_of("clock_khz");
  gpu.memory_clock_khz = number_of("memory_clock_khz");
  gpu.bus_bits = number_of("bus_bits");
  gpu.ecc = number_of("ecc");
  size_t count = number_of("count");
  gpu.count = visible(count < EMU_MAX_GPUS ? (int)count : EMU_MAX_GPUS);
  kernel_image = 10 * gpu.major + gpu.minor;
  const char *cudnn = text_of("cudnn");
  int length = cudnn ? (int)strcspn(cudnn, ";") : 0;
  snprintf(cudnn_description, sizeof cudnn_description, "%.*s", length, cudnn ? cudnn : "");
}
const emu_gpu_t *emu_gpu(void) {
  pthread_once(&once, describe);
  return &gpu;
}
int emu_machine_gpu(int device) {
  emu_gpu();
  return machine_gpus[device];
}
const char *emu_cudnn_description(void) {
  emu_gpu();
  return cudnn_description;
}

/* Sets the newest kernel image that the GPU can run. A binary image runs on GPUs with its major version and a
 * minor version that is not lower. */
void emu_set_kernel_images(const char *architectures) {
  int capability = 10 * emu_gpu()->major + gpu.minor, newest = 0;
  for (const char *at = architectures; (at = strstr(at, "sm_")); at += 3) {
    int image = atoi(at + 3);
    if (image / 10 == capability / 10 && image <= capability && image > newest) newest = image;
  }
  if (newest) kernel_image = newest;
}
int emu_kernel_image(void) {
  emu_gpu();
  return kernel_image;
}

/* Reads an attribute by its number, which cudaDeviceAttr and CUdevice_attribute share. Attributes that are
 * not listed are 0: not supported. */
bool emu_attribute(int attribute, int device, int *value) {
  const emu_gpu_t *g = emu_gpu();
  switch (attribute) {
  case 1:
  case 2:
  case 3: *value = 1024; break;       /* threads of a block: in all, along x, along y */
  case 4: *value = 64; break;         /* along z */
  case 5: *value = 2147483647; break; /* blocks of a grid along x */
  case 6:
  case 7: *value = 65535; break; /* along y and z */
  case 8: *value = 49152; break; /* shared memory of a block */
  case 9:
  case 12:
  case 82: *value = 65536; break;      /* constant memory; registers of a block, of an SM */
  case 10: *value = 32; break;         /* warp */
  case 11: *value = 2147483647; break; /* pitch */
  case 13: *value = g->clock_khz; break;
  case 14: *value = 512; break; /* alignment of textures */
  case 15:
  case 19:
  case 31:
  case 41: *value = 1; break; /* overlap, mapping, concurrency, unified addresses */
  case 16: *value = g->sm_count; break;
  case 32: *value = g->ecc; break;
  case 33: *value = device + 1; break; /* PCI bus */
  case 36: *value = g->memory_clock_khz; break;
  case 37: *value = g->bus_bits; break;
  case 38: *value = (int)g->l2_bytes; break;
  case 39: *value = g->threads_per_sm; break;
  case 40: *value = 2; break; /* copy engines */
  case 75: *value = g->major; break;
  case 76: *value = g->minor; break;
  case 78:
  case 79:
  case 80: *value = 1; break; /* stream priorities, caches */
  case 81: *value = (int)g->shared_per_sm; break;
  case 83:
  case 90:
  case 95: *value = 1; break;                        /* managed memory, preemption, cooperative launch */
  case 87: *value = 32; break;                       /* single to double precision */
  case 97: *value = (int)g->shared_per_block; break; /* the most that a block may opt into */
  case 102:
  case 103: *value = 1; break; /* virtual memory management, its handles */
  case 106: *value = g->blocks_per_sm; break;
  case 111: *value = (int)g->shared_reserved; break;
  case 115: *value = 1; break;             /* memory pools */
  case 120: *value = g->major >= 9; break; /* launches of clusters */
  default: *value = 0;
  }
  return true;
}
