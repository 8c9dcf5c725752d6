// What an iteration of a resident loop decides: the twin of decoding/policy.py, state.py and decoder.py, as one header that
// compiles as C++, where the CPU backend runs it (and tests, beside the Python, without a GPU), and as CUDA.
//
// Under CUDA one warp runs every function, all lanes together, on a Loop and a Kept in shared memory; `prefix`, `each` and
// `once` are the only places that know of lanes. Between them, all lanes compute the same.
#pragma once

#ifdef __CUDACC__
#define TWIN __device__ inline
#else
#define TWIN inline
#endif

namespace decisions {

constexpr int MAX_ROWS = 64;   // of a pass
constexpr int MAX_BLOCK = 32;  // the checkpoint format's largest block
constexpr int MAX_EOS = 16;

enum Verify : int { VERIFY_ALWAYS = 0, VERIFY_IF_SHORT = 1, VERIFY_NEVER = 2 };
enum Source : int { SOURCE_EXACT = 0, SOURCE_ACCEPTED = 1, SOURCE_CONFIDENT = 2 };

// The loop goes on while RUNNING. STOP and LENGTH end the text; the others are pauses of a loop on a device, after which it may
// be begun again.
enum Status : int { RUNNING = 0, STOP = 1, LENGTH = 2, INTERRUPTED = 3, NEEDS_MEMORY = 4, RING_FULL = 5 };

struct Policy {
    double bars[MAX_BLOCK];  // the probability that makes each proposal confident
    double verify_bound;
    int block_size;
    int verify;  // Verify
    int min_prefix;
    int reserved[3];
};

// One text. Mirrored, like all structures here, in layout.py.
struct alignas(16) Loop {
    Policy policy;
    int limit;     // length of prompt and text at which it ends
    int capacity;  // on a device: positions that K/V memory is mapped for and the captured passes reach
    int choice;    // of every row: index into the pass's choices, or -1: greedy
    int num_eos;
    int eos[MAX_EOS];
    int committed;
    int materialized;
    int status;     // Status
    unsigned sent;  // on a device: tokens ever written to the ring
    int pending[MAX_BLOCK];
    int proposals[MAX_ROWS];
    int num_proposals;  // set aside to verify; 0 at an iteration's boundary
    int passes;
    int iterations;
    int num_spec_steps;
    int proposed;
    int accepted;
    int copied;
    int lengths[MAX_ROWS + 1];  // iterations that committed 0, 1, … tokens
};

// Of an Output, what decides.
struct Chosen {
    int token;
    float probability;
    float entropy;
};

// What an iteration committed: at most a token for each row of a pass, a copy's, say.
struct Kept {
    int count;
    int tokens[MAX_ROWS];
    int sources[MAX_ROWS];  // Source
};

// After a draft pass: commit this many proposals as they are, or verify this many. One of the two is 0.
struct Decision {
    int commit;
    int verify;
};

// Lanes

// How many of 0 … n - 1, from the first on, hold.
template <class Holds>
TWIN int prefix(int n, Holds holds) {
#ifdef __CUDACC__
#pragma unroll 1  // a small kernel starts sooner than an unrolled one
    for (int base = 0; base < n; base += 32) {
        int i = base + threadIdx.x;
        unsigned failing = __ballot_sync(0xffffffffu, i < n && !holds(i));
        if (failing) return base + __ffs(failing) - 1;
    }
    return n;
#else
    int length = 0;
    while (length < n && holds(length)) ++length;
    return length;
#endif
}

// act(0) … act(n - 1), in any order. What was read before it, is read before it writes; what it writes, all lanes see after.
template <class Act>
TWIN void each(int n, Act act) {
#ifdef __CUDACC__
    __syncwarp();
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += 32) act(i);
    __syncwarp();
#else
    for (int i = 0; i < n; ++i) act(i);
#endif
}

template <class Act>
TWIN void once(Act act) {
    each(1, [&](int) { act(); });
}

TWIN int least(int a, int b) { return a < b ? a : b; }

// policy.py

TWIN int confident_prefix(const Chosen* proposals, int n, const double* bars) {
    return prefix(n, [&](int i) { return i == 0 || double(proposals[i].probability) >= bars[i]; });
}

// The joint probability is a product in order, so this one is no `prefix`.
TWIN int worth_verifying(const Chosen* proposals, int n, double bound) {
    double joint = 1.0;
    int length = 1;
    for (; length < n; ++length) {
        joint *= double(proposals[length].probability);
        if (joint < bound) break;
    }
    return length;
}

// chosen[i]: what the verifier's row of proposal i says comes next; or, if not even the first proposal is known to stand
// (`known` 0), what the row before proposal i says.
TWIN int longest_match(const int* proposals, const Chosen* chosen, int n, int known) {
    return prefix(n, [&](int i) { return i < known || proposals[i] == chosen[i - known].token; });
}

