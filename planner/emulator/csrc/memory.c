/* Memory without contents. Each device has one range of addresses, in which blocks are placed; the bytes in
 * use are counted separately against its capacity. Nothing is read or written in the range: contents.c keeps
 * the data of small copies. */
#define _GNU_SOURCE
#include "core.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define PAGE (2 * MIB) /* the driver's granularity for large allocations */
#define SPANS 16       /* size of a device's address range, in multiples of its memory */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

typedef struct {
  uintptr_t at;
  size_t size, requested;
} block;
typedef struct {
  uintptr_t base;
  size_t span, used, peak;
  block *blocks; /* sorted by falling address */
  size_t count, room;
} arena;
typedef struct {
  uintptr_t at;
  size_t size;
  int device;
} range;
typedef struct {
  range *items;
  size_t count, room;
} ranges;

static arena arenas[EMU_MAX_GPUS];
static bool active[EMU_MAX_GPUS];
static int (*schedule)(emu_call *call, void *device);
static emu_call *on_context;
static ranges reserved, pinned;
static size_t pinned_bytes;
static _Thread_local int current;

/* ---- ranges of addresses */
static bool add(ranges *list, range one) {
  range *items = emu_grown(list->items, &list->room, list->count, sizeof(range));
  if (!items) return false;
  list->items = items;
  list->items[list->count++] = one;
  return true;
}
static range *find(ranges *list, uintptr_t at) {
  for (size_t i = 0; i < list->count; i++)
    if (at - list->items[i].at < list->items[i].size) return &list->items[i];
  return NULL;
}
static void *map_addresses(size_t bytes) {
  char *at = mmap(NULL, bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? NULL : (void *)(((uintptr_t)at + PAGE - 1) & ~(PAGE - 1));
}

/* ---- devices and their contexts */
int emu_current_device(void) { return current; }
bool emu_set_device(int device) {
  if (device < 0 || device >= emu_gpu()->count) return false;
  current = device;
  return true;
}
bool emu_context_active(int device) {
  pthread_mutex_lock(&lock);
  bool is_active = active[device];
  pthread_mutex_unlock(&lock);
  return is_active;
}
static arena *arena_of(int device) {
  arena *a = &arenas[device];
  if (!a->base) {
    a->span = SPANS * emu_gpu()->usable_bytes;
    a->base = (uintptr_t)map_addresses(a->span);
  }
  return a;
}
/* Changes of the bytes in use are made between these two, so that no other process changes its own. */
static void begin_change(void) {
  pthread_mutex_lock(&lock);
  emu_lock_processes();
}
static void end_change(void) {
  emu_unlock_processes();
  pthread_mutex_unlock(&lock);
}
static void count(int device, size_t bytes) {
  arena *a = &arenas[device];
  a->used += bytes;
  if (a->used > a->peak) a->peak = a->used;
  emu_share_used(device, a->used);
}
static void uncount(int device, size_t bytes) {
  arenas[device].used -= bytes;
  emu_share_used(device, arenas[device].used);
}
static size_t taken(int device) { return arenas[device].used + emu_used_by_others(device); }
static bool fits(int device, size_t bytes) { return taken(device) + bytes <= emu_gpu()->usable_bytes; }
void emu_watch_contexts(int (*schedule_call)(emu_call *call, void *device), emu_call *created) {
  pthread_mutex_lock(&lock);
  schedule = schedule_call;
  on_context = created;
  pthread_mutex_unlock(&lock);
}
void emu_touch_context(int device) {
  if (emu_context_active(device)) return;
  begin_change();
  if (!active[device]) {
    active[device] = true;
    count(device, emu_gpu()->context_bytes);
    if (schedule) schedule(on_context, (void *)(intptr_t)device);
  }
  end_change();
}

/* ---- allocations */
static size_t rounded(size_t bytes) {
  size_t step = bytes >= MIB ? PAGE : 512;
  return ((bytes ? bytes : 1) + step - 1) & ~(step - 1);
}
/* Whether blocks are placed in the lowest gap that is large enough, with PLANNER_EMULATED_ADDRESSES=rising.
 * By default they are placed in the highest gap, since most published runs suggest falling addresses
 * (docs/emulator.md). */
static bool is_rising(void) {
  const char *text = getenv("PLANNER_EMULATED_ADDRESSES");
  return text && !strcmp(text, "rising");
}
static void *place(arena *a, size_t size, size_t requested) {
  uintptr_t step = size >= MIB ? PAGE : 512;
  bool rising = is_rising();
  for (size_t n = 0; n <= a->count; n++) {
    size_t i = rising ? a->count - n : n; /* gap i is above block i; the last is above the base */
    uintptr_t top = i ? a->blocks[i - 1].at : a->base + a->span;
    uintptr_t floor = i < a->count ? a->blocks[i].at + a->blocks[i].size : a->base;
    uintptr_t at = rising ? (floor + step - 1) & ~(step - 1) : (top - size) & ~(step - 1);
    if (top - floor < size || at < floor || at + size > top) continue;
    block *blocks = emu_grown(a->blocks, &a->room, a->count, sizeof(block));
    if (!blocks) return NULL;
    a->blocks = blocks;
    memmove(a->blocks + i + 1, a->blocks + i, (a->count - i) * sizeof(block));
    a->count++;
    a->blocks[i] = (block){at, size, requested};
    return (void *)at;
  }
  return NULL;
}
static block *block_of(arena *a, uintptr_t at) {
  size_t low = 0, high = a->count; /* the first block that begins at or below the address */
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (a->blocks[middle].at > at) low = middle + 1;
    else high = middle;
  }
  return low < a->count && at - a->blocks[low].at < a->blocks[low].size ? &a->blocks[low] : NULL;
}
void *emu_alloc(int device, size_t bytes) {
  emu_touch_context(device);
  size_t size = rounded(bytes);
  begin_change();
  arena *a = arena_of(device);
  void *address = a->base && fits(device, size) ? place(a, size, bytes) : NULL;
  if (address) count(device, size);
  end_change();
  return address;
}
bool emu_free(void *address) {
  bool done = false;
  begin_change();
  for (int d = 0; d < emu_gpu()->count && !done; d++) {
    arena *a = &arenas[d];
    block *b = a->base ? block_of(a, (uintptr_t)address) : NULL;
    if (!b || b->at != (uintptr_t)address) continue;
    emu_forget((void *)b->at, b->size);
    uncount(d, b->size);
    a->count--;
    memmove(b, b + 1, (a->blocks + a->count - b) * sizeof(block));
    done = true;
  }
  end_change();
  return done;
}
bool emu_take(int device, size_t bytes) {
  emu_touch_context(device);
  begin_change();
  bool done = fits(device, bytes);
  if (done) count(device, bytes);
  end_change();
  return done;
}
void emu_give(int device, size_t bytes) {
  begin_change();
  uncount(device, bytes);
  end_change();
}
size_t emu_taken(int device) {
  begin_change();
  size_t bytes = taken(device);
  end_change();
  return bytes;
}
void emu_memory_info(int device, size_t *free_bytes, size_t *usable_bytes) {
  emu_touch_context(device);
  size_t bytes = emu_taken(device);
  *usable_bytes = emu_gpu()->usable_bytes;
  *free_bytes = bytes < *usable_bytes ? *usable_bytes - bytes : 0;
}
int emu_processes(int device, int most, unsigned *pids, size_t *used) {
  begin_change();
  int count = active[device] && most > 0;
  if (count) {
    pids[0] = (unsigned)getpid();
    used[0] = arenas[device].used;
  }
  count += emu_other_processes(device, most - count, pids + count, used + count);
  end_change();
  return count;
}
static size_t read_locked(const size_t *number) {
  pthread_mutex_lock(&lock);
  size_t value = *number;
  pthread_mutex_unlock(&lock);
  return value;
}
size_t emu_used(int device) { return read_locked(&arenas[device].used); }
size_t emu_peak(int device) { return read_locked(&arenas[device].peak); }
void emu_reset_peak(int device) {
  pthread_mutex_lock(&lock);
  arenas[device].peak = arenas[device].used;
  pthread_mutex_unlock(&lock);
}

