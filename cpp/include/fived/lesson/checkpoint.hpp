// A checkpoint: whole tensors under the plain model's names in one safetensors file, which any mesh reads and writes.
//
//     rank 0 holds   [ 0  1  2  .  .  . ]      two runs of the whole tensor's numbers
//                    [ 6  7  8  .  .  . ]
//     rank 1 holds   [ .  .  .  3  4  5 ] ──► bitwise or over the ranks ──► rank 0 writes the whole, block by block
//                    [ .  .  .  9 10 11 ]
//
// Of several replicas one is written: the others bring zeros, whose bits change nothing. When a checkpoint is read, each rank
// reads its own runs. No rank ever holds the whole model.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "fived/lesson/agree.hpp"
#include "fived/lesson/safetensors.hpp"
#include "fived/mpi/mpi.hpp"

namespace fived {

/// Numbers that lie together in the whole tensor and on this rank.
struct Run {
    std::size_t whole, here, length;
};

/// The runs of n numbers of which number i is number place(i) of the whole tensor.
template <class Place>
std::vector<Run> runs_of(std::size_t n, Place place) {
    std::vector<Run> runs;
    for (std::size_t i = 0; i < n; ++i) {
        const std::size_t whole = place(i);
        if (!runs.empty() && runs.back().whole + runs.back().length == whole)
            ++runs.back().length;
        else
            runs.push_back({whole, i, 1});
    }
    return runs;
}

/// This rank's numbers of a tensor.
struct Piece {
    std::string name;
    Stored whole;
    std::vector<Run> runs;
    std::span<std::byte> numbers;
    bool written;  // by this rank, among those with the same numbers

    template <class T>
    Piece(std::string name, std::vector<std::size_t> whole_shape, std::vector<Run> runs, std::span<T> numbers,
          bool written)
        : name(std::move(name)),
          whole{sizeof(T) == 8 ? "F64" : "F32", std::move(whole_shape)},
          runs(std::move(runs)),
          numbers(std::as_writable_bytes(numbers)),
          written(written) {}
};

using Metadata = std::map<std::string, std::string>;

/// A file that has another name until it is complete. After an error its functions do nothing.
class NewFile {
  public:
    explicit NewFile(const std::string& name)
        : name_(name), partial_(name + ".partial"), file_(std::fopen(partial_.c_str(), "wb")) {
        check(file_ != nullptr);
        if (std::filesystem::exists(name_) && !std::filesystem::is_regular_file(name_))
            problem_ = name_ + " cannot be written: it is no file";
    }
    NewFile(const NewFile&) = delete;
    NewFile& operator=(const NewFile&) = delete;
    ~NewFile() {
        if (!file_) return;
        std::fclose(file_);
        std::remove(partial_.c_str());
    }

    void write(std::span<const std::byte> bytes) {
        if (good()) check(std::fwrite(bytes.data(), 1, bytes.size(), file_) == bytes.size());
    }
    /// The bytes are on the disk, under the name.
    void finish() {
        if (good()) check(std::fflush(file_) == 0 && fsync(fileno(file_)) == 0);
        if (good()) check(std::rename(partial_.c_str(), name_.c_str()) == 0);
        if (good()) std::fclose(std::exchange(file_, nullptr));
    }
    /// The first error, or nothing.
    const std::string& problem() const { return problem_; }

  private:
    bool good() const { return problem_.empty(); }
    void check(bool done) {
        if (!done) problem_ = name_ + " cannot be written: " + std::strerror(errno);
    }

