/* Streams, opaque handles and the log of calls. Work on a stream is complete as soon as it is submitted. */
#define _GNU_SOURCE
#include "core.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static emu_stream default_streams[EMU_MAX_GPUS];

void *emu_new(size_t bytes) {
  void *made = calloc(1, bytes);
  if (made) return made;
  fprintf(stderr, "emulated GPU: the host has no memory for %zu bytes\n", bytes);
  _exit(2);
}
emu_stream *emu_stream_of(void *handle) {
  return (uintptr_t)handle > 2 ? handle : &default_streams[emu_current_device()];
}
emu_stream *emu_new_stream(unsigned flags, int priority) {
  static uint64_t last_id = 1;
  emu_stream *stream = emu_new(sizeof *stream);
  stream->device = emu_current_device();
  stream->priority = priority;
  stream->flags = flags;
  stream->id = __atomic_add_fetch(&last_id, 1, __ATOMIC_RELAXED);
  return stream;
}
double emu_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}
static uint64_t kernels;
void emu_ran_kernel(void) { __atomic_add_fetch(&kernels, 1, __ATOMIC_RELAXED); }
void emu_record(emu_event *e) { e->kernels = __atomic_load_n(&kernels, __ATOMIC_RELAXED); }
float emu_elapsed(const emu_event *a, const emu_event *b) {
  return b->kernels > a->kernels ? b->kernels - a->kernels : 1;
}
void *emu_handle(void) { return emu_new(4096); }

/* ---- the log */
#define MAX_NAMES 4096
int emu_tracing;
static struct {
  const char *name;
  long calls;
} names[MAX_NAMES];
static size_t count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void emu_log(const char *name) {
  if (emu_tracing >= 2) {
    fprintf(stderr, "emulated GPU: %s\n", name);
    return;
  }
  pthread_mutex_lock(&lock);
  size_t i = 0;
  while (i < count && names[i].name != name) i++;
  if (i == count && count < MAX_NAMES) names[count++].name = name;
  if (i < MAX_NAMES) names[i].calls++;
  pthread_mutex_unlock(&lock);
}
__attribute__((constructor)) static void start(void) {
  const char *text = getenv("PLANNER_EMULATED_TRACE");
  emu_tracing = text ? atoi(text) : 0;
  for (int device = 0; device < EMU_MAX_GPUS; device++)
    default_streams[device] = (emu_stream){.device = device, .id = 1};
}
__attribute__((destructor)) static void print_calls(void) {
  if (emu_tracing != 1 || !count) return;
  fprintf(stderr, "emulated GPU: calls of process %d:", getpid());
  for (size_t i = 0; i < count; i++) fprintf(stderr, " %s=%ld", names[i].name, names[i].calls);
  fprintf(stderr, "\n");
}
