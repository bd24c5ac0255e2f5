// The options of the binaries that run a pipeline's schedule, and the schedules that follow: Python's, or one from a file.
//
// fived_asks_for_schedules(target) in CMake says which Python, and where its generators are.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "fived/lesson/options.hpp"
#include "fived/math/schedule.hpp"
#include "fived/mpi/mpi.hpp"
#include "fived/named.hpp"

namespace fived {

/// The schedules that pp_schedules.py generates.
enum class ScheduleKind { gpipe, one_f_one_b, interleaved, zb_h1, zb_v };
constexpr auto names(ScheduleKind) {
    return std::array{"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"};
}

struct ScheduleSettings {
    int chunks = 2;
    std::optional<ScheduleKind> schedule;                     // none: all, one after the other
    std::string list;                                         // a file; empty: Python is asked
    std::vector<std::pair<std::string, Schedule>> schedules;  // by name, once make_schedules() was called

    void add_schedule_to(Options& options) {
        options.add("schedule", schedule, "all", "what ranks do when, as pp_schedules.py generates it");
        options.add("chunks", chunks, 1, "stages of each rank in the interleaved schedule", 1000);
        options.add("list", list, "a file with the list of each rank instead, a line a rank");
    }
    /// Rank 0 alone reads the lists, for pipelines of so many ranks. `layers_are`: "--layers 9", say. Collective. Throws
    /// UsageError for what cannot work, the same on all ranks.
    void make_schedules(const Communicator& world, int ranks, int batch, int micro_batches, int layers,
                        const std::string& layers_are) {
        const auto check_parts = [&](int parts) {
            if (parts > batch)
                throw UsageError("--batch " + std::to_string(batch) + " cannot be cut into " +
                                 std::to_string(parts) + " micro-batches; give between 1 and " +
                                 std::to_string(batch));
        };
        const auto check_layers = [&](const std::string& name, std::int64_t stages) {
            if (stages > layers)
                throw UsageError(layers_are + " are too few for the " + std::to_string(stages) +
                                 " stages of " + name + " on " + std::to_string(ranks) +
                                 " rank(s); at least " + std::to_string(stages));
        };
        const auto keep = [&](const std::string& name, const std::string& text) {
            const Schedule found = checked(name, text, ranks);
            check_layers(name, found.stages());
            check_parts(found.micro_batches);
            schedules.emplace_back(name, found);
        };
        if (!list.empty())
            return keep(std::filesystem::path(list).filename().string(),
                        of_rank_0(world, [&] { return read_file(); }));
        check_parts(micro_batches);
        for (const ScheduleKind kind : schedule ? std::vector{*schedule} : values_of<ScheduleKind>()) {
            const std::string name = name_of(kind);
            // before Python makes a long list for nothing
            if (kind == ScheduleKind::interleaved) check_layers(name, std::int64_t{chunks} * ranks);
            keep(name, of_rank_0(world, [&] { return ask_python(name, ranks, micro_batches); }));
        }
    }

  private:
    static Schedule checked(const std::string& name, const std::string& text, int ranks) {
        Schedule found;
        try {
            found = read_schedule(text);
        } catch (const UsageError& error) {
            throw UsageError(name + ": " + error.what());
        }
        if (found.ranks() != ranks)
            throw UsageError(name + " is for " + std::to_string(found.ranks()) + " rank(s); there are " +
                             std::to_string(ranks));
        return found;
    }
    std::string read_file() const {
        std::error_code ignored;
        const bool regular = std::filesystem::is_regular_file(list, ignored);  // a pipe may have no end
        std::ifstream stream(regular ? list : "", std::ios::binary);
        if (!stream)
            throw UsageError("no such file: " + list + " (--list takes what pp_schedules.py prints)");
        return {std::istreambuf_iterator<char>(stream), {}};
    }
    std::string ask_python(const std::string& name, int ranks, int micro_batches) const {
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
        std::uint8_t is_error = false;
        if (world.rank() == 0) try {
                answer = read();
            } catch (const UsageError& error) {
                answer = error.what(), is_error = true;
            }
        world.broadcast(answer);
        world.broadcast(std::span(&is_error, 1));
        if (is_error) throw UsageError(answer);
        return answer;
    }
};

}  // namespace fived
