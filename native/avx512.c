/* Kernels for processors with AVX-512. vnni.h and planes.h have faster kernels for processors that also have VNNI,
 * or VNNI and VBMI. */
#include "paths.h"

#if defined(__x86_64__)
#define PATH avx512
#define path_name_avx512 "avx512"
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define W 16
#include "kernels.h"
#include "vnni.h"
#define PATH avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni,avx2,bmi2,fma")))
#define W 16
#include "planes.h"
#endif