/* ---- virtual memory management: addresses first, memory later */
void *emu_reserve(size_t bytes) {
  void *at = map_addresses(bytes);
  if (!at) return NULL;
  pthread_mutex_lock(&lock);
  bool done = add(&reserved, (range){(uintptr_t)at, bytes, -1});
  pthread_mutex_unlock(&lock);
  if (!done) munmap(at, bytes);
  return done ? at : NULL;
}
bool emu_unreserve(void *address) {
  pthread_mutex_lock(&lock);
  range *entry = find(&reserved, (uintptr_t)address);
  if (entry) {
    emu_forget((void *)entry->at, entry->size);
    munmap((void *)entry->at, entry->size);
    *entry = reserved.items[--reserved.count];
  }
  pthread_mutex_unlock(&lock);
  return entry != NULL;
}
void emu_bind(void *address, int device) {
  pthread_mutex_lock(&lock);
  range *entry = find(&reserved, (uintptr_t)address);
  if (entry) entry->device = device;
  pthread_mutex_unlock(&lock);
}
int emu_device_of(const void *address, void **base, size_t *bytes) {
  uintptr_t at = (uintptr_t)address, start = 0;
  size_t size = 0;
  int device = -1;
  pthread_mutex_lock(&lock);
  for (int d = 0; d < emu_gpu()->count && device < 0; d++) {
    block *b = arenas[d].base && at - arenas[d].base < arenas[d].span ? block_of(&arenas[d], at) : NULL;
    if (b) {
      device = d;
      start = b->at;
      size = b->requested;
    }
  }
  range *r = device < 0 ? find(&reserved, at) : NULL;
  if (r && r->device >= 0) {
    device = r->device;
    start = r->at;
    size = r->size;
  }
  pthread_mutex_unlock(&lock);
  if (base) *base = (void *)start;
  if (bytes) *bytes = size;
  return device;
}

