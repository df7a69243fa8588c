/* cuDNN's documented backend API for the described GPU. Calls for descriptors are passed to the installed
 * library. If the caller names a handle, heuristics and plans are requested for a described GPU instead
 * (CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR), so that workspaces are the library's own answers. Nothing is
 * executed. Functions that no file here defines are generated: functions without a handle call the installed
 * library, functions with a handle succeed. */
#define _GNU_SOURCE
#include "cudnn_real.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *library;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static void load(void) {
  const char *path = getenv("PLANNER_EMULATED_CUDNN");
  if (path && *path) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    fprintf(stderr, "emulated GPU: cuDNN cannot be loaded: %s\n", path && *path ? dlerror() : "no path");
}
void *emu_real_cudnn(const char *name) {
  pthread_once(&once, load);
  void *f = library ? dlsym(library, name) : NULL;
  if (library && !f) fprintf(stderr, "emulated GPU: the installed cuDNN has no %s\n", name);
  return f;
}

/* ---- kinds of descriptors, by address */
static struct {
  void *at;
  int kind;
} *table;
static size_t room, held;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t slot(void *d) {
  size_t i = ((uintptr_t)d >> 4) * 0x9E3779B97F4A7C15u & (room - 1);
  while (table[i].at && table[i].at != d) i = (i + 1) & (room - 1);
  return i;
}
static void note(void *d, int kind) {
  pthread_mutex_lock(&lock);
  if (2 * held >= room) {
    size_t was = room;
    typeof(table) old = table;
    room = was ? 2 * was : 1024;
    table = emu_new(room * sizeof *table);
    held = 0;
    for (size_t i = 0; i < was; i++)
      if (old[i].at) {
        table[slot(old[i].at)] = old[i];
        held++;
      }
    free(old);
  }
  size_t i = slot(d);
  if (!table[i].at) held++;
  table[i].at = d;
  table[i].kind = kind; /* overwrites the kind of an address that is reused */
  pthread_mutex_unlock(&lock);
}
static int kind_of(void *d) {
  pthread_mutex_lock(&lock);
  int k = room ? table[slot(d)].kind : 0;
  pthread_mutex_unlock(&lock);
  return k;
}

static cudnnBackendDescriptor_t device(void) {
  static cudnnBackendDescriptor_t d;
  static bool tried;
  pthread_mutex_lock(&lock);
  if (!tried) {
    tried = true;
    cudnnBackendDescriptor_t made;
    const char *json = emu_cudnn_description();
    cudnnStatus_t s = REAL(cudnnBackendCreateDescriptor)(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &made);
    if (!s)
      s = REAL(cudnnBackendSetAttribute)(made, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
                                         strlen(json), json);
    if (!s) s = REAL(cudnnBackendFinalize)(made);
    if (s) fprintf(stderr, "emulated GPU: cuDNN does not take the GPU: %d\n", s);
    else d = made;
  }
  pthread_mutex_unlock(&lock);
  return d;
}
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t t, cudnnBackendDescriptor_t *d) {
  LOG();
  cudnnStatus_t s = REAL(cudnnBackendCreateDescriptor)(t, d);
  if (!s) note(*d, t);
  return s;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t d) {
  return REAL(cudnnBackendDestroyDescriptor)(d);
}
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t a,
                                       cudnnBackendAttributeType_t t, int64_t n, const void *v) {
  if (kind_of(d) == CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR) OK;
  if (t == CUDNN_TYPE_HANDLE) {
    if (a == CUDNN_ATTR_EXECUTION_PLAN_HANDLE) {
      cudnnBackendDescriptor_t p = device();
      return REAL(cudnnBackendSetAttribute)(d, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP,
                                            CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &p);
    }
    if (a == CUDNN_ATTR_DEVICEPROP_HANDLE) {
      const char *json = emu_cudnn_description();
      return REAL(cudnnBackendSetAttribute)(d, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
                                            strlen(json), json);
    }
    OK; /* an operation graph needs no handle */
  }
  return REAL(cudnnBackendSetAttribute)(d, a, t, n, v);
}
static double spent;
static long finalized;
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t d) {
  int k = kind_of(d);
  cudnnBackendDescriptor_t p;
  if (k == CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR) OK;
  if (k == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR) {
    p = device();
    REAL(cudnnBackendSetAttribute)(d, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &p);
  }
  if (k == CUDNN_BACKEND_ENGINE_DESCRIPTOR) {
    p = device();
    REAL(cudnnBackendSetAttribute)(d, CUDNN_ATTR_ENGINE_DEVICEPROP, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &p);
  }
  double t = emu_now();
  cudnnStatus_t s = REAL(cudnnBackendFinalize)(d);
  spent += emu_now() - t;
  finalized++;
  if (emu_tracing >= 2) fprintf(stderr, "emulated GPU: cudnnBackendFinalize kind %d -> %d\n", k, s);
  return s;
}
__attribute__((destructor)) static void print_summary(void) {
  if (emu_tracing == 1 && finalized)
    fprintf(stderr, "emulated GPU: cudnnBackendFinalize %ld times, %.2f s\n", finalized, spent);
}
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const d, cudnnBackendAttributeName_t a,
                                       cudnnBackendAttributeType_t t, int64_t n, int64_t *m, void *v) {
  if (t == CUDNN_TYPE_HANDLE) {
    if (m) *m = 1;
    OK;
  }
  cudnnStatus_t s = REAL(cudnnBackendGetAttribute)(d, a, t, n, m, v);
  if (emu_tracing >= 2 && a == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE && !s && v)
    fprintf(stderr, "emulated GPU: workspace %ld\n", *(long *)v);
  if (emu_tracing >= 2 && a == CUDNN_ATTR_ENGINEHEUR_RESULTS)
    fprintf(stderr, "emulated GPU: heuristics %d: %ld\n", s, m ? *m : -1);
  return s;
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t h, cudnnBackendDescriptor_t p, cudnnBackendDescriptor_t v) {
  LOG();
  emu_ran_kernel();
  OK;
}

/* ---- handles */
typedef struct {
  cudaStream_t stream;
} handle;
cudnnStatus_t cudnnCreate(cudnnHandle_t *h) {
  LOG();
  *h = (cudnnHandle_t)emu_new(4096);
  OK;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t h) {
  free(h);
  OK;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t h, cudaStream_t s) {
  ((handle *)h)->stream = s;
  OK;
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t h, cudaStream_t *s) {
  *s = ((handle *)h)->stream;
  OK;
}
