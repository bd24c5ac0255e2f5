// Timing, and results as one JSON object a line, the same keys in all three languages.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <type_traits>
#include <vector>

#include "fived/error.hpp"

namespace fived {

class Timer {
  public:
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

  private:
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// NaN for no values.
inline double median(std::vector<double> values) {
    if (values.empty()) return std::nan("");
    std::ranges::sort(values);
    const std::size_t n = values.size();
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

/// Median over the rounds of a / b.
inline double ratio(const std::vector<double>& a, const std::vector<double>& b) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < a.size(); ++i) ratios.push_back(a[i] / b[i]);
    return median(ratios);
}

/// The largest resident set of this process so far.
inline std::int64_t peak_memory_bytes() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
#ifdef __APPLE__
    return usage.ru_maxrss;
#else
    return usage.ru_maxrss * std::int64_t{1024};
#endif
}

/// Raises UsageError when nothing can be appended to `file`: better said before the work than after.
inline void check_writable(const std::string& file) {
    if (!std::ofstream(file, std::ios::app)) throw UsageError("cannot write to " + file);
}

/// A JSON object, built key by key.
class Record {
  public:
    template <class V>
    Record& add(const std::string& key, const V& value) {
        body_ += (body_.empty() ? "" : ", ") + text(key) + ": " + text(value);
        return *this;
    }
    std::string line() const { return "{" + body_ + "}"; }
    /// Appends the line to `file`. Raises UsageError when that fails.
    void append_to(const std::string& file) const {
        check_writable(file);
        std::ofstream stream(file, std::ios::app);
        stream << line() + "\n" << std::flush;
        if (!stream) throw UsageError("cannot write to " + file);
    }

  private:
    static std::string text(std::nullptr_t) { return "null"; }
    static std::string text(bool value) { return value ? "true" : "false"; }
    static std::string text(const Record& value) { return value.line(); }
    static std::string text(const char* value) { return text(std::string(value)); }
    static std::string text(const std::string& value) {
        std::string quoted = "\"";
        for (const char c : value) {
            char escaped[8];
            if (static_cast<unsigned char>(c) < 0x20) {
                std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
                quoted += escaped;
            } else {
                if (c == '"' || c == '\\') quoted += '\\';
                quoted += c;
            }
        }
        return quoted + "\"";
    }
    template <class V>
        requires std::is_integral_v<V>
    static std::string text(V value) {
        return std::to_string(value);
    }
    static std::string text(double value) {
        if (!std::isfinite(value)) return "null";
        char digits[32];
        std::snprintf(digits, sizeof digits, "%.9g", value);
        return digits;
    }
    template <class V>
    static std::string text(const std::vector<V>& values) {
        std::string list;
        for (const V& value : values) list += (list.empty() ? "" : ", ") + text(value);
        return "[" + list + "]";
    }

    std::string body_;
};

}  // namespace fived
