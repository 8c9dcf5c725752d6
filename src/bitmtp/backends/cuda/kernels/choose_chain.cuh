// The chain: proposals in the light of the one before (docs/sampling.md). Its matrix products with token rows are tables made
// at load: scored = raw + Q[candidate] · silu(H + P[parent]), where H = A · norm(x) is made here for each mask row.
#pragma once

#include "choose_common.cuh"

#if RANK > 0

constexpr int CHAIN_THREADS = 512;  // a warp for each candidate
constexpr int HIDDEN_THREADS = 128;

// H [MAX_WIDTH][RANK] of the mask rows, whose hidden states lie X_STRIDE floats apart; `a` [RANK][HIDDEN] has the final
// norm's gain multiplied in. A warp computes one entry of the blockIdx.y-th pair of mask rows. Launched anywhere between the
// last layer and `chain`.
extern "C" __global__ void __launch_bounds__(HIDDEN_THREADS, 1)
    chain_hidden(const Pass* pass, const float* hidden, const float4* a, float eps, float* h) {
    constexpr int VECTORS = HIDDEN / 4, HELD = (VECTORS + 31) / 32, AT_ONCE = 2;  // rows
    const int lane = threadIdx.x % 32, entry = (blockIdx.x * HIDDEN_THREADS + threadIdx.x) / 32;
    float4 weights[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++)
        weights[i] = lane + i * 32 < VECTORS ? a[entry * VECTORS + lane + i * 32] : make_float4(0, 0, 0, 0);
    wait_for_previous();
    let_next_start();
    const int width = pass->width;
    const bool low = pass->rows[lane].token < 0 && lane < width, high = pass->rows[lane + 32].token < 0 && lane + 32 < width;
    u64 masks = __ballot_sync(ALL_LANES, low) | (u64)__ballot_sync(ALL_LANES, high) << 32;
    for (int i = 0; i < (int)blockIdx.y * AT_ONCE; i++) masks &= masks - 1;
    if (!masks) return;
    int rows[AT_ONCE];
    float dot[AT_ONCE], square[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
        rows[j] = masks ? __ffsll(masks) - 1 : rows[0];
        masks &= masks - 1;
        dot[j] = square[j] = 0;
    }
#pragma unroll
    for (int i = 0; i < HELD; i++)
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            if (lane + i * 32 >= VECTORS) continue;
            const float4 x = ((const float4*)hidden)[rows[j] * (X_STRIDE / 4) + lane + i * 32], w = weights[i];
            dot[j] = __fmaf_rn(x.x, w.x, __fmaf_rn(x.y, w.y, __fmaf_rn(x.z, w.z, __fmaf_rn(x.w, w.w, dot[j]))));
            square[j] = __fmaf_rn(x.x, x.x, __fmaf_rn(x.y, x.y, __fmaf_rn(x.z, x.z, __fmaf_rn(x.w, x.w, square[j]))));
        }
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
        const float scale = 1.0f / sqrtf(warp_sum(square[j]) / (float)HIDDEN + eps), total = warp_sum(dot[j]);
        if (lane == 0) h[rows[j] * RANK + entry] = total * scale;
    }
}

// A sequence's mask rows in the order of their positions: the chain's links.
struct Links {
    int rows;                // of the sequence
    int count;               // links
    int order[MAX_WIDTH];    // link → index of its row within the sequence
    int link[MAX_WIDTH];     // and back, or -1
    int parent[MAX_WIDTH];   // index of the row before it, or -1
    int token[MAX_WIDTH];    // what a row (not a link) has chosen, later also links
    int position[MAX_WIDTH];
    int head[MAX_WIDTH];
};

// What one link needs, fetched before the walk. Tables and sums lie in dynamic shared memory.
struct Link {
    int ids[CANDIDATES];
    float logits[CANDIDATES], scores[CANDIDATES];
    int count[CANDIDATES];  // how often seen in the text; -1: not seen at all
    float bias[CANDIDATES], noise[CANDIDATES];
    bool allowed[CANDIDATES];
    Choice choice;
    bool greedy;  // `choice` is not filled
    float share;
    int before;  // its parent in the tile, or -1
    int chosen;  // which candidate
};

struct ChainShared {
    Links links;
    Link tile[CHAIN_TILE];
};

// Dynamic shared memory of one link, RANK numbers a row; choose.py knows its size.
struct Tables {
    half_bits q[CANDIDATES][RANK], p[CANDIDATES][RANK];
    half_bits given[RANK];  // P of a parent that is not in the tile
    float h[RANK];
};

DEVICE void copy_async(void* to, const void* from) {
    const unsigned address = __cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from));
}

DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

DEVICE int parent_of(const Links& links, u64 visible, int position) {
    for (; visible; visible &= visible - 1) {
        const int other = __ffsll(visible) - 1;
        if (links.position[other] == position - 1) return links.head[other] != HEAD_NONE ? other : -1;
    }
    return -1;
}

