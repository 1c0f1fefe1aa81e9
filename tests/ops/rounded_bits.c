/* Prints a digest of products with rounded activations for every form of weights and path of the processor it runs on.
 *
 * test_rounded.py compiles it for this processor and for AArch64, which is emulated, and compares what they print.
 */
#include "../../native/paths.h"

#include <stdio.h>

enum { ROWS = 13, TOKENS = 11, WIDTH = 1408 };

static uint32_t state = 1;

static uint32_t draw(void) { return state = state * 1664525u + 1013904223u, state >> 8; }

static void fill(Matrix *m, uint8_t *memory) {
    uint8_t *tables = memory + ROWS * WIDTH;
    for (int i = 0; i < ROWS * WIDTH; i++) memory[i] = (uint8_t)draw();
    for (int i = 0; i < ROWS * WIDTH / 16; i++) {
        uint32_t small = draw() % 97 - 48, at = (uint32_t)i;
        float value = (float)(int)small / 1024;
        if (m->kind == F32) memcpy(tables + 4 * at, &value, 4);
        else if (m->kind == E8M0) tables[at] = (uint8_t)(120 + draw() % 8);
        else ((uint16_t *)tables)[at] = (uint16_t)(0x2C00 + draw() % 0x800 + (draw() & 1) * 0x8000);
    }
    m->w = (const uint32_t *)memory, m->s = tables, m->b = m->codes ? NULL : tables + ROWS * table_bytes(m);
}

static uint32_t digest(const Rounded *of, const Matrix *m, int planes, const float *x, int tokens) {
    static uint32_t packed[8][WIDTH], block[2][8 * WIDTH];
    static char room[1 << 18];
    static float out[TOKENS][ROWS], few[4][ROWS];
    const uint32_t *blocks[TOKENS] = {block[0]};
    float *y[TOKENS];
    uint32_t found = 2166136261u;
    blocks[8] = block[1];
    memset(block, 0, sizeof block);
    for (int t = 0; t < tokens; t++) {
        y[t] = out[t];
        of->pack(m, x + t * WIDTH, planes, packed[t % 8]);
        for (int i = 0; i < WIDTH; i++) block[t / 8][8 * i + t % 8] = packed[t % 8][i];
    }
    of->tiles[form_of(m)][planes - 1](m, 0, ROWS, tokens, blocks, room, y);
    const uint32_t *last[4] = {packed[0], packed[1], packed[2], packed[3]};
    float *to[4] = {few[0], few[1], few[2], few[3]};
    for (int i = 0; i < 4; i++) of->pack(m, x + (tokens - 4 + i) * WIDTH, planes, packed[i]);
    for (int n = 1; n <= 4; n++) {
        of->rows[form_of(m)][planes - 1](m, 0, ROWS, n, last, to);
        if (memcmp(few, out[tokens - 4], n * sizeof *few)) printf("%d rows have other bits\n", n);
    }
    for (int i = 0; i < tokens * ROWS; i++) {
        uint32_t bits;
        memcpy(&bits, &out[0][0] + i, 4);
        found = (found ^ bits) * 16777619u;
    }
    return found;
}

int main(void) {
    static uint8_t memory[ROWS * WIDTH * 4];
    static float x[TOKENS * WIDTH];
    static const Kind kinds[] = {BF16, F16, F32};
    int done = 0;
    find_paths();
    for (int i = 0; i < TOKENS * WIDTH; i++) x[i] = ((float)(int)(draw() % 65521) - 32760) / 7;
    for (int p = 0; p < usable_paths; p++) {
        if (!paths[p]->rounded) continue;
        fprintf(stderr, "%s\n", paths[p]->name);
        state = 7;
        for (int form = 0; form < 21; form++) {
            int group = 32 << form / 3 % 3, bits = form < 9 ? 4 : 8;
            Matrix m = {.in = WIDTH, .rows = ROWS, .group = group, .groups = WIDTH / group, .bits = bits, .kind = kinds[form % 3]};
            if (form > 17) m.group = 32, m.groups = WIDTH / 32, m.bits = bits = 4, m.kind = E8M0, m.codes = E2M1;
            m.words = WIDTH / 32 * bits;
            fill(&m, memory);
            for (int planes = 1; planes < 3; planes++)
                printf("%d %08x\n", form, digest(paths[p]->rounded, &m, planes, x, form % 2 ? TOKENS : 5));
        }
        done++;
    }
    return done ? 0 : 1;
}
