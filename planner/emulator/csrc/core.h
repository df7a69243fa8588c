/* Functions that all stand-in libraries of a process share: the described GPU, its memory, streams and
 * handles. Nothing here depends on NVIDIA's headers. All functions may be called from any thread. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define EMU_MAX_GPUS 64

void *emu_new(size_t bytes); /* zeros; ends the process if the host has no memory */

/* Returns the array, grown if needed to hold one more item of `size` bytes; NULL if the host has no memory,
 * and the array is unchanged. */
static inline void *emu_grown(void *items, size_t *room, size_t count, size_t size) {
  if (count < *room) return items;
  size_t more = *room ? 2 * *room : 256;
  void *grown = realloc(items, more * size);
  if (grown) *room = more;
  return grown;
}

/* ---- the GPU that PLANNER_EMULATED_GPU describes (planner/emulator/gpu.py writes the variable) */
typedef struct {
  char name[128];
  int count; /* visible GPUs of this kind */
  int major, minor, sm_count;
  size_t total_bytes;   /* as nvidia-smi reports it */
  size_t usable_bytes;  /* as the CUDA runtime reports it */
  size_t context_bytes; /* taken by a CUDA context on each GPU */
  int threads_per_sm, blocks_per_sm;
  size_t shared_per_block, shared_per_sm, shared_reserved;
  size_t l2_bytes;
  int clock_khz, memory_clock_khz, bus_bits, ecc;
} emu_gpu_t;
const emu_gpu_t *emu_gpu(void);
int emu_machine_gpu(int device);         /* the machine's index of a GPU that the process sees */
const char *emu_cudnn_description(void); /* JSON of cuDNN's device properties */
bool emu_attribute(int attribute, int device,
                   int *value); /* numbers of cudaDeviceAttr and CUdevice_attribute */
int emu_kernel_image(void);     /* the binary image that the GPU runs, such as 86 on compute capability 8.9 */
void emu_set_kernel_images(const char *architectures); /* "sm_75 sm_80 ...", the images in torch's build */

/* ---- the calling thread's GPU, and its context */
int emu_current_device(void);
bool emu_set_device(int device); /* false: no such device */
bool emu_context_active(int device);
void emu_touch_context(int device); /* creates the context if there is none yet */
typedef int emu_call(void *device);
/* Has `created` scheduled by `schedule` for each context from now on. Its caller may hold locks of PyTorch's,
 * so it must not run Python at once: `schedule` is Py_AddPendingCall. */
void emu_watch_contexts(int (*schedule)(emu_call *call, void *device), emu_call *created);

/* ---- device memory; functions return NULL or false if the capacity is exhausted */
void *emu_alloc(int device, size_t bytes);
bool emu_free(void *address);
bool emu_take(int device, size_t bytes); /* counts physical memory that has no address yet */
void emu_give(int device, size_t bytes);
void *emu_reserve(size_t bytes); /* returns addresses that have no memory yet */
bool emu_unreserve(void *address);
void emu_bind(void *address, int device); /* assigns the reserved range to a device */
void emu_memory_info(int device, size_t *free_bytes, size_t *usable_bytes);
size_t emu_used(int device);  /* by this process, its context included */
size_t emu_taken(int device); /* by all processes of the run */
/* Lists the processes that have a context on a GPU, this one first; returns their number, at most `most`. */
int emu_processes(int device, int most, unsigned *pids, size_t *used);
size_t emu_peak(int device); /* the maximum of `emu_used` since `emu_reset_peak` */
void emu_reset_peak(int device);
int emu_device_of(const void *address, void **base, size_t *bytes); /* -1: not on a device */
bool emu_on_device(const void *address); /* whether an address is a device's, with memory or without */

/* ---- the other processes of the run; called between `emu_lock_processes` and `emu_unlock_processes` */
void emu_lock_processes(void);
void emu_unlock_processes(void);
size_t emu_used_by_others(int device);
void emu_share_used(int device, size_t used); /* tells the others what this process takes */
int emu_other_processes(int device, int most, unsigned *pids, size_t *used);

/* ---- pinned host memory */
void *emu_host_alloc(size_t bytes);
bool emu_host_free(void *address);
bool emu_host_register(void *address, size_t bytes); /* false: the host has no memory */
bool emu_host_unregister(void *address);
bool emu_is_pinned(const void *address);
size_t emu_pinned_bytes(void);

/* ---- contents: device memory reads as zeros, except for data that copies of at most
 * PLANNER_EMULATED_COPY_BYTES put there */
void emu_copy(void *to, const void *from, size_t bytes);
void emu_fill(void *to, int value, size_t bytes);
void emu_allow_reads(const void *address, size_t bytes, unsigned reads); /* of a stored number */
void emu_forget(const void *address, size_t bytes); /* lets the range read as zeros from now on */

/* ---- streams and events; the runtime and the driver share their handles */
typedef struct {
  int device, priority, capturing;
  unsigned flags;
  void *graph;
  uint64_t id;
} emu_stream;
typedef struct {
  unsigned flags;
  uint64_t kernels; /* number of kernels launched before the event */
} emu_event;
emu_stream *emu_stream_of(void *handle); /* also for the default streams 0, 1 and 2 */
emu_stream *emu_new_stream(unsigned flags, int priority);
double emu_now(void);
void emu_ran_kernel(void); /* counts a launch of a kernel, a graph, or a plan of cuDNN */
void emu_record(emu_event *e);
/* Returns the milliseconds between two events: one for each kernel launched between them, at least one. So
 * PyTorch's choices by timing (plans of cuDNN, padding of products, configurations of Triton's kernels) do
 * not depend on the host or its load. */
float emu_elapsed(const emu_event *a, const emu_event *b);
void *emu_handle(void); /* a new opaque object, whose contents nothing reads */

/* ---- the log of calls by name: counted if PLANNER_EMULATED_TRACE=1, printed at once if it is 2 */
extern int emu_tracing;
void emu_log(const char *name);
#define LOG()                                                                                                \
  do {                                                                                                       \
    if (__builtin_expect(emu_tracing, 0)) emu_log(__func__);                                                 \
  } while (0)
