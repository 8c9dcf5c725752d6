// The pool and the loop with several threads, for the thread sanitizer: `threads MODEL`, a file of model_file.py.
//
// Every region of the pool must run each task once. Texts that share passes on four threads must be what they are alone
// on one, while other threads ask for, fork and give back sequences.
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "../backends/model_file.hpp"
#include "loop.hpp"

using namespace bitmtp;

namespace {

void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "threads: %s\n", what);
    std::exit(1);
}

void run_regions() {
    for (const int threads : {2, 3, 4}) {
        Pool pool(threads);
        std::vector<int> times(200);  // written by whoever has the task, read by the caller: the region orders the two
        for (int region = 0; region < 3000; ++region) {
            const int tasks = 1 + region * 7 % int(times.size());
            pool.parallel(tasks, 1 + region % 5, [&](int begin, int end, int) {
                for (int task = begin; task < end; ++task) times[task] += 1;
            });
            for (int task = 0; task < tasks; ++task) expect(times[task] == 1, "a task did not run once");
            std::fill(times.begin(), times.end(), 0);
            if (region % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // workers go to sleep
        }
    }
}

core::Policy policy_of(int number) {
    core::Policy policy = {};
    policy.block_size = number == 0 ? 1 : 8;
    policy.adaptive = number == 2;
    policy.ranks = policy.adaptive ? 3 : 1;
    policy.min_prefix = 1;
    policy.usual_ease = core::EASE, policy.usual_faith = core::FAITH;
    policy.window = policy.adaptive ? core::Window{core::SINKS, core::RECENT} : core::Window{0, 0};
    for (double& temperature : policy.temperatures) temperature = 1.0;
    return policy;
}

std::vector<std::vector<int>> write(Model& model, const std::vector<int>& prompt) {
    auto costs = std::make_shared<core::Costs>();
    for (int rows = 0; rows <= core::MAX_ROWS; ++rows) costs->milliseconds[rows] = 1.0 + 0.05 * rows;
    costs->row = 0.05, costs->reach = core::MAX_ROWS;
    core::Batch batch{costs};
    std::vector<std::unique_ptr<core::Owner>> owners;
    std::vector<core::Owner*> texts;
    for (int number = 0; number < 6; ++number) {
        core::Sampling sampling;
        sampling.temperature = number % 2 ? 1.0f : 0.0f, sampling.seed = std::uint64_t(number);
        const std::vector<std::int32_t> ids(prompt.begin(), prompt.end() - number);
        owners.push_back(std::make_unique<core::Owner>(ids, 0, int(ids.size()) + 30, policy_of(number % 3), sampling, costs));
        owners.back()->sequence = model.open();
        texts.push_back(owners.back().get());
    }
    const auto goes_on = [](const core::Owner* text) { return text->text.status == core::GOES_ON; };
    while (std::any_of(texts.begin(), texts.end(), goes_on)) run(model, batch, texts, 64, 32, 1.0);
    std::vector<std::vector<int>> written;
    for (const auto& owner : owners) {
        written.emplace_back(owner->tokens.begin(), owner->tokens.begin() + owner->text.committed);
        model.close(owner->sequence);
    }
    return written;
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 2) return 2;
    run_regions();
    const Tensors tensors = read(arguments[1]);
    const Shape shape = shape_of(numbers(tensors, "shape"));
    const std::vector<int> prompt = numbers(tensors, "tokens");
    Model alone(shape, tensors, 1), model(shape, tensors, 4);
    const auto expected = write(alone, prompt);
    std::atomic<bool> over{false};
    std::vector<std::thread> others;
    for (int i = 0; i < 2; ++i)
        others.emplace_back([&] {
            while (!over) {
                const int own = model.open(), fork = model.fork(own, 0);
                expect(model.length(fork) == 0 && model.kv_bytes() + 1 > 0, "a fresh sequence is not empty");
                model.close(own), model.close(fork);
                std::this_thread::sleep_for(std::chrono::microseconds(200));
            }
        });
    for (int round = 0; round < 3; ++round) expect(write(model, prompt) == expected, "a text is not what it is alone");
    over = true;
    for (std::thread& other : others) other.join();
    std::puts("threads: regions and texts are as they should be");
}
