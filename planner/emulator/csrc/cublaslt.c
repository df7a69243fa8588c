/* One algorithm for whatever is asked. torch takes its cuBLASLt workspace from its own allocator, whatever
 * stands here; cuDNN's engines that are built on cuBLASLt add what the heuristics name to the workspace of
 * their plans. We name the most that the caller allows, up to PLANNER_EMULATED_CUBLASLT_WORKSPACE (default 0,
 * which met two references to the MiB): an assumption. */
#define _GNU_SOURCE
#include "core.h"
#include <cublasLt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct {
  uint64_t most;
} preference;
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) {
  LOG();
  *p = calloc(1, 4096);
  return 0;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
  free(p);
  return 0;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t a, const void *v,
                                                    size_t n) {
  if (a == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES && n == 8) memcpy(&((preference *)p)->most, v, 8);
  if (emu_tracing >= 2) {
    uint64_t w = 0;
    memcpy(&w, v, n < 8 ? n : 8);
    fprintf(stderr, "emulated GPU: Lt preference %d = %lu\n", a, w);
  }
  return 0;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t o,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t p, int wanted,
                                              cublasLtMatmulHeuristicResult_t r[], int *n) {
  LOG();
  if (wanted < 1) {
    *n = 0;
    return 0;
  }
  const char *text = getenv("PLANNER_EMULATED_CUBLASLT_WORKSPACE");
  size_t room = text ? strtoul(text, NULL, 0) : 0, most = p ? ((preference *)p)->most : 0;
  memset(r, 0, sizeof *r);
  r[0].wavesCount = 1;
  r[0].workspaceSize = most < room ? most : room;
  *n = 1;
  return 0;
}
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
