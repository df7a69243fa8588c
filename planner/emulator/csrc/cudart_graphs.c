/* The CUDA Runtime API: graphs. A stream remembers whether it captures; graphs are empty and replay
 * nothing. */
#define _GNU_SOURCE
#include "cudart.h"
#include <stdlib.h>

static uint64_t captures;
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) {
  LOG();
  emu_stream *e = emu_stream_of(s);
  e->capturing = 1;
  e->graph = emu_handle();
  e->id = 1000000 + ++captures;
  OK;
}
#if CUDART_VERSION >= 12030
cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t s, cudaGraph_t g, const cudaGraphNode_t *d,
                                          const cudaGraphEdgeData *e, size_t n,
                                          enum cudaStreamCaptureMode m) {
  emu_stream *t = emu_stream_of(s);
  t->capturing = 1;
  t->graph = g;
  t->id = 1000000 + ++captures;
  OK;
}
cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle *h, cudaGraph_t g, unsigned v,
                                             unsigned f) {
  *h = 1;
  OK;
}
#endif
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
  LOG();
  emu_stream *e = emu_stream_of(s);
  e->capturing = 0;
  *g = e->graph;
  e->graph = NULL;
  OK;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) {
  *c = emu_stream_of(s)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  OK;
}
static cudaError_t capture(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id,
                           cudaGraph_t *g, const cudaGraphNode_t **d, size_t *n) {
  emu_stream *e = emu_stream_of(s);
  *c = e->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (!e->capturing) OK;
  static cudaGraphNode_t none[1];
  if (id) *id = e->id;
  if (g) *g = e->graph;
  if (d) *d = none;
  if (n) *n = 0;
  OK;
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id,
                                     cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **e,
                                     size_t *n) {
  if (e) *e = NULL;
  return capture(s, c, id, g, d, n);
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t s, cudaGraphNode_t *d,
                                                const cudaGraphEdgeData *e, size_t n, unsigned f) {
  OK;
}
cudaError_t cudaGraphAddNode(cudaGraphNode_t *o, cudaGraph_t g, const cudaGraphNode_t *d,
                             const cudaGraphEdgeData *e, size_t n, struct cudaGraphNodeParams *p) {
  *o = emu_handle();
  OK;
}
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t o, cudaGraphNode_t *d, cudaGraphEdgeData *e,
                                         size_t *n) {
  *n = 0;
  OK;
}
#else
#undef cudaStreamGetCaptureInfo
#undef cudaStreamGetCaptureInfo_v2
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c,
                                     unsigned long long *id) {
  return capture(s, c, id, NULL, NULL, NULL);
}
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t s, enum cudaStreamCaptureStatus *c,
                                        unsigned long long *id, cudaGraph_t *g, const cudaGraphNode_t **d,
                                        size_t *n) {
  return capture(s, c, id, g, d, n);
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t s, cudaGraphNode_t *d, size_t n, unsigned f) {
  OK;
}
#if CUDART_VERSION >= 12030 // with data of edges
cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t s, enum cudaStreamCaptureStatus *c,
                                        unsigned long long *id, cudaGraph_t *g, const cudaGraphNode_t **d,
                                        const cudaGraphEdgeData **e, size_t *n) {
  if (e) *e = NULL;
  return capture(s, c, id, g, d, n);
}
cudaError_t cudaStreamUpdateCaptureDependencies_v2(cudaStream_t s, cudaGraphNode_t *d,
                                                   const cudaGraphEdgeData *e, size_t n, unsigned f) {
  OK;
}
cudaError_t cudaGraphAddNode(cudaGraphNode_t *o, cudaGraph_t g, const cudaGraphNode_t *d, size_t n,
                             struct cudaGraphNodeParams *p) {
  *o = emu_handle();
  OK;
}
cudaError_t cudaGraphAddNode_v2(cudaGraphNode_t *o, cudaGraph_t g, const cudaGraphNode_t *d,
                                const cudaGraphEdgeData *e, size_t n, struct cudaGraphNodeParams *p) {
  *o = emu_handle();
  OK;
}
#endif
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t o, cudaGraphNode_t *d, size_t *n) {
  *n = 0;
  OK;
}
#endif
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) {
  static _Thread_local enum cudaStreamCaptureMode now;
  enum cudaStreamCaptureMode was = now;
  now = *m;
  *m = was;
  OK;
}
cudaError_t cudaGraphCreate(cudaGraph_t *g, unsigned f) {
  *g = emu_handle();
  OK;
}
cudaError_t cudaGraphDestroy(cudaGraph_t g) {
  free(g);
  OK;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *o, size_t *n) {
  *n = 1;
  if (o) *o = (cudaGraphNode_t)g;
  OK;
}
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t g, const char *p, unsigned f) { OK; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long f) {
  *x = emu_handle();
  OK;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long f) {
  *x = emu_handle();
  OK;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t x, cudaStream_t s) { OK; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s) {
  LOG();
  emu_ran_kernel();
  OK;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x) {
  free(x);
  OK;
}
cudaError_t cudaProfilerStart(void) { OK; }
cudaError_t cudaProfilerStop(void) { OK; }
