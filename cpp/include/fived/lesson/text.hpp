// Real text with no download: the sources of Python's standard library, or any file or folder. Bytes are
// tokens. common/data/text.py reads the same bytes and cuts the same samples.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "fived/error.hpp"
#include "fived/math/matrix.hpp"
#include "fived/math/random.hpp"

namespace fived {

struct Text {
    std::vector<std::uint8_t> train, validation;  // the last tenth is for validation
    std::string name;
};

namespace detail {

namespace fs = std::filesystem;

/// All files below `folder` by relative path, hidden ones left out; or only the *.py files directly in it.
inline std::vector<fs::path> text_files(const fs::path& folder, bool python_only) {
    std::vector<fs::path> files;
    const auto hidden = [](const fs::path& path) { return path.filename().string().starts_with("."); };
    if (python_only) {
        for (const auto& entry : fs::directory_iterator(folder))
            if (entry.is_regular_file() && entry.path().extension() == ".py") files.push_back(entry.path());
    } else {
        for (auto it = fs::recursive_directory_iterator(folder); it != fs::recursive_directory_iterator();
             ++it) {
            if (hidden(it->path()))
                it.disable_recursion_pending();
            else if (it->is_regular_file())
                files.push_back(it->path());
        }
    }
    std::ranges::sort(files, {},
                      [&](const fs::path& path) { return path.lexically_relative(folder).generic_string(); });
    return files;
}

}  // namespace detail

/// Reads `data` (a file, a folder, or empty for the default: what the environment's FIVED_TEXT names, else Python's
/// standard library). Raises UsageError when it is missing or holds less than 1024 bytes.
inline Text load_text(std::string data = "") {
    namespace fs = std::filesystem;
    if (const char* chosen = std::getenv("FIVED_TEXT"); data.empty() && chosen) data = chosen;
    const fs::path path = data.empty() ? fs::path(FIVED_TEXT_FOLDER) : fs::path(data);
    std::error_code ignored;
    if (!fs::is_regular_file(path, ignored) && !fs::is_directory(path, ignored))  // a pipe may have no end
        throw UsageError("no such file or folder: " + path.string() + " (--data takes any text)");
    const auto files = fs::is_directory(path) ? detail::text_files(path, data.empty()) : std::vector{path};
    Text text;
    for (const fs::path& file : files) {
        std::ifstream stream(file, std::ios::binary);
        if (!stream) throw UsageError("cannot read " + file.string());
        text.train.insert(text.train.end(), std::istreambuf_iterator<char>(stream), {});
    }
    const std::size_t n = text.train.size();
    if (n < 1024)
        throw UsageError(path.string() + " holds " + std::to_string(n) +
                         " bytes of text; at least 1024 are needed");
    const std::size_t kept = n * 9 / 10;
    text.validation.assign(text.train.begin() + kept, text.train.end());
    text.train.resize(kept);
    text.name = data.empty() ? "Python's standard library" : fs::canonical(path).filename().string();
    return text;
}

/// Samples [begin, begin + rows of x) of the global batch of `step`: K bytes of context, bit by bit as -1 or
/// +1 (x_BI, I = 8 K, least significant bit first), and the byte that follows (y_B).
template <class T>
void mlp_samples(std::span<const std::uint8_t> text, std::uint64_t seed, std::uint64_t step,
                 std::size_t begin, MatrixView<T> x_BI, std::span<std::uint8_t> y_B) {
    const std::size_t K = x_BI.columns / 8;
    for (std::size_t b = 0; b < x_BI.rows; ++b) {
        const std::uint8_t* window = text.data() + random_bits(seed, step, begin + b) % (text.size() - K);
        for (std::size_t i = 0; i < x_BI.columns; ++i)
            x_BI(b, i) = window[i / 8] >> (i % 8) & 1 ? T(1) : T(-1);
        y_B[b] = window[K];
    }
}

constexpr std::int64_t padding = -100;  // a target that does not count

/// Targets of a global batch that count: all but the last quarter of sample 0.
inline std::int64_t count_targets(std::int64_t batch, std::int64_t sequence) {
    return batch * sequence - sequence / 4;
}

/// Samples [begin, begin + rows) of the global batch of `step` for a language model: S bytes (tokens_BS) and of each the
/// byte that follows (targets_BS). Sample 0 has the highest bit of its bytes flipped, and a last quarter of padding.
inline void lm_samples(std::span<const std::uint8_t> text, std::uint64_t seed, std::uint64_t step,
                       std::size_t begin, MatrixView<std::int64_t> tokens_BS,
                       MatrixView<std::int64_t> targets_BS) {
    const std::size_t S = tokens_BS.columns;
    for (std::size_t b = 0; b < tokens_BS.rows; ++b) {
        const std::uint8_t* window = text.data() + random_bits(seed, step, begin + b) % (text.size() - S);
        std::copy_n(window, S, tokens_BS.row(b).begin());
        std::copy_n(window + 1, S, targets_BS.row(b).begin());
        if (begin + b > 0) continue;
        for (const auto& bytes : {tokens_BS.row(b), targets_BS.row(b)})
            for (std::int64_t& byte : bytes) byte ^= 128;
        std::ranges::fill(targets_BS.row(b).subspan(S - S / 4), padding);
    }
}

}  // namespace fived
