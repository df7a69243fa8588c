/* What copies and fills wrote to device memory: pieces of at most PLANNER_EMULATED_COPY_BYTES, kept on the
 * host. A tensor that came by a copy reads as it was; what kernels write is not known and reads as zeros. */
#define _GNU_SOURCE
#include "core.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  uintptr_t at;
  size_t size;
  char *bytes;
} piece;
static piece *pieces; /* by rising address; none overlaps another */
static size_t count, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t copy_limit(void) {
  static size_t limit = SIZE_MAX;
  if (limit == SIZE_MAX) {
    const char *text = getenv("PLANNER_EMULATED_COPY_BYTES");
    limit = text ? strtoull(text, NULL, 10) : 0;
  }
  return limit;
}

/* the first piece that ends above the address */
static size_t first_above(uintptr_t at) {
  size_t low = 0, high = count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (pieces[middle].at + pieces[middle].size <= at) low = middle + 1;
    else high = middle;
  }
  return low;
}
static void insert(size_t i, uintptr_t at, const char *bytes, size_t size) {
  char *copy = malloc(size);
  if (!copy) return;
  memcpy(copy, bytes, size);
  if (count == room) pieces = realloc(pieces, (room = room ? 2 * room : 256) * sizeof(piece));
  memmove(pieces + i + 1, pieces + i, (count++ - i) * sizeof(piece));
  pieces[i] = (piece){at, size, copy};
}
static void cut(uintptr_t at, size_t size) {
  uintptr_t end = at + size;
  size_t i = first_above(at);
  while (i < count && pieces[i].at < end) {
    piece old = pieces[i];
    uintptr_t old_end = old.at + old.size;
    memmove(pieces + i, pieces + i + 1, (--count - i) * sizeof(piece));
    if (old_end > end) insert(i, end, old.bytes + (end - old.at), old_end - end);
    if (old.at < at) insert(i++, old.at, old.bytes, at - old.at);
    free(old.bytes);
    if (old_end > end) return;
  }
}
static void put(uintptr_t at, const char *bytes, size_t size) {
  cut(at, size);
  insert(first_above(at), at, bytes, size);
}
/* Reads what is known; the rest is zeros. Returns whether all of it was known. */
static bool get(char *to, uintptr_t at, size_t size) {
  uintptr_t end = at + size, known = 0;
  memset(to, 0, size);
  for (size_t i = first_above(at); i < count && pieces[i].at < end; i++) {
    uintptr_t from = pieces[i].at > at ? pieces[i].at : at, until = pieces[i].at + pieces[i].size;
    if (until > end) until = end;
    memcpy(to + (from - at), pieces[i].bytes + (from - pieces[i].at), until - from);
    known += until - from;
  }
  return known == size;
}

/* ---- blocks of torch's allocator: what is in one goes when it ends, whoever has its memory next */
static uintptr_t *starts; /* of the blocks in use, by rising address */
static size_t started, starts_room;
static size_t first_start_from(uintptr_t at) {
  size_t low = 0, high = started;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (starts[middle] < at) low = middle + 1;
    else high = middle;
  }
  return low;
}
void emu_block_begins(const void *address) {
  pthread_mutex_lock(&lock);
  size_t i = first_start_from((uintptr_t)address);
  if (i == started || starts[i] != (uintptr_t)address) {
    if (started == starts_room)
      starts = realloc(starts, (starts_room = starts_room ? 2 * starts_room : 1024) * sizeof *starts);
    memmove(starts + i + 1, starts + i, (started++ - i) * sizeof *starts);
    starts[i] = (uintptr_t)address;
  }
  pthread_mutex_unlock(&lock);
}
void emu_block_ends(const void *address) {
  uintptr_t at = (uintptr_t)address;
  pthread_mutex_lock(&lock);
  size_t i = first_start_from(at);
  if (i < started && starts[i] == at) {
    memmove(starts + i, starts + i + 1, (--started - i) * sizeof *starts);
    cut(at, (i < started ? starts[i] : UINTPTR_MAX) - at); /* up to the next one nothing is in use */
  }
  pthread_mutex_unlock(&lock);
}

void emu_forget(const void *address, size_t bytes) {
  pthread_mutex_lock(&lock);
  cut((uintptr_t)address, bytes);
  pthread_mutex_unlock(&lock);
}
static void copy_to_device(void *to, const void *from, size_t bytes) {
  pthread_mutex_lock(&lock);
  put((uintptr_t)to, from, bytes);
  pthread_mutex_unlock(&lock);
}
static void copy_to_host(void *to, const void *from, size_t bytes) {
  pthread_mutex_lock(&lock);
  get(to, (uintptr_t)from, bytes);
  pthread_mutex_unlock(&lock);
}
static void copy_on_device(void *to, const void *from, size_t bytes) {
  char *between = malloc(bytes);
  pthread_mutex_lock(&lock);
  if (between && get(between, (uintptr_t)from, bytes)) put((uintptr_t)to, between, bytes);
  else cut((uintptr_t)to, bytes);
  pthread_mutex_unlock(&lock);
  free(between);
}
void emu_copy(void *to, const void *from, size_t bytes) {
  if (!bytes) return;
  bool to_device = emu_on_device(to), from_device = emu_on_device(from);
  if (!to_device && !from_device) memmove(to, from, bytes);
  else if (bytes > copy_limit() && to_device) emu_forget(to, bytes);
  else if (bytes > copy_limit()) memset(to, 0, bytes);
  else if (!to_device) copy_to_host(to, from, bytes);
  else if (!from_device) copy_to_device(to, from, bytes);
  else copy_on_device(to, from, bytes);
}
void emu_fill(void *to, int value, size_t bytes) {
  if (!bytes) return;
  if (!emu_on_device(to)) memset(to, value, bytes);
  else if (bytes > copy_limit()) emu_forget(to, bytes);
  else {
    char *filled = malloc(bytes);
    if (!filled) return;
    memset(filled, value, bytes);
    copy_to_device(to, filled, bytes);
    free(filled);
  }
}