// Every thread calls it.
DEVICE void find_links(const Pass* pass, int first, int rows, const Output* outputs, Links& links) {
    const int t = threadIdx.x;
    Row own;
    if (t < rows) {
        own = pass->rows[first + t];
        links.position[t] = own.position;
        links.head[t] = own.head;
        links.token[t] = outputs[first + t].token;
    }
    __syncthreads();
    bool linked = false;
    if (t < rows) {
        links.parent[t] = own.token < 0 && own.head != HEAD_NONE ? parent_of(links, own.visible, own.position) : -1;
        linked = links.parent[t] >= 0;
    }
    links.count = __syncthreads_count(linked);
    if (linked) {
        int place = 0;
        for (int i = 0; i < rows; i++)
            place += links.parent[i] >= 0 && (links.position[i] < own.position || (links.position[i] == own.position && i < t));
        links.order[place] = t;
        links.link[t] = place;
    } else if (t < rows) {
        links.link[t] = -1;
    }
    __syncthreads();
}

// Place of an id in an ascending list, or -1.
DEVICE int find_id(const int* ids, int count, int id) {
    int low = 0, high = count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (ids[middle] < id) low = middle + 1;
        else high = middle;
    }
    return low < count && ids[low] == id ? low : -1;
}

DEVICE void fetch_candidate(const Candidates& from, const Row& row, const Pass* pass, int c, Link& link) {
    const int id = from.ids[c];
    link.ids[c] = id;
    link.logits[c] = from.logits[c];
    if (c == 0) link.share = from.share, link.greedy = row.choice < 0;
    if (row.choice < 0) return;
    const Choice choice = pass->choices[row.choice];
    const int seen = find_id(choice.seen, choice.num_seen, id), biased = find_id(choice.biased, choice.num_biased, id);
    link.count[c] = seen >= 0 ? choice.counts[seen] : -1;
    link.bias[c] = biased >= 0 ? choice.bias[biased] : 0.0f;
    link.allowed[c] = !choice.allowed || (choice.allowed[id >> 5] >> (id & 31) & 1);
    link.noise[c] = choice.temperature > 0 ? gumbel(noise_key(choice, row.position), id) : 0.0f;
    if (c == 0) link.choice = choice;
}

// Everything that links start … end - 1 need. All copies are in flight together.
DEVICE void fetch(const Pass* pass, int first, int start, int end, const Candidates* candidates, const float* h,
                  const half_bits* p, const half_bits* q, ChainShared& shared, Tables* tables) {
    const Links& links = shared.links;
    const int c = threadIdx.x / 32, lane = threadIdx.x % 32;
    int ids[CHAIN_TILE];
#pragma unroll
    for (int i = 0; i < CHAIN_TILE; i++) ids[i] = start + i < end ? candidates[first + links.order[start + i]].ids[c] : 0;
#pragma unroll
    for (int i = 0; i < CHAIN_TILE; i++) {
        if (start + i >= end) break;
        for (int at = lane * 8; at < RANK; at += 256) {
            copy_async(&tables[i].q[c][at], q + (long long)ids[i] * RANK + at);
            copy_async(&tables[i].p[c][at], p + (long long)ids[i] * RANK + at);
        }
    }
    for (int i = c; start + i < end; i += CANDIDATES) {  // a warp for each link
        const int own = links.order[start + i], parent = links.parent[own];
        for (int at = lane * 4; at < RANK; at += 128) copy_async(&tables[i].h[at], h + (first + own) * RANK + at);
        const int before = links.link[parent];
        if (lane == 0) shared.tile[i].before = before < start ? -1 : before - start;
        if (before < start)
            for (int at = lane * 8; at < RANK; at += 256)
                copy_async(&tables[i].given[at], p + (long long)links.token[parent] * RANK + at);
        if (lane < CANDIDATES)
            fetch_candidate(candidates[first + own], pass->rows[first + own], pass, lane, shared.tile[i]);
    }
    wait_for_copies();
    __syncthreads();
}

// How many lanes hold a greater key.
DEVICE int rank_of(u64 key) {
    int rank = 0;
    for (int i = 0; i < CANDIDATES; i++) rank += __shfl_sync(ALL_LANES, key, i) > key;
    return rank;
}

// Top-k, top-p and min-p among the lanes' candidates.
DEVICE bool keep(float z, u64 key, const Choice& choice) {
    const int rank = rank_of(key), top_k = choice.top_k > 0 ? choice.top_k : CANDIDATES;
    const float below = z - warp_largest(key ? z : NOTHING);
    const u64 weight = key && rank < top_k ? weight_of(below) : 0, total = warp_total(weight);
    u64 before = 0;
    for (int i = 0; i < CANDIDATES; i++) {
        const int other = __shfl_sync(ALL_LANES, rank, i);
        const u64 its = __shfl_sync(ALL_LANES, weight, i);
        before += other < rank ? its : 0;
    }
    return rank < top_k && exp_(below) >= choice.min_p && (choice.top_p >= 1 || before < goal_of(choice.top_p, total));
}

