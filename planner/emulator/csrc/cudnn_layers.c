/* cuDNN's layers outside of the backend API. Sizes of weights follow the documented layout; sizes of
 * temporary and reserve space are not documented and follow formulas. */
#define _GNU_SOURCE
#include "cudnn_real.h"
#include <stdbool.h>
#include <stdlib.h>

/* ---- dropout: sizeof(curandState) for each thread that the GPU can hold at once (inferred) */
cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t h, size_t *n) {
  LOG();
  *n = (size_t)48 * emu_gpu()->sm_count * emu_gpu()->threads_per_sm;
  OK;
}
cudnnStatus_t cudnnSetDropoutDescriptor(cudnnDropoutDescriptor_t d, cudnnHandle_t h, float p, void *s,
                                        size_t n, unsigned long long seed) {
  OK;
}
cudnnStatus_t cudnnRestoreDropoutDescriptor(cudnnDropoutDescriptor_t d, cudnnHandle_t h, float p, void *s,
                                            size_t n, unsigned long long seed) {
  OK;
}

/* ---- batch norm. The plain modes take no space. That of the persistent spatial mode, which torch uses with
 * channels last, is as in planner/capture/workspaces/nn/norms.py: groups of 64 channels by blocks of rows. */
static size_t batch_norm_space(cudnnBatchNormMode_t m, const cudnnTensorDescriptor_t x, bool backward) {
  int rank = 0, sizes[CUDNN_DIM_MAX], strides[CUDNN_DIM_MAX];
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  if (m != CUDNN_BATCHNORM_SPATIAL_PERSISTENT) return 0;
  if (REAL(cudnnGetTensorNdDescriptor)(x, CUDNN_DIM_MAX, &type, &rank, sizes, strides)) return 0;
  size_t rows = 1, groups = (sizes[1] + 63) / 64;
  for (int i = 0; i < rank; i++)
    if (i != 1) rows *= sizes[i];
  size_t block = backward ? 96 : type == CUDNN_DATA_FLOAT ? 64 : 160;
  size_t blocks = (rows + block - 1) / block;
  return backward ? 1056 + groups * (4 + 512 * blocks) : 1072 + groups * (4 + 516 * blocks);
}
cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t z, const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t b,
    const cudnnActivationDescriptor_t a, size_t *n) {
  LOG();
  *n = batch_norm_space(m, x, false);
  OK;
}
cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t dy, const cudnnTensorDescriptor_t dz,
    const cudnnTensorDescriptor_t dx, const cudnnTensorDescriptor_t b, const cudnnActivationDescriptor_t a,
    size_t *n) {
  LOG();
  *n = batch_norm_space(m, x, true);
  OK;
}
cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t h, cudnnBatchNormMode_t m,
                                                                   cudnnBatchNormOps_t o,
                                                                   const cudnnActivationDescriptor_t a,
                                                                   const cudnnTensorDescriptor_t x,
                                                                   size_t *n) {
  LOG();
  *n = 0;
  OK;
}

/* ---- recurrent layers: weights follow the documented layout; temporary space, which is not documented,
   follows the formulas of planner/capture/workspaces/nn/rnn.py */
