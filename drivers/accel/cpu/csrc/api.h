/* What Python calls; declared to cffi in _cpu_build.py with the same words. */
#ifndef AX_API_H
#define AX_API_H
#include "engine.h"

int ax_best_isa(void);
ax_engine *ax_new(const ax_shape *shape, const float *inv_freq, int threads, int isa);
void ax_free(ax_engine *e);
int ax_load_matrix(ax_engine *e, int which, int layer, const void *source, int dtype, int rows, int first);
int ax_load_vector(ax_engine *e, int which, int layer, const float *source, int n);
void ax_attach(ax_engine *e, void *arena, int capacity, int block_tokens, const int32_t *frame, const int32_t *shift,
               const int16_t *count, const uint32_t *generation, int slots, int row_entries);
int ax_forward(ax_engine *e, const void *seqs, int nseqs, const int32_t *tokens, int ntokens, const int32_t *copies,
               int ncopies, const int32_t *want, int nwant, const int64_t *gates, int ngates, int64_t limit_ns,
               float *logits);
void ax_attach_gates(ax_engine *e, const int64_t *gates, int ngates);
int64_t ax_waited_ns(const ax_engine *e);
int64_t ax_shared_tokens(const ax_engine *e);
int ax_error_detail(const ax_engine *e);
void ax_phase_ns(ax_engine *e, int64_t *ns);

/* ops.c: single kernels, for the sampler, tests and benches */
int ax_op_linear(int isa, int mr, const float *x, int m, int k, const void *weight, int dtype, int n, float *y);
int ax_op_rms_norm(int isa, const float *x, const float *weight, float eps, int m, int n, float *y);
int ax_op_silu_mul(int isa, const float *gate, const float *up, int n, float *y);
int ax_op_rope(int isa, float *x, const float *cosine, const float *sine, int m, int head_dim);
int ax_op_log_sums(int isa, const float *x, int m, int n, double *sums, int32_t *best);
void ax_op_to_bf16(const float *x, int64_t n, uint16_t *y);

#endif
