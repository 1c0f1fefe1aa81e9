// needs: planes.h.metal tables.h.metal
// Codes of tables.h.metal, which become bytes, times integers.