    std::string name_, partial_, problem_;
    std::FILE* file_;
};

/// The tensors of which the ranks hold pieces. Collective.
inline std::map<std::string, Stored> held_by_all(const Communicator& world, std::span<const Piece> mine) {
    SafetensorsHeader here;
    for (const Piece& piece : mine) here.tensors[piece.name] = piece.whole;
    here.lay_out();
    std::map<std::string, Stored> all;
    for (int rank = 0; rank < world.size(); ++rank) {
        std::string text = here.text();
        world.broadcast(text, rank);
        all.merge(SafetensorsReader::read(std::string_view(text).substr(8)).tensors);
    }
    return all;
}

/// Bytes that lie together in a file, behind its header, and on this rank.
struct Segment {
    std::size_t begin;
    std::span<std::byte> bytes;
};

/// Those of this rank's pieces, in the order of the file.
inline std::vector<Segment> segments(const SafetensorsHeader& file, std::span<const Piece> mine) {
    std::vector<Segment> list;
    for (const Piece& piece : mine) {
        const Stored& whole = file.tensors.at(piece.name);
        const std::size_t n = whole.element();
        for (const Run& run : piece.runs)
            list.push_back(
                {whole.begin + run.whole * n, piece.numbers.subspan(run.here * n, run.length * n)});
    }
    std::ranges::sort(list, {}, &Segment::begin);
    return list;
}

/// Writes the tensors of which the ranks hold pieces. Throws AgreedError where the file cannot be written; one that was there
/// before stays. Collective.
inline void save(const Communicator& world, const std::string& name, const Metadata& metadata,
                 std::vector<Piece> mine) {
    SafetensorsHeader header{metadata, held_by_all(world, mine)};
    header.lay_out();
    std::erase_if(mine, [](const Piece& piece) { return !piece.written; });
    std::vector<Segment> rest = segments(header, mine);
    std::optional<NewFile> file;
    if (world.rank() == 0) file.emplace(name);
    const auto write = [&](std::span<const std::byte> bytes) {
        if (file) file->write(bytes);
    };
    const std::string text = header.text();
    write(std::as_bytes(std::span(text)));
    std::vector<std::uint64_t> block(1 << 17);
    const auto bytes = std::as_writable_bytes(std::span(block));
    auto next = rest.begin();
    for (std::size_t begin = 0; begin < header.bytes(); begin += bytes.size()) {
        const std::size_t end = std::min(begin + bytes.size(), header.bytes());
        std::ranges::fill(block, 0);
        while (next != rest.end() && next->begin < end) {
            const std::size_t n = std::min(next->bytes.size(), end - next->begin);
            std::ranges::copy(next->bytes.first(n), bytes.begin() + std::ptrdiff_t(next->begin - begin));
            *next = {next->begin + n, next->bytes.subspan(n)};
            next += next->bytes.empty();
        }
        world.all_reduce(std::span(block), MPI_BOR);
        write(bytes.first(end - begin));
    }
    if (file) file->finish();
    agree(world, file ? file->problem() : "");
}

/// A checkpoint that is there. Collective.
class Checkpoint {
  public:
    /// Throws AgreedError for a file that cannot be read, or that has other tensors than the ranks hold pieces of.
    Checkpoint(const Communicator& world, const std::string& name, std::span<const Piece> mine)
        : world_(world), name_(name) {
        const std::map<std::string, Stored> here = held_by_all(world, mine);
        agreed(world, [&] { open(), compare(here); });
    }
    const Metadata& metadata() const { return header_.metadata; }
    /// Fills the pieces. Throws AgreedError.
    void read(std::span<const Piece> mine) {
        agreed(world_, [&] {
            for (const Segment& segment : segments(header_, mine))
                fill(start_ + segment.begin, segment.bytes);
        });
    }

  private:
    void open() {
        namespace fs = std::filesystem;
        std::error_code error;
        if (!fs::is_regular_file(name_, error))  // a pipe may have no end
            fail(error               ? error.message()
                 : fs::exists(name_) ? "it is not a regular file"
                                     : "there is no such file");
        const std::uint64_t size = fs::file_size(name_, error);
        stream_.open(name_, std::ios::binary);
        if (error || !stream_) fail(error ? error.message() : std::strerror(errno));
        std::array<std::byte, 8> length{};
        fill(0, length);
        std::uint64_t n = 0;
        for (int i = 8; i-- > 0;) n = n << 8 | std::uint64_t(length[i]);
        if (n > size - 8) fail("it is cut short");
        std::string text(n, ' ');
        fill(8, std::as_writable_bytes(std::span(text)));
        start_ = 8 + n;
        try {
            header_ = SafetensorsReader::read(text);
            if (header_.bytes() != size - start_)
                throw std::invalid_argument(
                    header_.bytes() > size - start_ ? "it is cut short" : "it goes on behind its tensors");
        } catch (const std::invalid_argument& error) {
            fail(error.what());
        }
    }
    void compare(const std::map<std::string, Stored>& here) const {
        const auto text = [](const std::map<std::string, Stored>& tensors, const std::string& name) {
            const auto found = tensors.find(name);
            return found == tensors.end() ? "missing" : found->second.described();
        };
        std::map<std::string, Stored> all = here;
        all.insert(header_.tensors.begin(), header_.tensors.end());
        for (const auto& [name, _] : all) {
            const std::string there_is = text(header_.tensors, name), here_is = text(here, name);
            if (there_is != here_is)
                throw UsageError(name_ + " is of another model or optimizer: " + name + " is " + there_is +
                                 " there and " + here_is +
                                 " here; give the options it was made with, or another file");
        }
    }
    void fill(std::size_t begin, std::span<std::byte> bytes) {
        stream_.seekg(std::streamoff(begin));
        stream_.read(reinterpret_cast<char*>(bytes.data()), std::streamsize(bytes.size()));
        if (!stream_) fail("it is cut short");
    }
    [[noreturn]] void fail(const std::string& why) const {
        throw UsageError("cannot read " + name_ + ": " + why);
    }

    const Communicator& world_;
    std::string name_;
    std::ifstream stream_;
    SafetensorsHeader header_;
    std::size_t start_ = 0;  // of the numbers
};

}  // namespace fived
