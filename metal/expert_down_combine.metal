// needs: codes.h.metal {form}.h.metal lane.h.metal swiglu.h.metal
// out[T, H] = h_mid + sum_k weights[t, k] * (down_k act[t, k] + bias_k) (+ shared). The sums are in float32, k ascends.
// If BIASED is 1, a record has a bias [H] B at word DOWN_BIAS; otherwise there is none.
// act[T, K + JOINED, I] X; blob[S, WORDS] u32, or several: records. In a record, the codes [H, I * BITS / 32] u32 of
// down begin at word DOWN_W, its scales and biases [H, I / GROUP] S at words DOWN_S and DOWN_B. slots[T, K] and
// weights[T, K] float: the values of a token begin ROW after those of the token before. If TABLED is 1, an expert whose
// slot is CODES_MISSING adds nothing.
// The shared expert is added last. If SHARED is 1, its output is shared[T, H] Z. If JOINED is 1, its output is the
// product of act's last row and its down matrix, whose codes, scales and biases are separate arrays; if GATED is 1,
// this output is multiplied by the sigmoid of gates[t, STRIDE - 1].
//
// grid: (32 * SG * blocks, T, 1), threadgroup (32 * SG, 1, 1). A simdgroup takes every SG-th slot, so SG experts are
// read at the same time, and the order of the sum is fixed. L lanes share a row; a simdgroup holds 32 / L rows at a
// time, R times in turn. R is at most L, so that a threadgroup has a thread for each of its rows. If x is stored in
// blocks (planes.h.metal), each simdgroup stores SPAN columns of its own at a time. SPAN is I or a multiple of CHUNK L.
  constexpr uint ABREAST = 32 / L, ROWS = R * ABREAST, CODE_GROUPS = CHUNK < GROUP ? 1 : CHUNK / GROUP;
  constexpr uint TURNS = (K + JOINED + SG - 1) / SG;
  threadgroup float part[(K + JOINED) * ROWS];
  const uint lane = thread_index_in_simdgroup % L;
  const uint token = threadgroup_position_in_grid.y;
  const uint top = threadgroup_position_in_grid.x * ROWS;
  const uint first = top + thread_index_in_simdgroup / L;

  const codes_pointer own_codes = (codes_pointer)codes;  // without a shared expert, any array
  const uint tid = thread_index_in_threadgroup;
  const uint at = token * H + top + tid;
  const bool finishes = tid < ROWS && top + tid < H;
  float sum = 0, last = 0;
#ifdef CODES_PLANES
  threadgroup uint4 planes[SG * CODES_PLANES(SPAN)];
#endif
#ifdef CODES_NEAR
  threadgroup uint4 near[CODES_NEAR];
  const device G* grid = (const device G*)biases;
  if (K > 0) {
    const uint slot = uint(slots[token * ROW]);
    const device uint32_t* any = codes_record(blob, TABLED && slot == CODES_MISSING ? 0 : slot, WORDS, ROW_BITS);
    grid = swiglu_in_record<S, G>(any, DOWN_W, DOWN_S, DOWN_B).biases;
  }
  grid = codes_near<S, 32 * SG>(grid, near, tid);
  threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
  CODES_UNROLL(1)
  for (uint turn = 0; turn < TURNS; turn++) {
    const uint k = turn * SG + simdgroup_index_in_threadgroup;
    if (TURNS > 1 && k >= K + JOINED) {
      break;
    }
    swiglu_matrix<S, G> down = {own_codes, (const device S*)scales, (const device G*)biases};
    float weight = 1;
    const device uint32_t* record = own_codes;
    if (k < K) {
      record = codes_record(blob, uint(slots[token * ROW + k]), WORDS, ROW_BITS);
      down = swiglu_in_record<S, G>(record, DOWN_W, DOWN_S, DOWN_B);
      weight = weights[token * ROW + k];
    } else if (GATED) {
      weight = 1.0f / (1.0f + metal::precise::exp(-float(gates[token * STRIDE + STRIDE - 1])));
    }
#ifdef CODES_NEAR
    down.biases = grid;  // also of the shared expert, whose form is the same
#endif
    const device X* a = act + (token * (K + JOINED) + k) * I;
    if (turn == 0 && finishes) {  // loads what the end of the kernel needs
      sum = float(h_mid[at]);
      last = SHARED ? float(shared[at]) : 0.0f;
    }
    if (TABLED && k < K && uint(slots[token * ROW + k]) == CODES_MISSING) {
      for (uint i = thread_index_in_simdgroup; i < ROWS; i += 32) {
        part[k * ROWS + i] = 0;
      }
      continue;
    }

    uint row[R];
    float acc[R];
    for (int r = 0; r < R; r++) {
      row[r] = metal::min(first + r * ABREAST, uint(H - 1));
      acc[r] = 0;
    }
    for (uint from = 0; from < I; from += SPAN) {
      const uint columns = metal::min(uint(SPAN), I - from);
#ifdef CODES_PLANES
      simdgroup_barrier(mem_flags::mem_threadgroup);
      const auto x = codes_lay<BITS, PLANES, 32>(
          a + from, columns, thread_index_in_simdgroup, planes + simdgroup_index_in_threadgroup * CODES_PLANES(SPAN));
      simdgroup_barrier(mem_flags::mem_threadgroup);
#else
      const device X* x = a + from;
#endif
      CODES_UNROLL(AHEAD)
      for (uint chunk = lane; chunk < columns / CHUNK; chunk += L) {
        uint code[R * (CHUNK * BITS / 32)];
        float scale[R * CODE_GROUPS], bias[R * CODE_GROUPS];
        const uint c = from / CHUNK + chunk;
        codes_load<R, BITS, GROUP, CHUNK, I>(down.codes, down.scales, down.biases, row, c, code, scale, bias);
        codes_dot<R, BITS, GROUP, CHUNK>(code, scale, bias, x + CHUNK * chunk, acc);
      }
    }
    for (int r = 0; r < R; r++) {
      float total = lane_sum<L>(acc[r]);
      if (lane == 0) {
        if (BIASED) {
          total += float(((const device B*)(record + DOWN_BIAS))[row[r]]);
        }
        part[k * ROWS + first - top + r * ABREAST] = weight * total;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (finishes) {
    for (uint j = 0; j < K; j++) {
      sum += part[j * ROWS + tid];
    }
    if (JOINED) {
      last = part[K * ROWS + tid];
    }
    out[at] = Y(sum + last);
  }
