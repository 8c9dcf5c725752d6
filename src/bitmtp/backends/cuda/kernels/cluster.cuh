// Blocks of a cluster (compute capability 9.0 and later): who they are, and how they write to each other's shared memory.
#pragma once

#include "common.cuh"

DEVICE int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The address of a place of this block's shared memory in another block of the cluster.
DEVICE unsigned remote(const void* own, int block) {
    unsigned address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"((unsigned)__cvta_generic_to_shared(own)), "r"(block));
    return address;
}

DEVICE void send(unsigned address, float x, float y) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// A place where a block waits, once, for bytes that others send.
struct Mailbox {
    unsigned long long barrier;

    // One thread, before any block sends.
    DEVICE void expect(int bytes) {
        unsigned own = (unsigned)__cvta_generic_to_shared(&barrier);
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(own) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(own), "r"(bytes) : "memory");
    }

    // 16 bytes to the same place `to` of another block.
    DEVICE void send(const uint4* to, uint4 v, int block) const {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(remote(to, block)),
                     "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(remote(&barrier, block))
                     : "memory");
    }

    DEVICE void wait() const {
        unsigned own = (unsigned)__cvta_generic_to_shared(&barrier);
        asm volatile(
            "{\n.reg .pred done;\n"
            "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
            "@!done bra again;\n}"
            ::"r"(own) : "memory");
    }
};
