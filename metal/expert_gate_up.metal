// needs: codes.h.metal {form}.h.metal swiglu.h.metal
// act[T, K + SHARED, I] = the activation of gate x and up x for the K slots of each token, and for the shared expert if
// SHARED is 1. ACTIVATION names the activation; its limit is LIMIT, or SHARED_LIMIT for the shared expert. If BIASED is
// 1, biases [I] B, which begin at words GATE_BIAS and UP_BIAS of a record, are added to the products first.
// x[T, H] X; blob[S, WORDS] u32, or several: records; slots[T, K]. In a record, the codes [I, H * BITS / 32] u32 of
// gate begin at word GATE_W, its scales and biases [I, H / GROUP] S at words GATE_S and GATE_B; those of up begin at
// UP_W, UP_S and UP_B. The codes, scales and biases of the shared expert are separate arrays with the I rows of gate
// and then those of up.
//
// grid: (32 * SG * blocks, T * (K + SHARED), 1), threadgroup (32 * SG, 1, 1). L lanes share a row, so a simdgroup holds
// 32 / L rows of each matrix at a time, R times in turn.
  const uint lane = thread_index_in_simdgroup % L;
  const uint pair = threadgroup_position_in_grid.y;
  const uint token = pair / (K + SHARED), k = pair % (K + SHARED);
  const uint block = threadgroup_position_in_grid.x * SG + simdgroup_index_in_threadgroup;
  const uint first = block * (R * (32 / L)) + thread_index_in_simdgroup / L;

  const codes_pointer own_codes = (codes_pointer)codes;  // without a shared expert, any array
  const device S* own_scales = (const device S*)scales;
  const device G* own_biases = (const device G*)biases;
  swiglu_matrix<S, G> gate = swiglu_from_row<S, G, H, BITS, GROUP>(0, own_codes, own_scales, own_biases);
  swiglu_matrix<S, G> up = swiglu_from_row<S, G, H, BITS, GROUP>(I, own_codes, own_scales, own_biases);
  const device uint32_t* record = own_codes;  // the shared expert's, which adds no biases
  if (k < K) {
    record = codes_record(blob, uint(slots[token * K + k]), WORDS, ROW_BITS);
    gate = swiglu_in_record<S, G>(record, GATE_W, GATE_S, GATE_B);
    up = swiglu_in_record<S, G>(record, UP_W, UP_S, UP_B);
  }
#ifdef CODES_NEAR
  threadgroup uint4 near[CODES_NEAR];
  gate.biases = up.biases = codes_near<S, 32 * SG>(gate.biases, near, thread_index_in_threadgroup);
  threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
#ifdef CODES_PLANES
  threadgroup uint4 planes[CODES_PLANES(H)];
  const auto row = codes_lay<BITS, PLANES, 32 * SG>(x + token * H, H, thread_index_in_threadgroup, planes);
  threadgroup_barrier(mem_flags::mem_threadgroup);
#else
  const device X* row = x + token * H;
#endif
  const swiglu_ending<ACTIVATION, BIASED, INTERLEAVED, B> ending = {
      (const device B*)(record + GATE_BIAS), (const device B*)(record + UP_BIAS), k < K ? LIMIT : SHARED_LIMIT,
      GATE_LIMIT};
  swiglu_gate_up<R, L, H, I, BITS, GROUP, CHUNK, AHEAD>(row, gate, up, ending, first, lane, act + pair * I);
