// Linked into every kernel's library: tells simt.cpp what lies where in it.
#include "msl_abi.h"

extern "C" void msl_entry(const unsigned long* args, const MslThread* t);
// Every threadgroup array lies in one section; the pad makes it exist in kernels that have none.
__attribute__((section("msl_tgmem"), used, aligned(16))) static char tg_pad[16];
extern char tg_begin[] __asm__("__start_msl_tgmem") __attribute__((visibility("hidden")));
extern char tg_end[] __asm__("__stop_msl_tgmem") __attribute__((visibility("hidden")));
extern char begin[] __asm__("__ehdr_start") __attribute__((visibility("hidden")));
extern char end[] __asm__("_end") __attribute__((visibility("hidden")));
extern "C" const MslImage msl_image;
const MslImage msl_image = {(void*)msl_entry, begin, end, tg_begin, tg_end - sizeof tg_pad};
