/* The memory that all processes of a run take on each of the machine's GPUs. The processes share a file in
 * the folder of their records, where each has a slot. Record locks of the kernel on the file's bytes tell
 * which slots have a living owner, and let one process at a time take memory; they end with the process,
 * however it ends. All functions are called under the lock of memory.c. Without a folder nothing is shared.
 */
#define _GNU_SOURCE
#include "core.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define PROCESSES 1024
typedef struct {
  int64_t pid;
  size_t used[EMU_MAX_GPUS];
} slot;
typedef struct {
  size_t peak[EMU_MAX_GPUS]; /* of all processes together; planner/emulator/record.py reads it */
  int64_t count;             /* slots that were ever taken */
  slot slots[PROCESSES];
} table;

static table *shared;
static slot *own;
static pid_t owner; /* of `own`: a fork takes a slot for itself */
static int file = -1;

static struct flock byte_lock(short kind, long at) {
  return (struct flock){.l_type = kind, .l_whence = SEEK_SET, .l_start = at, .l_len = 1};
}
static bool lock_byte(long at, bool waits) {
  struct flock lock = byte_lock(F_WRLCK, at);
  int done;
  while ((done = fcntl(file, waits ? F_SETLKW : F_SETLK, &lock)) < 0 && errno == EINTR && waits) continue;
  return done == 0;
}
static long byte_of(const slot *s) { return 1 + (s - shared->slots); } /* byte 0: the whole table */
static bool is_alive(const slot *s) {
  struct flock lock = byte_lock(F_WRLCK, byte_of(s));
  return s == own || (s->pid && !fcntl(file, F_GETLK, &lock) && lock.l_type != F_UNLCK);
}

static void map_table(void) {
  char path[4096];
  const char *folder = getenv("PLANNER_EMULATED_RECORDS");
  if (!folder || (size_t)snprintf(path, sizeof path, "%s/gpus", folder) >= sizeof path) return;
  file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof(table))) return;
  void *at = mmap(NULL, sizeof(table), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at != MAP_FAILED) shared = at;
}
static void take_slot(void) {
  own = NULL;
  owner = getpid();
  for (int i = 0; i < PROCESSES && !own; i++) {
    slot *s = &shared->slots[i];
    if (is_alive(s) || !lock_byte(byte_of(s), false)) continue;
    *s = (slot){.pid = owner};
    if (shared->count <= i) shared->count = i + 1;
    own = s;
  }
}
void emu_lock_processes(void) {
  static bool tried;
  if (!tried) map_table();
  tried = true;
  if (!shared || !lock_byte(0, true)) return;
  if (owner != getpid()) take_slot();
}
void emu_unlock_processes(void) {
  struct flock lock = byte_lock(F_UNLCK, 0);
  if (shared) fcntl(file, F_SETLK, &lock);
}

size_t emu_used_by_others(int device) {
  size_t used = 0;
  for (int i = 0; shared && i < shared->count; i++)
    if (&shared->slots[i] != own && is_alive(&shared->slots[i]))
      used += shared->slots[i].used[emu_machine_gpu(device)];
  return used;
}
void emu_share_used(int device, size_t used) {
  if (!own) return;
  int gpu = emu_machine_gpu(device);
  size_t all = used + emu_used_by_others(device);
  own->used[gpu] = used;
  if (all > shared->peak[gpu]) shared->peak[gpu] = all;
}
int emu_other_processes(int device, int most, unsigned *pids, size_t *used) {
  int found = 0, gpu = emu_machine_gpu(device);
  for (int i = 0; shared && i < shared->count && found < most; i++) {
    const slot *s = &shared->slots[i];
    if (s == own || !s->used[gpu] || !is_alive(s)) continue;
    pids[found] = (unsigned)s->pid;
    used[found++] = s->used[gpu];
  }
  return found;
}
