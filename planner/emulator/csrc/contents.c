/* Data that copies and fills wrote to device memory: pieces of at most PLANNER_EMULATED_COPY_BYTES, stored on
 * the host. Kernels write nothing here, and it is not known where they would write, or when a block gets
 * another tensor. So a read gets stored data only if it covers whole pieces, as for a tensor that is copied
 * back unchanged. Numbers of up to 4 bytes read as zeros: losses, flags and counts of elements, which kernels
 * write. Two kinds of numbers can be read although a kernel may have written since: a number that was
 * broadcast, once, since DDP broadcasts the sizes of its buckets and a small model has only one; and an
 * optimizer's count of steps during its step, since a resumed optimizer divides by what it computes from a
 * count that is not 0. */
#define _GNU_SOURCE
#include "core.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  uintptr_t at;
  size_t size;
  char *bytes;
  unsigned reads; /* that still give a number's bytes; later ones give zeros */
} piece;
#define NUMBER 4      /* bytes of a loss, a flag, a count */
static piece *pieces; /* sorted by rising address, without overlaps */
static size_t count, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t limit;
static void read_limit(void) {
  const char *text = getenv("PLANNER_EMULATED_COPY_BYTES");
  limit = text ? strtoull(text, NULL, 10) : 0;
}
static size_t copy_limit(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, read_limit);
  return limit;
}

/* Returns the index of the first piece that ends above the address. */
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
  piece *grown = emu_grown(pieces, &room, count, sizeof(piece));
  if (!grown) {
    free(copy);
    return;
  }
  pieces = grown;
  memcpy(copy, bytes, size);
  memmove(pieces + i + 1, pieces + i, (count - i) * sizeof(piece));
  count++;
  pieces[i] = (piece){at, size, copy, 0};
}
static void cut(uintptr_t at, size_t size) {
  uintptr_t end = at + size;
  size_t i = first_above(at);
  while (i < count && pieces[i].at < end) {
    piece old = pieces[i];
    uintptr_t old_end = old.at + old.size;
    count--;
    memmove(pieces + i, pieces + i + 1, (count - i) * sizeof(piece));
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
/* Reads a range that consists of whole pieces. For any other range, writes zeros and returns false. */
static bool get(char *to, uintptr_t at, size_t size) {
  uintptr_t end = at + size, reached = at;
  size_t first = first_above(at), i = first;
  memset(to, 0, size);
  while (i < count && pieces[i].at == reached && reached < end) reached += pieces[i++].size;
  if (reached != end) return false;
  for (size_t j = first; j < i; to += pieces[j++].size) memcpy(to, pieces[j].bytes, pieces[j].size);
  return true;
}
static piece *whole_piece(uintptr_t at, size_t size) {
  size_t i = first_above(at);
  return i < count && pieces[i].at == at && pieces[i].size == size ? pieces + i : NULL;
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
  piece *number = bytes <= NUMBER ? whole_piece((uintptr_t)from, bytes) : NULL;
  if (bytes > NUMBER || (number && number->reads)) get(to, (uintptr_t)from, bytes);
  else memset(to, 0, bytes);
  if (number && number->reads) number->reads--;
  pthread_mutex_unlock(&lock);
}
void emu_allow_reads(const void *address, size_t bytes, unsigned reads) {
  pthread_mutex_lock(&lock);
  piece *number = bytes <= NUMBER ? whole_piece((uintptr_t)address, bytes) : NULL;
  if (number) number->reads = reads;
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
