// The format safetensors (https://github.com/huggingface/safetensors): named tensors in one file, which runs no code.
//
//     8 bytes      length of the header, little-endian
//     header       {"__metadata__": {"step": "200"}, "norm.bias": {"dtype": "F64", "shape": [64], "data_offsets": [0, 512]}, ...}
//     numbers      of all tensors, row by row, one tensor after the other: no gap, no overlap
//
// The header is JSON of this one form. The reader takes no other: std::invalid_argument says what it found.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fived/lesson/record.hpp"

namespace fived {

/// Where a tensor lies in a file, in bytes behind the header.
struct Stored {
    std::string dtype;  // "F64" or "F32"
    std::vector<std::size_t> shape;
    std::size_t begin = 0, end = 0;

    std::size_t element() const { return dtype == "F64" ? 8 : 4; }
    /// Bytes of all numbers.
    std::size_t bytes() const {
        std::size_t n = element();
        for (const std::size_t length : shape)
            if (__builtin_mul_overflow(n, length, &n)) throw std::invalid_argument("a tensor is too large");
        return n;
    }
    /// "[8, 6] float64"
    std::string described() const {
        std::string list;
        for (const std::size_t length : shape) list += (list.empty() ? "" : ", ") + std::to_string(length);
        return "[" + list + (dtype == "F64" ? "] float64" : "] float32");
    }
};

struct SafetensorsHeader {
    std::map<std::string, std::string> metadata;
    std::map<std::string, Stored> tensors;

    /// Lays the tensors one after the other. Long numbers come first, so that each lies at a multiple of its size.
    void lay_out() {
        std::size_t end = 0;
        for (const std::size_t element : {8, 4})
            for (auto& [_, tensor] : tensors)
                if (tensor.element() == element)
                    tensor.begin = std::exchange(end, end + tensor.bytes()), tensor.end = end;
    }
    /// Bytes of all numbers. Throws std::invalid_argument for a gap or an overlap.
    std::size_t bytes() const {
        std::vector<std::pair<std::size_t, std::size_t>> order;
        std::size_t end = 0;
        for (const auto& [_, tensor] : tensors) order.emplace_back(tensor.begin, tensor.end);
        std::ranges::sort(order);
        for (const auto& [begin, next] : order)
            if (std::exchange(end, next) != begin)
                throw std::invalid_argument("its tensors overlap or leave a gap");
        return end;
    }
    /// What a file begins with: the header and, before it, its length.
    std::string text() const {
        Record header, strings;
        for (const auto& [name, value] : metadata) strings.add(name, value);
        header.add("__metadata__", strings);
        for (const auto& [name, tensor] : tensors)
            header.add(name, Record()
                                 .add("dtype", tensor.dtype)
                                 .add("shape", tensor.shape)
                                 .add("data_offsets", std::vector{tensor.begin, tensor.end}));
        std::string text = header.line(), length;
        text.resize((text.size() + 7) / 8 * 8, ' ');
        for (int i = 0; i < 8; ++i) length += char(text.size() >> 8 * i);
        return length + text;
    }
};

/// Reads a header without its length.
class SafetensorsReader {
  public:
    static SafetensorsHeader read(std::string_view text) {
        SafetensorsReader reader(text);
        SafetensorsHeader header;
        reader.object([&](const std::string& name) {
            if (name == "__metadata__")
                reader.object([&](const std::string& key) { header.metadata[key] = reader.string(); });
            else if (!header.tensors.try_emplace(name, reader.tensor(name)).second)
                throw std::invalid_argument("it has two tensors " + name);
        });
        if (reader.rest_.find_first_not_of(space) != text.npos) reader.fail("the end");
        return header;
    }

  private:
    static constexpr std::string_view space = " \t\n\r";

    explicit SafetensorsReader(std::string_view text) : whole_(text.size()), rest_(text) {}

    Stored tensor(const std::string& name) {
        Stored tensor;
        std::vector<std::size_t> offsets;
        object([&](const std::string& key) {
            if (key == "dtype")
                tensor.dtype = string();
            else if (key == "shape")
                tensor.shape = numbers();
            else if (key == "data_offsets")
                offsets = numbers();
            else
                throw std::invalid_argument(name + " has a " + key + ", which is unknown");
        });
        if (tensor.dtype != "F64" && tensor.dtype != "F32")
            throw std::invalid_argument(name + " has the dtype " + tensor.dtype +
                                        "; F64 and F32 can be read");
        if (offsets.size() != 2 || offsets[1] < offsets[0] || offsets[1] - offsets[0] != tensor.bytes())
            throw std::invalid_argument("the offsets of " + name + " do not fit its shape");
        tensor.begin = offsets[0], tensor.end = offsets[1];
        return tensor;
    }
    /// {"key": value, ...}: value(key) reads each.
    template <class Value>
    void object(Value value) {
        expect('{');
        if (take('}')) return;
        do {
            const std::string key = string();
            expect(':');
            value(key);
        } while (take(','));
        expect('}');
    }
    std::vector<std::size_t> numbers() {
        std::vector<std::size_t> list;
        expect('[');
        if (take(']')) return list;
        do {
            skip();
            const auto [end, error] =
                std::from_chars(rest_.data(), rest_.data() + rest_.size(), list.emplace_back());
            if (error != std::errc()) fail("a number");
            rest_.remove_prefix(std::size_t(end - rest_.data()));
        } while (take(','));
        expect(']');
        return list;
    }
    std::string string() {
        expect('"');
        std::string text;
        while (!rest_.empty() && rest_[0] != '"') {
            const char c = next();
            if (static_cast<unsigned char>(c) < 0x20) fail("a string");
            c == '\\' ? escaped(text) : text.push_back(c);
        }
        if (rest_.empty()) fail("a string");
        rest_.remove_prefix(1);
        return text;
    }
    /// What follows a backslash; no control characters, which would break a message's line.
    void escaped(std::string& text) {
        const char c = next();
        if (c == '"' || c == '\\' || c == '/') return text.push_back(c);
        unsigned code = 0;
        const std::string_view digits = rest_.substr(0, 4);
        const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
        if (c != 'u' || error != std::errc() || end != digits.data() + 4 || code < 0x20 || code > 0x7e)
            fail("a character of ASCII");
        rest_.remove_prefix(4);
        text.push_back(char(code));
    }
    char next() {
        if (rest_.empty()) fail("more");
        const char c = rest_[0];
        rest_.remove_prefix(1);
        return c;
    }
    void skip() { rest_.remove_prefix(std::min(rest_.find_first_not_of(space), rest_.size())); }
    bool take(char c) {
        skip();
        if (!rest_.starts_with(c)) return false;
        rest_.remove_prefix(1);
        return true;
    }
    void expect(char c) {
        if (!take(c)) fail(std::string(1, c));
    }
    [[noreturn]] void fail(const std::string& expected) const {
        throw std::invalid_argument("its header should have " + expected + " at byte " +
                                    std::to_string(whole_ - rest_.size()));
    }

    std::size_t whole_;
    std::string_view rest_;
};

}  // namespace fived