bool emu_on_device(const void *address) {
  uintptr_t at = (uintptr_t)address;
  bool is_device = false;
  pthread_mutex_lock(&lock);
  for (int d = 0; d < emu_gpu()->count && !is_device; d++)
    is_device = arenas[d].base && at - arenas[d].base < arenas[d].span;
  if (!is_device) is_device = find(&reserved, at) != NULL;
  pthread_mutex_unlock(&lock);
  return is_device;
}

/* ---- pinned host memory, which is real */
void *emu_host_alloc(size_t bytes) {
  size_t size = ((bytes ? bytes : 1) + 4095) & ~(size_t)4095;
  void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return NULL;
  if (emu_host_register(at, size)) return at;
  munmap(at, size);
  return NULL;
}
bool emu_host_register(void *address, size_t bytes) {
  pthread_mutex_lock(&lock);
  bool done = add(&pinned, (range){(uintptr_t)address, bytes, 0});
  if (done) pinned_bytes += bytes;
  pthread_mutex_unlock(&lock);
  return done;
}
static bool unpin(void *address, bool unmap) {
  pthread_mutex_lock(&lock);
  range *entry = find(&pinned, (uintptr_t)address);
  if (entry) {
    pinned_bytes -= entry->size;
    if (unmap) munmap((void *)entry->at, entry->size);
    *entry = pinned.items[--pinned.count];
  }
  pthread_mutex_unlock(&lock);
  return entry != NULL;
}
bool emu_host_free(void *address) { return unpin(address, true); }
bool emu_host_unregister(void *address) { return unpin(address, false); }
bool emu_is_pinned(const void *address) {
  pthread_mutex_lock(&lock);
  bool is_pinned = find(&pinned, (uintptr_t)address) != NULL;
  pthread_mutex_unlock(&lock);
  return is_pinned;
}
size_t emu_pinned_bytes(void) { return read_locked(&pinned_bytes); }
