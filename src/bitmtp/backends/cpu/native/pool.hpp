// A pool of threads for regions of a few microseconds.
//
// A pass is some 250 short parallel regions, so a region must cost less than a microsecond: workers spin between
// regions and sleep only after a pause. Work is dealt in chunks from one counter, because on a shared machine equal
// shares do not take equal time; and a region ends when its tasks are done, not when every worker has checked in, so
// that a worker the system has put aside delays nothing it has not begun. A piece it has begun cannot be taken from it:
// a worker that is late with one is left out for a while (patience.hpp), and the others do all the work.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <vector>

#include "patience.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bitmtp {

/// Tell the core that this thread is waiting in a loop.
inline void spin_pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // "yield" is a no-op on most cores
#endif
}

/// Threads that run parallel regions together with the caller. One caller at a time; regions do not nest.
class Pool {
public:
    /// `threads` in all, the caller's included. Throws std::invalid_argument below 1.
    explicit Pool(int threads) : threads_(threads), workers_(std::max(threads - 1, 0)) {
        if (threads < 1) throw std::invalid_argument("a pool needs at least one thread");
        for (int index = 1; index < threads; ++index) {
            workers_[index - 1].thread = std::thread([this, index] { work(index); });
        }
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_.store(true);
        }
        wake_.notify_all();
        recall_.notify_all();
        for (Worker& worker : workers_) worker.thread.join();
    }

    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    /// Run `body(begin, end, thread)` over [0, tasks) in pieces of at most `chunk` tasks and return when all are done;
    /// `thread` is in [0, threads()), the caller 0. Which thread takes which piece is not fixed. `body` must not throw.
    template <class F>
    void parallel(int tasks, int chunk, F&& body) {
        chunk = std::max(chunk, 1);
        if (tasks <= 0) return;
        if (left_out_ > 0) recall(Clock::now());
        if (left_out_ == threads_ - 1 || tasks <= chunk) return body(0, tasks, 0);
        using Body = std::remove_reference_t<F>;
        publish(tasks, chunk, [](void* context, int begin, int end, int thread) noexcept {
            (*static_cast<Body*>(context))(begin, end, thread);
        }, const_cast<void*>(static_cast<const void*>(&body)));
        run_chunks(0);
        for (int spins = 0; done_.load(std::memory_order_acquire) != tasks; ++spins) {
            if (spins == 1000) return wait_for_late(tasks);
            spin_pause();
        }
    }

private:
    using Call = void (*)(void*, int, int, int) noexcept;
    using Clock = std::chrono::steady_clock;

    struct alignas(64) Worker {
        std::atomic<bool> inside{false};    // it may hold a piece
        std::atomic<bool> left_out{false};  // it takes none
        // The caller's own:
        bool late = false;
        Patience patience;
        std::thread thread;
    };

    static constexpr auto spin_time = std::chrono::microseconds(300);

    // The ticket holds the region's number (high half) and its unclaimed tasks (low half). A claim is a
    // compare-exchange on both: it succeeds only while its region is unfinished, and what was read before is that
    // region's.
    void publish(int tasks, int chunk, Call call, void* context) {
        tasks_.store(tasks, std::memory_order_relaxed);
        chunk_.store(chunk, std::memory_order_relaxed);
        call_.store(call, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        const std::uint64_t region = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        ticket_.store(region << 32 | std::uint32_t(tasks));  // sequentially consistent, as is `sleepers_`
        if (sleepers_.load() > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }  // a worker between its last look and its sleep holds it
            wake_.notify_all();
        }
    }

    void run_chunks(int thread) {
        int finished = 0;
        std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while (const int left = int(std::uint32_t(ticket))) {
            const int tasks = tasks_.load(std::memory_order_relaxed);
            const int size = std::min(left, chunk_.load(std::memory_order_relaxed));
            const Call call = call_.load(std::memory_order_relaxed);
            void* context = context_.load(std::memory_order_relaxed);
            if (!ticket_.compare_exchange_weak(ticket, ticket - size, std::memory_order_acq_rel,
                                               std::memory_order_acquire)) {
                continue;
            }
            ticket -= size;
            call(context, tasks - left, tasks - left + size, thread);
            finished += size;
            // Ours until `done_` says so: the region cannot end, nor the ticket's number change, before.
            ticket = ticket_.load(std::memory_order_acquire);
        }
        if (finished > 0) done_.fetch_add(finished, std::memory_order_release);
    }

    // Wait for pieces that others hold, and leave out who is late with them too often.
    void wait_for_late(int tasks) {
        const auto begun = Clock::now();
        for (Worker& worker : workers_) worker.late = worker.inside.load(std::memory_order_relaxed);
        while (done_.load(std::memory_order_acquire) != tasks) std::this_thread::yield();
        const auto ended = Clock::now();
        for (Worker& worker : workers_) {
            if (!worker.late || !worker.patience.ends(begun, ended)) continue;
            worker.left_out.store(true, std::memory_order_relaxed);  // published with the next region
            ++left_out_;
        }
    }

    // Take back the workers whose time has come.
    void recall(Clock::time_point now) {
        for (Worker& worker : workers_) {
            if (!worker.left_out.load(std::memory_order_relaxed) || now < worker.patience.until()) continue;
            {
                std::lock_guard<std::mutex> lock(mutex_);
                worker.left_out.store(false);
            }
            --left_out_;
            recall_.notify_all();
        }
    }

    bool has_work() const { return std::uint32_t(ticket_.load(std::memory_order_acquire)) != 0; }

    void work(int thread) {
        Worker& self = workers_[thread - 1];
        while (wait_for_work(self)) {
            self.inside.store(true, std::memory_order_relaxed);
            run_chunks(thread);
            self.inside.store(false, std::memory_order_relaxed);
        }
    }

    // False when the pool is being destroyed.
    bool wait_for_work(const Worker& self) {
        const auto left_out = [&] { return self.left_out.load(std::memory_order_relaxed); };
        const auto deadline = Clock::now() + spin_time;
        for (int rounds = 0; !left_out() && Clock::now() < deadline; ++rounds) {
            for (int spins = 0; spins < 32; ++spins) {
                if (has_work() && !left_out()) return true;
                spin_pause();
            }
            // Who waits on this core, the caller perhaps, is not kept from it.
            if (rounds > 4) std::this_thread::yield();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        recall_.wait(lock, [&] { return stopping_.load() || !left_out(); });
        sleepers_.fetch_add(1);
        wake_.wait(lock, [this] { return stopping_.load() || std::uint32_t(ticket_.load()) != 0; });
        sleepers_.fetch_sub(1);
        return !stopping_.load();
    }

    const int threads_;
    int left_out_ = 0;  // workers that the caller does without
    std::vector<Worker> workers_;
    std::mutex mutex_;
    std::condition_variable wake_, recall_;
    std::atomic<bool> stopping_{false};
    std::atomic<int> sleepers_{0};
    // Written once a region, read by all; the two counters beside them are written by all.
    alignas(64) std::atomic<int> tasks_{0};
    std::atomic<int> chunk_{1};
    std::atomic<Call> call_{nullptr};
    std::atomic<void*> context_{nullptr};
    alignas(64) std::atomic<std::uint64_t> ticket_{0};
    alignas(64) std::atomic<int> done_{0};
};

}  // namespace bitmtp
