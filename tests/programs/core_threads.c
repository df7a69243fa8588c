/* Threads that use all of the stand-in libraries' core at once, and leave no
 * memory taken. */
#include "core.h"
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#define THREADS 4
#define ROUNDS 300
#define HELD 8
#define MIB ((size_t)1 << 20)

static unsigned drawn(unsigned *state) {
  return *state = *state * 1664525u + 1013904223u;
}

static void *work(void *number) {
  unsigned state = (unsigned)(uintptr_t)number;
  int device = state % 2;
  emu_set_device(device);
  void *held[HELD] = {0};
  char host[64] = {1};
  for (int round = 0; round < ROUNDS; round++) {
    void **one = &held[drawn(&state) >> 16 & (HELD - 1)];
    if (*one) {
      emu_copy(*one, host, sizeof host);
      emu_copy(host, *one, sizeof host);
      emu_fill(*one, 0, sizeof host / 2);
      emu_allow_reads(*one, 4, 1);
      emu_free(*one);
      *one = NULL;
    } else {
      *one = emu_alloc(device, (drawn(&state) >> 16) * 64);
    }
    void *range = emu_reserve(MIB);
    emu_bind(range, device);
    emu_device_of(range, NULL, NULL);
    emu_unreserve(range);
    void *pinned = emu_host_alloc(4096);
    emu_is_pinned(pinned);
    emu_host_free(pinned);
    if (emu_take(device, MIB))
      emu_give(device, MIB);
    size_t free_bytes, usable_bytes;
    emu_memory_info(device, &free_bytes, &usable_bytes);
    size_t used = emu_used(device); /* read first: other threads raise both */
    if (emu_peak(device) < used)
      return "the peak is below the memory in use";
    emu_stream *stream = emu_new_stream(0, 0);
    emu_stream_of(stream);
    emu_stream_of(NULL);
    emu_event event;
    emu_ran_kernel();
    emu_record(&event);
    emu_log("work");
    free(stream);
  }
  for (int i = 0; i < HELD; i++)
    if (held[i])
      emu_free(held[i]);
  return NULL;
}

int main(void) {
  pthread_t threads[THREADS];
  for (uintptr_t i = 0; i < THREADS; i++)
    pthread_create(&threads[i], NULL, work, (void *)i);
  for (int i = 0; i < THREADS; i++) {
    void *problem;
    pthread_join(threads[i], &problem);
    if (problem)
      return fprintf(stderr, "%s\n", (char *)problem), 1;
  }
  for (int device = 0; device < 2; device++)
    if (emu_used(device) != emu_gpu()->context_bytes)
      return fprintf(stderr, "memory is left\n"), 1;
  return emu_pinned_bytes() != 0;
}
