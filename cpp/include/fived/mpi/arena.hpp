// Memory for results, which the other ranks of the host write straight.
//
// The file that the ranks of a host share has a part for each of them, its arena. A block of an arena is ordinary memory of
// its rank that the others see too, so a message to it is copied once, by its sender. An arena takes memory as blocks are
// asked for; those that are given back are kept for the next.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace fived {

/// A file that was mapped, and its memory. It ends with the last who has it mapped.
struct SharedFile {
    int handle;
    std::byte* start;
    std::size_t bytes;

    SharedFile(int handle, std::byte* start, std::size_t bytes)
        : handle(handle), start(start), bytes(bytes) {}
    ~SharedFile() {
        munmap(start, bytes);
        close(handle);
    }
    SharedFile(const SharedFile&) = delete;
    SharedFile& operator=(const SharedFile&) = delete;
};

/// The part of a rank, at [begin, end) of the file.
class Arena : public std::enable_shared_from_this<Arena> {
  public:
    Arena(std::shared_ptr<const SharedFile> file, std::size_t begin, std::size_t end)
        : file_(std::move(file)), begin_(begin), taken_(begin), end_(end) {}

    /// A block, given back when the last pointer to it goes; it may outlive the arena's owner. Null where the system has no
    /// room for it.
    std::shared_ptr<std::byte> block(std::size_t bytes) {
        bytes = (bytes + granule - 1) / granule * granule;
        const std::lock_guard lock(mutex_);
        auto found = free_.begin();
        while (found != free_.end() && found->second < bytes) ++found;
        if (found == free_.end()) {
            if (!grow(bytes)) return {};
            found = std::prev(free_.end());
        }
        const auto [at, length] = *found;
        free_.erase(found);
        if (length > bytes) free_.emplace(at + bytes, length - bytes);
        return {file_->start + at,
                [self = shared_from_this(), at, bytes](std::byte*) { self->give_back(at, bytes); }};
    }
    /// Whether [place, place + bytes) lies in it.
    bool holds(const std::byte* place, std::size_t bytes) const {
        const std::byte *first = file_->start + begin_, *last = file_->start + end_;
        return place >= first && place <= last && bytes <= std::size_t(last - place);
    }

  private:
    static constexpr std::size_t granule = 1 << 16;

    /// Adds memory at the end, so that the last free block has that many bytes.
    bool grow(std::size_t bytes) {
        std::size_t from = taken_;
        if (!free_.empty() && free_.rbegin()->first + free_.rbegin()->second == taken_)
            from = free_.rbegin()->first;
        const std::size_t more = from + bytes - taken_;
        // What the file has been promised can be used: no signal at the first write where the host runs out.
        if (more > end_ - taken_ || posix_fallocate(file_->handle, off_t(taken_), off_t(more)) != 0)
            return false;
#ifdef MADV_POPULATE_WRITE
        madvise(file_->start + taken_, more, MADV_POPULATE_WRITE);  // at once, not page by page
#endif
        taken_ += more;
        free_[from] = bytes;
        return true;
    }
    void give_back(std::size_t at, std::size_t bytes) {
        const std::lock_guard lock(mutex_);
        auto block = free_.emplace(at, bytes).first;
        if (const auto next = std::next(block); next != free_.end() && at + bytes == next->first) {
            block->second += next->second;
            free_.erase(next);
        }
        if (block != free_.begin())
            if (const auto before = std::prev(block); before->first + before->second == at) {
                before->second += block->second;
                free_.erase(block);
            }
    }

    std::shared_ptr<const SharedFile> file_;
    std::size_t begin_, taken_, end_;
    std::map<std::size_t, std::size_t> free_;  // where blocks begin, and their bytes
    std::mutex mutex_;
};

}  // namespace fived
