// Codes become bytes, four to a word, and are multiplied by integers.

#ifndef CODES_DOT4
inline int codes_byte(uint word, int at) {
  return int(((word >> at) & 0xFFu) ^ 0x80u) - 128;
}

// sum + the products of the signed bytes of `codes` and `x`.
inline int codes_dot4(uint codes, uint x, int sum) {
  for (int at = 0; at < 32; at += 8) {
    sum += codes_byte(codes, at) * codes_byte(x, at);
  }
  return sum;
}
#define CODES_DOT4(codes, x, sum) codes_dot4(codes, x, sum)
#endif

#ifndef CODES_BYTES
// A word of four bytes. Four bits of `which` name each of them: 0 to 3 are bytes of `low`, 4 to 7 are bytes of `high`.
inline uint codes_bytes(uint low, uint high, uint which) {
  uint made = 0;
  for (int i = 0; i < 4; i++) {
    const uint n = (which >> (4 * i)) & 7u;
    made |= (((n < 4 ? low : high) >> (8 * (n % 4))) & 0xFFu) << (8 * i);
  }
  return made;
}
#define CODES_BYTES(low, high, which) codes_bytes(low, high, which)
#endif

// The first bytes (a), second bytes (b) and third bytes (c) of four triples of bytes.
inline void codes_triples(const thread uint* words, thread uint* a, thread uint* b, thread uint* c) {
  *a = CODES_BYTES(CODES_BYTES(words[0], words[1], 0x0630u), words[2], 0x5210u);
  *b = CODES_BYTES(CODES_BYTES(words[0], words[1], 0x0741u), words[2], 0x6210u);
  *c = CODES_BYTES(CODES_BYTES(words[0], words[1], 0x0052u), words[2], 0x7410u);
}

// 32 codes of 3 bits from three words. Eight codes are three bytes; quad[i] has code i of each eight.
inline void codes_of_three_bits(const thread uint* words, thread uint* quad) {
  uint a, b, c;
  codes_triples(words, &a, &b, &c);
  quad[0] = a & 0x07070707u;
  quad[1] = (a >> 3) & 0x07070707u;
  quad[2] = ((a >> 6) & 0x03030303u) | ((b << 2) & 0x04040404u);
  quad[3] = (b >> 1) & 0x07070707u;
  quad[4] = (b >> 4) & 0x07070707u;
  quad[5] = ((b >> 7) & 0x01010101u) | ((c << 1) & 0x06060606u);
  quad[6] = (c >> 2) & 0x07070707u;
  quad[7] = (c >> 5) & 0x07070707u;
}