typedef struct {
  int algo, cell, bias, direction, input;
  cudnnDataType_t type;
  int in, hidden, proj, layers;
} rnn;
typedef struct {
  int rows, batch; /* number of steps of all samples; number of samples */
} rnn_data;
cudnnStatus_t cudnnCreateRNNDescriptor(cudnnRNNDescriptor_t *d) {
  *d = (cudnnRNNDescriptor_t)emu_new(sizeof(rnn));
  OK;
}
cudnnStatus_t cudnnDestroyRNNDescriptor(cudnnRNNDescriptor_t d) {
  free(d);
  OK;
}
cudnnStatus_t cudnnSetRNNDescriptor_v8(cudnnRNNDescriptor_t d, cudnnRNNAlgo_t algo, cudnnRNNMode_t cell,
                                       cudnnRNNBiasMode_t bias, cudnnDirectionMode_t dir,
                                       cudnnRNNInputMode_t input, cudnnDataType_t type, cudnnDataType_t prec,
                                       cudnnMathType_t math, int32_t in, int32_t hidden, int32_t proj,
                                       int32_t layers, cudnnDropoutDescriptor_t drop, uint32_t flags) {
  *(rnn *)d = (rnn){algo, cell, bias, dir, input, type, in, hidden, proj, layers};
  OK;
}
cudnnStatus_t cudnnCreateRNNDataDescriptor(cudnnRNNDataDescriptor_t *d) {
  *d = (cudnnRNNDataDescriptor_t)emu_new(sizeof(rnn_data));
  OK;
}
cudnnStatus_t cudnnDestroyRNNDataDescriptor(cudnnRNNDataDescriptor_t d) {
  free(d);
  OK;
}
cudnnStatus_t cudnnSetRNNDataDescriptor(cudnnRNNDataDescriptor_t d, cudnnDataType_t type,
                                        cudnnRNNDataLayout_t layout, int length, int batch, int vector,
                                        const int lengths[], void *fill) {
  int rows = 0;
  for (int i = 0; i < batch; i++) rows += lengths[i];
  *(rnn_data *)d = (rnn_data){rows, batch};
  OK;
}
static size_t width(cudnnDataType_t t) { return t == CUDNN_DATA_DOUBLE ? 8 : t == CUDNN_DATA_FLOAT ? 4 : 2; }
static int gates(const rnn *r) { return r->cell == CUDNN_LSTM ? 4 : r->cell == CUDNN_GRU ? 3 : 1; }
static int ways(const rnn *r) { return r->direction == CUDNN_BIDIRECTIONAL ? 2 : 1; }
static int outward(const rnn *r) { return r->proj > 0 && r->proj < r->hidden ? r->proj : r->hidden; }
static size_t biases(const rnn *r) {
  return r->bias == CUDNN_RNN_NO_BIAS ? 0 : r->bias == CUDNN_RNN_DOUBLE_BIAS ? 2 : 1;
}
static size_t matrices(const rnn *r, int layer) { /* number of elements of one direction's matrices */
  size_t in = layer ? (size_t)ways(r) * outward(r) : (size_t)r->in;
  return (size_t)gates(r) * r->hidden * (in + outward(r)) +
         (outward(r) < r->hidden ? (size_t)r->hidden * r->proj : 0);
}
static size_t all_matrices(const rnn *r) {
  size_t n = 0;
  for (int i = 0; i < r->layers; i++) n += ways(r) * matrices(r, i);
  return n;
}
cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t h, cudnnRNNDescriptor_t d, size_t *n) {
  LOG();
  const rnn *r = (const rnn *)d;
  *n = width(r->type) * (all_matrices(r) + (size_t)r->layers * ways(r) * biases(r) * gates(r) * r->hidden);
  OK;
}
cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t h, cudnnRNNDescriptor_t d, int32_t pseudo, size_t size,
                                      const void *space, int32_t id, cudnnTensorDescriptor_t m, void **at,
                                      cudnnTensorDescriptor_t b, void **bias) {
  const rnn *r = (const rnn *)d;
  int g = gates(r), layer = pseudo / ways(r), way = pseudo % ways(r);
  size_t in = layer ? (size_t)ways(r) * outward(r) : (size_t)r->in, offset = 0;
  for (int i = 0; i < layer; i++) offset += ways(r) * matrices(r, i);
  offset += way * matrices(r, layer);
  void *none[2];
  if (!at) at = none;
  if (!bias) bias = none + 1;
  *at = *bias = NULL;
  int rows = r->hidden, columns = 0;
  if (id < g) {
    offset += (size_t)id * r->hidden * in;
    columns = in;
  } else if (id < 2 * g) {
    offset += (size_t)g * r->hidden * in + (size_t)(id - g) * r->hidden * outward(r);
    columns = outward(r);
  } else if (outward(r) < r->hidden) {
    offset += (size_t)g * r->hidden * (in + outward(r));
    rows = r->proj;
    columns = r->hidden;
  }
  if (columns) {
    int dims[3] = {1, rows, columns}, steps[3] = {rows * columns, columns, 1};
    *at = (char *)space + width(r->type) * offset;
    if (m) REAL(cudnnSetTensorNdDescriptor)(m, r->type, 3, dims, steps);
  }
  size_t which = id < g ? 0 : 1;
  if (id < 2 * g && which < biases(r)) {
    int dims[3] = {1, r->hidden, 1}, steps[3] = {r->hidden, 1, 1};
    *bias =
        (char *)space +
        width(r->type) * (all_matrices(r) + (((size_t)pseudo * biases(r) + which) * g + id % g) * r->hidden);
    if (b) REAL(cudnnSetTensorNdDescriptor)(b, r->type, 3, dims, steps);
  }
  OK;
}
cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t h, cudnnRNNDescriptor_t d, cudnnForwardMode_t mode,
                                        cudnnRNNDataDescriptor_t x, size_t *work, size_t *reserve) {
  LOG();
  const rnn *r = (const rnn *)d;
  const rnn_data *s = (const rnn_data *)x;
  /* For each row, every layer keeps the gates and an LSTM's cell, or six vectors of a GRU, and the input of a
     projection; all layers except the last also keep their outputs. */
  int kept = (r->cell == CUDNN_LSTM ? 5 : r->cell == CUDNN_GRU ? 6 : 1) + (outward(r) < r->hidden);
  size_t row = (size_t)r->layers * kept * r->hidden + (size_t)(r->layers - 1) * outward(r);
  size_t vectors = (size_t)r->layers * s->batch * r->hidden * (3 * gates(r) - 1);
  size_t transposed = 0;
  for (int i = 0; i < r->layers; i++)
    transposed += (size_t)gates(r) * r->hidden * ((i ? ways(r) * outward(r) : r->in) + outward(r));
  if (work) *work = width(r->type) * ways(r) * (transposed + vectors);
  if (reserve) *reserve = mode == CUDNN_FWD_MODE_TRAINING ? width(r->type) * ways(r) * s->rows * row : 0;
  OK;
}