TWIN Decision decide(const Policy& policy, const Chosen* proposals, int n, int room) {
    if (n == 1) return {1, 0};
    int confident = least(confident_prefix(proposals, n, policy.bars), room);
    if (policy.verify == VERIFY_NEVER || (policy.verify == VERIFY_IF_SHORT && confident >= policy.min_prefix))
        return {confident, 0};
    // A verify pass commits at least one token of its own behind what it accepts.
    int verify = least(worth_verifying(proposals, n, policy.verify_bound), room - 1);
    return verify ? Decision{0, verify} : Decision{1, 0};
}

// state.py

TWIN int room(const Loop& loop) { return loop.limit - loop.committed; }

TWIN int num_pending(const Loop& loop) { return loop.committed - loop.materialized; }

// Proposals of the draft pass that stands at this boundary.
TWIN int block(const Loop& loop) { return least(loop.policy.block_size, room(loop)); }

// What the loop says of a row; its choice is `Loop::choice`.
struct Planned {
    unsigned long long visible;
    int token;
    int position;
    bool heard;  // by the exact head; else no head
};

TWIN Planned causal_row(const Loop& loop, int i, int token, bool heard = true) {
    return {~0ull >> (63 - i), token, loop.materialized + i, heard};
}

TWIN int draft_width(const Loop& loop) { return num_pending(loop) + block(loop) - 1; }

// Pending rows, the last one the anchor, then masks.
TWIN Planned draft_row(const Loop& loop, int i) {
    int anchor = num_pending(loop) - 1;
    return i > anchor ? causal_row(loop, i, anchor - i) : causal_row(loop, i, loop.pending[i], i == anchor);
}

TWIN Planned verify_row(const Loop& loop, int i) { return causal_row(loop, i, loop.proposals[i]); }

// decoder.py

TWIN bool ends(const Loop& loop, int token) {
    for (int i = 0; i < loop.num_eos; ++i)
        if (loop.eos[i] == token) return true;
    return false;
}

// Of `written` tokens, the ones up to the first that ends the text.
TWIN int kept_of(const Loop& loop, const Kept& kept, int written) {
    return least(prefix(written, [&](int i) { return !ends(loop, kept.tokens[i]); }) + 1, written);
}

// The tokens in `kept` are text now. `materialized` are in the store; `accepted` of `proposed` guesses are among them, the
// anchor's own being none.
TWIN void commit(Loop& loop, Kept& kept, int count, int materialized, int accepted, int proposed, bool drafted) {
    bool stopped = ends(loop, kept.tokens[count - 1]);
    once([&] {
        kept.count = count;
        loop.committed += count;
        loop.materialized += materialized;
        loop.num_proposals = 0;
        loop.status = stopped ? STOP : RUNNING;
        loop.iterations += 1;
        loop.num_spec_steps += drafted;
        loop.proposed += proposed;
        loop.accepted += accepted;
        loop.lengths[count] += 1;
    });
    int pending = num_pending(loop);
    each(pending, [&](int i) { loop.pending[i] = kept.tokens[count - pending + i]; });
}

// The pending rows are history, the proposals wait for the verifier.
TWIN void set_aside(Loop& loop, Kept& kept, const Chosen* proposals, int count) {
    each(count, [&](int i) { loop.proposals[i] = proposals[i].token; });
    once([&] {
        kept.count = 0;
        loop.materialized = loop.committed;
        loop.num_proposals = count;
    });
}

// After a draft pass: commit proposals, or set them aside to verify. outputs[i] is of row i.
TWIN void judge(Loop& loop, const Chosen* outputs, Kept& kept) {
    int pending = num_pending(loop), n = block(loop);
    const Chosen* proposals = outputs + pending - 1;
    Decision decision = decide(loop.policy, proposals, n, room(loop));
    once([&] { loop.passes += 1; });
    if (decision.verify) return set_aside(loop, kept, proposals, decision.verify);
    each(decision.commit, [&](int i) {
        kept.tokens[i] = proposals[i].token;
        kept.sources[i] = i == 0 ? SOURCE_EXACT : SOURCE_CONFIDENT;
    });
    int count = kept_of(loop, kept, decision.commit);
    commit(loop, kept, count, pending, count - 1, n - 1, n > 1);
}

// After a verify pass: the longest match, whose length it returns, then the verifier's own token. `known`: 1 after a draft
// pass, whose anchor chose the first proposal; 0 where the anchor's row leads this pass.
TWIN int accept(Loop& loop, const Chosen* outputs, Kept& kept, int known) {
    int n = loop.num_proposals, length = longest_match(loop.proposals, outputs, n, known);
    each(length + 1, [&](int i) {
        kept.tokens[i] = i < known ? loop.proposals[i] : outputs[i - known].token;
        kept.sources[i] = i < known || i == length ? SOURCE_EXACT : SOURCE_ACCEPTED;
    });
    once([&] { loop.passes += 1; });
    int count = kept_of(loop, kept, length + 1);
    commit(loop, kept, count, 1 - known + least(length, count - 1), least(length, count) - known, n - known, true);
    return length;
}

// STOP or LENGTH if the text has ended, else RUNNING.
TWIN int ended(const Loop& loop) { return loop.status == STOP ? STOP : room(loop) <= 0 ? LENGTH : RUNNING; }

}  // namespace decisions
