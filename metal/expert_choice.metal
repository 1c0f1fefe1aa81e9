// needs: codes.h.metal {form}.h.metal swiglu.h.metal topk.h.metal
// Chooses the experts, then computes the same as expert_gate_up. chosen uint, which begins with [T, 2, K], gets the ids
// that topk chooses from logits[T, STRIDE], bias and scale, and then the bits of their weights. An id is a row of the
// blob. If TABLED is 1, slots[E] has the slot of each expert's record, and chosen gets slots in place of ids; where a
// record is missing, act becomes zeros. The first simdgroup of each threadgroup makes the choice. host_copy, if it is
// given, are arrays of 8 bytes that get the ids of one token, one after another.
//
// grid and threadgroup are those of expert_gate_up.
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
  threadgroup uint slot[1];
  if (k < K && simdgroup_index_in_threadgroup == 0) {
    float weight = 0;
    const uint found = topk_choice<E, K, SCORE, BIAS, GROUPS, KEPT, NORM, SCALED>(
        logits + token * STRIDE, bias, scale, EPS, thread_index_in_simdgroup, k, weight);
    if (thread_index_in_simdgroup == 0) {
      slot[0] = codes_slot(slots, found);
      if (block == 0) {
        chosen[2 * token * K + k] = slot[0];
        chosen[(2 * token + 1) * K + k] = as_type<uint>(weight);
        topk_copy(host_copy, k, found);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (TABLED && k < K && slot[0] == CODES_MISSING) {
    constexpr uint ROWS = SG * R * (32 / L);
    const uint top = threadgroup_position_in_grid.x * ROWS;
    for (uint i = thread_index_in_threadgroup; i < ROWS && top + i < I; i += 32 * SG) {
      act[pair * I + top + i] = X(0);
    }
    return;
  }
  const device uint32_t* record = own_codes;  // the shared expert's, which adds no biases
  if (k < K) {
    record = codes_record(blob, slot[0], WORDS, ROW_BITS);
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
