// Memory for results that the other ranks of the host write.
//
// The file that the ranks of a host share has a part for each rank, its arena. A rank uses a block of its arena as any other
// memory. The others have it mapped too, so they copy a message straight into it, once. An arena takes memory of the system
// when a block is asked for, and keeps blocks that are given back for later ones.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace fived {

/// A mapped file; unmapped and closed with the last owner.
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

/// A rank's blocks in [begin, end) of the file; `begin` is a multiple of `granule`.
class Arena : public std::enable_shared_from_this<Arena> {
  public:
    static constexpr std::size_t granule = 1 << 16;  // bytes; whole pages

    Arena(std::shared_ptr<const SharedFile> file, std::size_t begin, std::size_t end)
        : file_(std::move(file)), begin_(begin), taken_(begin), end_(end) {}

    /// A block, given back when the last pointer to it goes; it may outlive the arena's owner. Null where there is no room.
    std::shared_ptr<std::byte> block(std::size_t bytes) {
        bytes = (std::max<std::size_t>(bytes, 1) + granule - 1) / granule * granule;
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
    /// Whether the arena contains [place, place + bytes).
    bool holds(const std::byte* place, std::size_t bytes) const {
        const std::byte *first = file_->start + begin_, *last = file_->start + end_;
        return place >= first && place <= last && bytes <= std::size_t(last - place);
    }

  private:
    /// Adds memory at the end, so that the last free block has that many bytes.
    bool grow(std::size_t bytes) {
        std::size_t from = taken_;
        if (!free_.empty() && free_.rbegin()->first + free_.rbegin()->second == taken_)
            from = free_.rbegin()->first;
        const std::size_t more = from + bytes - taken_;
        if (more > end_ - taken_ || !leaves_half(more)) return false;
        // Reserved now: otherwise a write could end the program with SIGBUS when memory runs out.
        if (posix_fallocate(file_->handle, off_t(taken_), off_t(more)) != 0) return false;
#ifdef MADV_POPULATE_WRITE
        madvise(file_->start + taken_, more, MADV_POPULATE_WRITE);  // at once, not page by page
#endif
        taken_ += more;
        free_[from] = bytes;
        return true;
    }
    /// Whether half of the file system stays free for later groups, MPI and other programs.
    bool leaves_half(std::size_t more) const {
        struct statvfs system = {};
        if (fstatvfs(file_->handle, &system) != 0) return false;
        const bool limited = system.f_blocks > 0;
        return !limited || system.f_bavail >= system.f_blocks / 2 + more / system.f_frsize;
    }
    void give_back(std::size_t at, std::size_t bytes) {
        if (getpid() != process_)
            return;  // a forked child has a copy of the list, and perhaps a lock held for ever
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
    pid_t process_ = getpid();
};

}  // namespace fived
