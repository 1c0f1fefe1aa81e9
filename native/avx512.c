/* Kernels for processors with AVX-512; those with VNNI, and VBMI, have faster ones. */
#include "paths.h"

#if defined(__x86_64__)
#define PATH avx512
#define path_name_avx512 "avx512"
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define W 16
#include "kernels.h"
#include "vnni.h"
#define PATH avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma")))
#define W 16
#include "planes.h"
#endif
