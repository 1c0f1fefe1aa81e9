/* Products with rounded activations, for each instruction set that multiplies bytes. */
#include "paths.h"

#if defined(__x86_64__)
#define PATH dpbusd
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")))
#define DOT DPBUSD
#include "rounded.h"
#define PATH maddubs
#define TARGET __attribute__((target("avx2,fma")))
#define DOT MADDUBS
#include "rounded.h"
#endif

#if defined(DOTPROD)
#define PATH sdot
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#define DOT SDOT
#include "rounded.h"
#endif
#if defined(I8MM)
#define PATH usdot
#define TARGET __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#define DOT USDOT
#include "rounded.h"
#endif
