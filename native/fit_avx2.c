/* Fitted rounding for processors with AVX2. */
#if defined(__x86_64__)
#define LANES 8
#define TARGET __attribute__((target("avx2")))
#include "fit.h"

TARGET void fit_avx2(const Work *work) { fit_matrix(work); }
#endif
