/* Fitted rounding for processors with AVX-512. */
#if defined(__x86_64__)
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#include "fit.h"

TARGET void fit_avx512(const Work *work) { fit_matrix(work); }
#endif
