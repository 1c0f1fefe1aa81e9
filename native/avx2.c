/* Kernels for processors with AVX2. */
#include "paths.h"

#if defined(__x86_64__)
#define PATH avx2
#define path_name_avx2 "avx2"
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define W 8
#include "kernels.h"
#define PATH avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define W 8
#include "planes.h"
#endif
