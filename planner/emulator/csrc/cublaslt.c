/* cuBLASLt with one algorithm for every request. torch takes its cuBLASLt workspace from its own allocator,
 * whatever is returned here; cuDNN's engines that are built on cuBLASLt add the workspace of the heuristic's
 * result to the workspace of their plans. The result has the largest workspace that the caller allows, up to
 * PLANNER_EMULATED_CUBLASLT_WORKSPACE. Its default, 0, is an assumption; docs/cudnn.md says what is known. */
#define _GNU_SOURCE
#include "core.h"
#include <cublasLt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the fields of matrices and operations that the log shows; both are stored in the caller's objects, or
 * in objects made here */
typedef struct {
  int type, batch;
  uint64_t rows, columns;
} layout;
typedef struct {
  int transposed_a, transposed_b, epilogue, compute;
} operation;
_Static_assert(sizeof(layout) <= sizeof(cublasLtMatrixLayoutOpaque_t),
               "a layout lies in the caller's memory");
_Static_assert(sizeof(operation) <= sizeof(cublasLtMatmulDescOpaque_t), "an operation likewise");

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t l, size_t n, cudaDataType type,
                                                 uint64_t rows, uint64_t columns, int64_t ld) {
  *(layout *)l = (layout){type, 1, rows, columns};
  return 0;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t ld) {
  *l = emu_handle();
  return cublasLtMatrixLayoutInit_internal(*l, sizeof **l, type, rows, columns, ld);
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
  free(l);
  return 0;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t a,
                                                const void *v, size_t n) {
  if (a == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT && n == 4) memcpy(&((layout *)l)->batch, v, 4);
  return 0;
}
cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t o, size_t n, cublasComputeType_t compute,
                                               cudaDataType scale) {
  *(operation *)o = (operation){0, 0, CUBLASLT_EPILOGUE_DEFAULT, compute};
  return 0;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *o, cublasComputeType_t compute,
                                        cudaDataType scale) {
  *o = emu_handle();
  return cublasLtMatmulDescInit_internal(*o, sizeof **o, compute, scale);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t o) {
  free(o);
  return 0;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t o, cublasLtMatmulDescAttributes_t a,
                                              const void *v, size_t n) {
  operation *one = (operation *)o;
  if (n != 4) return 0;
  if (a == CUBLASLT_MATMUL_DESC_TRANSA) memcpy(&one->transposed_a, v, 4);
  if (a == CUBLASLT_MATMUL_DESC_TRANSB) memcpy(&one->transposed_b, v, 4);
  if (a == CUBLASLT_MATMUL_DESC_EPILOGUE) memcpy(&one->epilogue, v, 4);
  return 0;
}

/* ---- preferences and heuristics */
typedef struct {
  uint64_t most;
} preference;
cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t p, size_t n) {
  ((preference *)p)->most = 0;
  return 0;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) {
  LOG();
  *p = emu_new(4096);
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
  return 0;
}
static void print_matrix(const char *name, cublasLtMatrixLayout_t l, int transposed) {
  const layout *m = (const layout *)l;
  if (m)
    fprintf(stderr, " %s%s %lu x %lu x %d type %d,", name, transposed ? "'" : "", m->rows, m->columns,
            m->batch, m->type);
}
static void print_product(const operation *o, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                          cublasLtMatrixLayout_t d, uint64_t most) {
  fprintf(stderr, "emulated GPU: cublasLt product of");
  print_matrix("a", a, o->transposed_a);
  print_matrix("b", b, o->transposed_b);
  print_matrix("d", d, 0);
  fprintf(stderr, " compute %d, epilogue %d, workspace up to %lu\n", o->compute, o->epilogue, most);
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t o,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t p, int requested,
                                              cublasLtMatmulHeuristicResult_t r[], int *n) {
  LOG();
  const char *text = getenv("PLANNER_EMULATED_CUBLASLT_WORKSPACE");
  size_t room = text ? strtoul(text, NULL, 0) : 0, most = p ? ((preference *)p)->most : 0;
  if (emu_tracing >= 2) print_product((const operation *)o, a, b, d, most);
  *n = requested > 0;
  if (requested < 1) return 0;
  memset(r, 0, sizeof *r);
  r[0].wavesCount = 1;
  r[0].workspaceSize = most < room ? most : room;
  return 0;
}
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
