/* Kernels for every processor. The compiler translates vectors of four floats to what the processor has: NEON on
 * AArch64. */
#include "paths.h"

#define PATH portable
#define path_name_portable "portable"
#define TARGET
#define W 4
#include "kernels.h"
