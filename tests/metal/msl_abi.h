// What a kernel's translation unit (C++ for OpenCL), image.cpp and simt.cpp (C++17) share: the attributes of a thread,
// and where in memory a kernel's library and its threadgroup arrays lie.
#pragma once
#define MSL_U3(X)                                                                                       \
  X(thread_position_in_grid)                                                                            \
  X(thread_position_in_threadgroup) X(threadgroup_position_in_grid) X(threadgroups_per_grid)            \
      X(threads_per_grid) X(threads_per_threadgroup) X(dispatch_threads_per_threadgroup) X(grid_origin) \
          X(grid_size)
#define MSL_U1(X)                                                                               \
  X(thread_index_in_simdgroup)                                                                  \
  X(thread_index_in_threadgroup) X(thread_index_in_quadgroup) X(simdgroup_index_in_threadgroup) \
      X(simdgroups_per_threadgroup) X(threads_per_simdgroup) X(thread_execution_width)          \
          X(quadgroup_index_in_threadgroup) X(quadgroups_per_threadgroup)                       \
              X(dispatch_simdgroups_per_threadgroup) X(dispatch_quadgroups_per_threadgroup)
struct MslThread {
#define X(n) unsigned n[3];
  MSL_U3(X)
#undef X
#define X(n) unsigned n;
  MSL_U1(X)
#undef X
};
struct MslImage {
  void* entry;  // the kernel's trampoline (msl.py)
  char *begin, *end, *tg_begin, *tg_end;
};
