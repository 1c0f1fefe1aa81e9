/* Finds out which instruction sets this processor has. */
#include "paths.h"

#if defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#endif

const Path *paths[4];
int usable_paths;

#if defined(DOTPROD)
/* Returns whether the processor has a feature. `bit` is the feature's bit in AT_HWCAP of Linux, or 64 plus its bit
 * in AT_HWCAP2. */
enum { DOTPROD_BIT = 20, I8MM_BIT = 64 + 13 };

static int arm_has(int bit) {
#if defined(__linux__)
    return (int)(getauxval(bit < 64 ? AT_HWCAP : AT_HWCAP2) >> bit % 64 & 1);
#elif defined(__APPLE__)
    int found = 0;
    size_t size = sizeof found;
    const char *name = bit == I8MM_BIT ? "hw.optional.arm.FEAT_I8MM" : "hw.optional.arm.FEAT_DotProd";
    return !sysctlbyname(name, &found, &size, NULL, 0) && found;
#else
    return 0;
#endif
}
#endif

void find_paths(void) {
    usable_paths = 0;
#if defined(__x86_64__)
    static Path vnni, avx512, avx2;
    __builtin_cpu_init();
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    vnni = avx512 = path_avx512, avx2 = path_avx2;
    use_vnni(&vnni), use_planes_avx2(&avx2);
    if (__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni")) use_planes_avx512(&vnni);
    vnni.rounded = &rounded_dpbusd, avx512.rounded = avx2.rounded = &rounded_maddubs;
    if (has_avx512 && __builtin_cpu_supports("avx512vnni")) paths[usable_paths++] = &vnni;
    if (has_avx512) paths[usable_paths++] = &avx512;
    if (has_avx2) paths[usable_paths++] = &avx2;
#endif
#if defined(DOTPROD)
    static Path dotprod;
    dotprod = path_portable;
    dotprod.name = "dotprod", dotprod.rounded = &rounded_sdot;
#if defined(I8MM)
    static Path i8mm;
    i8mm = path_portable;
    i8mm.name = "i8mm", i8mm.rounded = &rounded_usdot;
    if (arm_has(I8MM_BIT)) paths[usable_paths++] = &i8mm;
#endif
    if (arm_has(DOTPROD_BIT)) paths[usable_paths++] = &dotprod;
#endif
    paths[usable_paths++] = &path_portable;
}
