// How long to wait for a thread that does not get its core.
//
// On a shared machine another job, or another machine on the same host, takes a core for milliseconds. A thread that is
// put aside while it holds a piece of work stops all others for that long: two threads then take longer than one.
#pragma once

#include <algorithm>
#include <chrono>

namespace bitmtp {

/// What a caller remembers of one helper: how much time it lost to it of late, and until when it does without it.
class Patience {
public:
    using Time = std::chrono::steady_clock::time_point;

    /// The caller waited from `begun` to `ended` for what the helper held: whether it had better do without it, until
    /// `until()`. An odd delay is forgiven; a helper that is late again soon after it came back stays away twice as long.
    bool ends(Time begun, Time ended) {
        lost_ = std::max(lost_ - (begun - last_) / forgiveness, Span(0)) + (ended - begun);
        last_ = ended;
        if (lost_ < most_lost) return false;
        away_ = begun < until_ + forgiveness * away_ ? std::min(2 * away_, longest) : shortest;
        until_ = ended + away_;
        lost_ = Span(0);
        return true;
    }

    Time until() const { return until_; }

private:
    using Span = std::chrono::steady_clock::duration;

    static constexpr int forgiveness = 8;  // an eighth of the time may be lost: less than a helper brings
    static constexpr Span most_lost = std::chrono::milliseconds(1);
    static constexpr Span shortest = std::chrono::milliseconds(8), longest = std::chrono::milliseconds(512);

    Span lost_{0}, away_ = shortest;
    Time last_{}, until_{};
};

}  // namespace bitmtp
