// What a pass is on the device: plain structures, filled by the host or by a kernel of the resident loop before the pass
// begins and read by every kernel of it. layout.py reads them from here.
#pragma once

constexpr int MAX_WIDTH = 64;
constexpr int PIECE = 64;  // positions of one attention piece, and of one block of the K/V store
constexpr int TOP = 32;    // alternatives reported for a row

enum HeadKind : int { HEAD_NONE = 0, HEAD_DRAFT = 1, HEAD_EXACT = 2 };

struct Row {
    unsigned long long visible;  // bit i: sees the i-th row of its own sequence
    int token;                   // id, or -k for MASK(k)
    int position;
    int sequence;  // index into Pass::sequences
    int index;     // its number within its sequence: its K/V go to slot length + index
    int head;      // HeadKind
    int choice;    // index into Pass::choices, or -1: greedy
    int sinks;     // windowed: of the history it sees positions < sinks or > position - recent
    int recent;    // 0: not windowed
};

struct Sequence {
    char* store;  // K/V, see kv.cuh
    int length;   // materialized positions
    int first;    // its rows are first … first + rows - 1 of the pass
    int rows;
    int linear;  // every row stands at position length + index: slot and position are the same
};

// Sampling parameters of a row; docs/sampling.md, "Choosing a token".
struct Choice {
    unsigned long long key;  // mix64(seed + 0x9E3779B97F4A7C15 * (choice + 1))
    const int* seen;         // ascending token ids, and how often each was generated
    const int* counts;
    const int* biased;  // ascending token ids, and what to add
    const float* bias;
    const unsigned* allowed;  // bit set over the vocabulary, or null
    int num_seen;
    int num_biased;
    float temperature;  // 0: greedy
    float repetition, presence, frequency;
    int top_k;  // 0: off
    float top_p;
    float min_p;
};

struct Output {
    int token;
    float probability;
    float entropy;
    int parent;              // row whose token the chain continued, or -1
    int top_ids[TOP];        // best first, valid where asked for
    float top_logits[TOP];
};

struct Pass {
    int width;
    int num_sequences;
    int top;  // how many alternatives to report, at most TOP
    int reserved;
    Row rows[MAX_WIDTH];
    Sequence sequences[MAX_WIDTH];
    Choice choices[MAX_WIDTH];
};
