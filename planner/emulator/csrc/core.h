/* What the stand-in libraries of one process share: the described GPU, its memory, streams and handles.
 * Nothing here depends on NVIDIA's headers. All functions may be called from any thread. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define EMU_MAX_GPUS 64

void *emu_new(size_t bytes); /* zeros; ends the process if the host has no memory */

/* Returns an array with room for one more item of `size` bytes; NULL without memory, the array as it was. */
static inline void *emu_grown(void *items, size_t *room, size_t count, size_t size) {
  if (count < *room) return items;
  size_t more = *room ? 2 * *room : 256;
  void *grown = realloc(items, more * size);
  if (grown) *room = more;
  return grown;
}

/* ---- the GPU, as PLANNER_EMULATED_GPU describes it (planner/emulator/gpu.py writes that) */
typedef struct {
  char name[128];
  int count; /* visible GPUs of this kind */
  int major, minor, sm_count;
  size_t total_bytes;   /* as nvidia-smi shows it */
  size_t usable_bytes;  /* as the CUDA runtime shows it */
  size_t context_bytes; /* taken by a CUDA context on each GPU */
  int threads_per_sm, blocks_per_sm;
  size_t shared_per_block, shared_per_sm, shared_reserved;
  size_t l2_bytes;
  int clock_khz, memory_clock_khz, bus_bits, ecc;
} emu_gpu_t;
const emu_gpu_t *emu_gpu(void);
const char *emu_cudnn_description(void); /* JSON of cuDNN's device properties */
bool emu_attribute(int attribute, int device,
                   int *value); /* numbers of cudaDeviceAttr and CUdevice_attribute */
int emu_kernel_image(void);     /* the image that the GPU would run, such as 86 on compute capability 8.9 */
void emu_set_kernel_images(const char *architectures); /* "sm_75 sm_80 ...", the images in torch's build */

/* ---- the calling thread's GPU, and its context */
int emu_current_device(void);
bool emu_set_device(int device); /* false: no such device */
bool emu_context_active(int device);
void emu_touch_context(int device); /* create the context where there is none yet */

/* ---- device memory; NULL or false where the capacity is spent */
void *emu_alloc(int device, size_t bytes);
bool emu_free(void *address);
bool emu_take(int device, size_t bytes); /* physical memory that has no address yet */
void emu_give(int device, size_t bytes);
void *emu_reserve(size_t bytes); /* addresses that have no memory yet */
bool emu_unreserve(void *address);
void emu_bind(void *address, int device); /* the reserved range is on this device from now on */
void emu_memory_info(int device, size_t *free_bytes, size_t *usable_bytes);
size_t emu_used(int device); /* with the context */
size_t emu_peak(int device); /* the most that `emu_used` was since `emu_reset_peak` */
void emu_reset_peak(int device);
int emu_device_of(const void *address, void **base, size_t *bytes); /* -1: not on a device */
bool emu_on_device(const void *address); /* an address of a device, whether memory is there or not */

/* ---- pinned host memory */
void *emu_host_alloc(size_t bytes);
bool emu_host_free(void *address);
bool emu_host_register(void *address, size_t bytes); /* false: the host has no memory */
bool emu_host_unregister(void *address);
bool emu_is_pinned(const void *address);
size_t emu_pinned_bytes(void);

/* ---- contents: device memory reads as zeros, but for what copies of at most PLANNER_EMULATED_COPY_BYTES put
 * there */
void emu_copy(void *to, const void *from, size_t bytes);
void emu_fill(void *to, int value, size_t bytes);
void emu_mark_sent(const void *address, size_t bytes); /* a number, which then reads once as it was */
void emu_forget(const void *address, size_t bytes);    /* what is there reads as zeros from now on */

/* ---- streams and events; the runtime and the driver share their handles */
typedef struct {
  int device, priority, capturing;
  unsigned flags;
  void *graph;
  uint64_t id;
} emu_stream;
typedef struct {
  unsigned flags;
  uint64_t kernels; /* launched before it */
} emu_event;
emu_stream *emu_stream_of(void *handle); /* also for the default streams 0, 1 and 2 */
emu_stream *emu_new_stream(unsigned flags, int priority);
double emu_now(void);
void emu_ran_kernel(void); /* or a graph, or a plan of cuDNN */
void emu_record(emu_event *e);
/* the milliseconds between two events: one for each kernel between them, and one if there is none. What
 * PyTorch chooses by timing (plans of cuDNN, padding of products, configurations of Triton's kernels) then
 * depends neither on the host nor on its load */
float emu_elapsed(const emu_event *a, const emu_event *b);
void *emu_handle(void); /* an opaque object into which nobody looks */

/* ---- calls by name, counted where PLANNER_EMULATED_TRACE=1, printed as they come where it is 2 */
extern int emu_tracing;
void emu_log(const char *name);
#define LOG()                                                                                                \
  do {                                                                                                       \
    if (__builtin_expect(emu_tracing, 0)) emu_log(__func__);                                                 \
  } while (0)
