/* Kernels for every processor, by what its compiler makes of vectors of four floats: NEON on AArch64. */
#include "paths.h"

#define PATH portable
#define path_name_portable "portable"
#define TARGET
#define W 4
#include "kernels.h"