// One warp, a candidate a lane: which one the row's rules choose.
DEVICE int choose(const Link& link, int lane) {
    const bool is_one = lane < CANDIDATES && lane < VOCAB;
    const int id = is_one ? link.ids[lane] : 0;
    float x = is_one ? link.scores[lane] : NOTHING;
    u64 key = is_one ? key_of(x, id) : 0;
    if (!link.greedy) {
        const Choice& choice = link.choice;
        if (is_one && link.count[lane] >= 0) x = penalise(x, link.count[lane], choice);
        if (is_one) x += link.bias[lane];
        const bool allowed = is_one && link.allowed[lane];
        if (__any_sync(ALL_LANES, allowed) && !allowed) x = -__int_as_float(0x7f800000);
        const float z = choice.temperature > 0 ? x / choice.temperature : x;
        key = is_one ? key_of(z, id) : 0;
        const bool kept = !filters(choice) || keep(z, key, choice);
        if (choice.temperature > 0) key = is_one && kept ? key_of(z + link.noise[lane], id) : 0;
    }
    return __ffs(__ballot_sync(ALL_LANES, key == warp_best(key))) - 1;
}

// One warp: the output of a link that has been walked.
DEVICE void conclude(const Link& link, int parent, int top, Output& output, int lane) {
    const bool is_one = lane < CANDIDATES && lane < VOCAB;
    const float score = is_one ? link.scores[lane] : NOTHING;
    const float e = exp_(score - warp_largest(score)), probability = e / warp_sum(e) * link.share;
    if (lane == link.chosen) {
        output.token = link.ids[lane];
        output.probability = probability;
        output.parent = parent;
    }
    if (top == 0) return;
    const int rank = rank_of(is_one ? key_of(score, link.ids[lane]) : 0);
    if (is_one && rank < top) output.top_ids[rank] = link.ids[lane], output.top_logits[rank] = score;
}

// One link: its inner layer, its candidates' scores, its token. Nothing here waits for global memory.
DEVICE void walk(int place, float* inner, Link* tile, const Tables* tables) {
    const int c = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Tables& table = tables[place];
    Link& link = tile[place];
    const half_bits* p = link.before < 0 ? table.given : tables[link.before].p[tile[link.before].chosen];
    for (int at = threadIdx.x; at < RANK; at += CHAIN_THREADS) {
        const float x = table.h[at] + from_half(p[at]);
        inner[at] = __fdividef(x, 1.0f + exp_(-x));
    }
    __syncthreads();
    float dots[2] = {0, 0};
#pragma unroll
    for (int at = lane * 2; at < RANK; at += 64) {
        const unsigned pair = *(const unsigned*)&table.q[c][at];
        const float2 x = *(const float2*)&inner[at];
        dots[0] = __fmaf_rn(from_half(pair & 0xffff), x.x, dots[0]);
        dots[1] = __fmaf_rn(from_half(pair >> 16), x.y, dots[1]);
    }
    const float dot = warp_sum(dots[0] + dots[1]);
    if (lane == 0) link.scores[c] = link.logits[c] + dot;
    __syncthreads();
    if (c == 0) {
        const int chosen = choose(link, lane);
        if (lane == 0) link.chosen = chosen;
    }
    __syncthreads();
}

// One block per sequence. P and Q are [VOCAB][RANK] in half precision.
extern "C" __global__ void __launch_bounds__(CHAIN_THREADS, 1)
    chain(const Pass* pass, const Candidates* candidates, const float* h, const half_bits* p, const half_bits* q,
          Output* outputs) {
    extern __shared__ __align__(16) char dynamic[];
    __shared__ ChainShared shared;
    float* inner = (float*)dynamic;
    Tables* tables = (Tables*)(dynamic + RANK * sizeof(float));
    wait_for_previous();
    let_next_start();
    const int first = pass->sequences[blockIdx.x].first, rows = pass->sequences[blockIdx.x].rows, top = pass->top;
    if (blockIdx.x >= pass->num_sequences) return;
    Links& links = shared.links;
    find_links(pass, first, rows, outputs, links);
    for (int start = 0; start < links.count; start += CHAIN_TILE) {
        const int end = start + CHAIN_TILE < links.count ? start + CHAIN_TILE : links.count;
        fetch(pass, first, start, end, candidates, h, p, q, shared, tables);
        for (int place = 0; start + place < end; place++) walk(place, inner, shared.tile, tables);
        for (int i = threadIdx.x / 32; start + i < end; i += CANDIDATES) {
            const int own = links.order[start + i];
            conclude(shared.tile[i], first + links.parent[own], top, outputs[first + own], threadIdx.x % 32);
            if (threadIdx.x % 32 == 0) links.token[own] = shared.tile[i].ids[shared.tile[i].chosen];
        }
        __syncthreads();
    }
}

#endif
