// What the command line of pp_mpi sets, and the schedules that follow: Python's, or one from a file.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "fived/mlp_training.hpp"
#include "fived/mpi.hpp"
#include "pp_schedule.hpp"

namespace fived {

struct Settings : MlpSettings {
    int chunks = 2;
    std::string schedule = "all", list;
    std::vector<std::pair<std::string, Schedule>> schedules;  // by name, once check() was called

    Settings() { batch = 53, layers = 9, hidden = 96, micro_batches = 8; }
    /// What --benchmark starts from: two stages of equal work, large enough that a step is mostly arithmetic.
    void prefer_benchmark() {
        steps = 3, batch = 4096, context = 48, hidden = 1024, layers = 8, micro_batches = 16;
        dtype = "float32", optimizer = "adamw";
    }
    Options options() {
        Options options("Pipeline parallelism by MPI, an MLP on bytes of text. Run it under mpirun.");
        add_to(options, "samples a step; all pass every stage",
               "parts of the batch that follow one another through the stages", " of each schedule");
        add_model_to(options);
        options.add("schedule", schedule, {"all", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"},
                    "what ranks do when, as ../pytorch/pp_schedules.py generates it");
        options.add("chunks", chunks, 1, "stages of each rank in the interleaved schedule");
        options.add("list", list, "a file with the list of each rank instead, a line a rank");
        return options;
    }
    /// Collective: rank 0 alone reads the lists.
    void check(const Communicator& world) {
        std::vector<std::string> names{schedule};
        if (schedule == "all") names = {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"};
        if (!list.empty()) names = {std::filesystem::path(list).filename().string()};
        if (list.empty()) check_micro_batches(micro_batches);
        for (const std::string& name : names) {
            // before Python makes a long list for nothing
            if (name == "interleaved") check_layers(name, world.size(), std::int64_t{chunks} * world.size());
            const std::string text =
                of_rank_0(world, [&] { return list.empty() ? ask_python(name, world.size()) : read_file(); });
            schedules.emplace_back(name, checked(name, text, world.size()));
        }
        load();
        check_context();
    }

  private:
    void check_micro_batches(int parts) const {
        if (parts > batch)
            throw UsageError("--batch " + std::to_string(batch) + " cannot be cut into " +
                             std::to_string(parts) + " micro-batches; give between 1 and " +
                             std::to_string(batch));
    }
    void check_layers(const std::string& name, int ranks, std::int64_t stages) const {
        if (stages > layers)
            throw UsageError("--layers " + std::to_string(layers) + " are too few for the " +
                             std::to_string(stages) + " stages of " + name + " on " + std::to_string(ranks) +
                             " rank(s); at least " + std::to_string(stages));
    }
    Schedule checked(const std::string& name, const std::string& text, int ranks) const {
        Schedule found;
        try {
            found = read_schedule(text);
        } catch (const UsageError& error) {
            throw UsageError(name + ": " + error.what());
        }
        if (found.ranks() != ranks)
            throw UsageError(name + " is for " + std::to_string(found.ranks()) + " rank(s); there are " +
                             std::to_string(ranks));
        check_layers(name, ranks, found.stages());
        check_micro_batches(found.micro_batches);
        return found;
    }
    std::string read_file() const {
        std::ifstream stream(list, std::ios::binary);
        if (!stream || std::filesystem::is_directory(list))
            throw UsageError("no such file: " + list + " (--list takes what pp_schedules.py prints)");
        return {std::istreambuf_iterator<char>(stream), {}};
    }
    std::string ask_python(const std::string& name, int ranks) const {
        const std::string command = std::string("'" FIVED_INTERPRETER "' '" FIVED_SCHEDULES "' --schedule ") +
                                    name + " --ranks " + std::to_string(ranks) + " --micro-batches " +
                                    std::to_string(micro_batches) + " --chunks " + std::to_string(chunks);
        std::FILE* pipe = popen((command + " </dev/null 2>/dev/null").c_str(), "r");
        std::string text;
        char part[4096];
        while (const std::size_t n = pipe ? std::fread(part, 1, sizeof part, pipe) : 0) text.append(part, n);
        if (!pipe || pclose(pipe) != 0)
            throw UsageError("Python gave no list: " + command + " fails; --list FILE takes one from a file");
        return text;
    }
    /// What rank 0 reads, on all ranks; its UsageError, too.
    template <class Read>
    static std::string of_rank_0(const Communicator& world, Read read) {
        std::string answer;
        if (world.rank() == 0) try {
                answer = "+" + read();
            } catch (const UsageError& error) {
                answer = std::string("-") + error.what();
            }
        std::uint64_t length = answer.size();
        world.broadcast(std::span(&length, 1));
        answer.resize(length);
        world.broadcast(std::as_writable_bytes(std::span(answer)));
        if (answer[0] == '-') throw UsageError(answer.substr(1));
        return answer.substr(1);
    }
};

}  // namespace fived
