/* Communicators that store their size, rank and device; collectives succeed at once. */
#include "core.h"
#include <nccl.h>
#include <stdlib.h>
#include <string.h>
typedef struct {
  int size, rank, device;
} comm;
static ncclResult_t make_on(ncclComm_t *c, int n, int rank, int device) {
  comm *m = emu_new(4096);
  if (!m) return ncclSystemError;
  m->size = n;
  m->rank = rank;
  m->device = device;
  *c = (ncclComm_t)m;
  return ncclSuccess;
}
static ncclResult_t make(ncclComm_t *c, int n, int rank) { return make_on(c, n, rank, emu_current_device()); }
ncclResult_t ncclGetVersion(int *v) {
  *v = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  memset(id, 7, sizeof *id);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *c, int n, ncclUniqueId id, int rank) {
  LOG();
  return make(c, n, rank);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int n, ncclUniqueId id, int rank, ncclConfig_t *g) {
  LOG();
  return make(c, n, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t *c, int n, int rank, int k, ncclUniqueId *ids,
                                      ncclConfig_t *g) {
  return make(c, n, rank);
}
ncclResult_t ncclCommInitAll(ncclComm_t *c, int n, const int *devices) {
  for (int i = 0; i < n; i++)
    if (make_on(c + i, n, i, devices ? devices[i] : i) != ncclSuccess) return ncclSystemError;
  return ncclSuccess;
}
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *o, ncclConfig_t *g) {
  if (color == NCCL_SPLIT_NOCOLOR) {
    *o = NULL;
    return ncclSuccess;
  }
  return make(o, ((comm *)c)->size, ((comm *)c)->rank);
}
ncclResult_t ncclCommCount(const ncclComm_t c, int *n) {
  *n = ((comm *)c)->size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t c, int *n) {
  *n = ((comm *)c)->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t c, int *n) {
  *n = ((comm *)c)->device;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *e) {
  *e = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclMemAlloc(void **p, size_t n) {
  *p = emu_alloc(emu_current_device(), n);
  return *p ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclMemFree(void *p) {
  emu_free(p);
  return ncclSuccess;
}
/* ---- collectives: other ranks are assumed to send the same data as this rank. A buffer that only the root
 * needs may be NULL on other ranks (NCCL's documentation of ncclReduce and ncclBroadcast). */
static size_t width(ncclDataType_t t) {
  switch (t) {
  case ncclInt64:
  case ncclUint64:
  case ncclFloat64: return 8;
  case ncclInt32:
  case ncclUint32:
  case ncclFloat32: return 4;
  case ncclFloat16:
  case 9: /* ncclBfloat16, which some headers lack */ return 2;
  default: return 1;
  }
}
static ncclResult_t move(void *to, const void *from, size_t n, ncclDataType_t t) {
  if (to && from && to != from) emu_copy(to, from, n * width(t));
  return ncclSuccess;
}
ncclResult_t ncclAllGather(const void *f, void *t, size_t n, ncclDataType_t d, ncclComm_t c, cudaStream_t s) {
  LOG();
  for (int i = 0; i < ((comm *)c)->size; i++) move((char *)t + i * n * width(d), f, n, d);
  return ncclSuccess;
}
ncclResult_t ncclAllReduce(const void *f, void *t, size_t n, ncclDataType_t d, ncclRedOp_t o, ncclComm_t c,
                           cudaStream_t s) {
  LOG();
  return move(t, f, n, d);
}
ncclResult_t ncclReduce(const void *f, void *t, size_t n, ncclDataType_t d, ncclRedOp_t o, int r,
                        ncclComm_t c, cudaStream_t s) {
  LOG();
  return ((comm *)c)->rank == r ? move(t, f, n, d) : ncclSuccess;
}
ncclResult_t ncclBroadcast(const void *f, void *t, size_t n, ncclDataType_t d, int r, ncclComm_t c,
                           cudaStream_t s) {
  LOG();
  move(t, f, n, d);
  emu_allow_reads(t, n * width(d), 1);
  return ncclSuccess;
}
ncclResult_t ncclBcast(void *t, size_t n, ncclDataType_t d, int r, ncclComm_t c, cudaStream_t s) {
  LOG();
  emu_allow_reads(t, n * width(d), 1);
  return ncclSuccess;
}
ncclResult_t ncclReduceScatter(const void *f, void *t, size_t n, ncclDataType_t d, ncclRedOp_t o,
                               ncclComm_t c, cudaStream_t s) {
  LOG();
  return move(t, f, n, d);
}
