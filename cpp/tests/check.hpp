// A test program is a list of CHECKs under mpirun: it prints those that fail and exits with 1 if any rank has
// one.
#pragma once

#include <cmath>
#include <cstdio>
#include <exception>
#include <string>

inline int failures = 0;

inline void report(bool right, const char* what, const char* file, int line) {
    if (right) return;
    ++failures;
    std::fprintf(stderr, "%s:%d: not true: %s\n", file, line, what);
}

#define CHECK(...) report(bool(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)

/// The message of the exception that `action` raises; empty when it raises none.
template <class Action>
std::string message_of(Action action) {
    try {
        action();
    } catch (const std::exception& error) {
        return error.what();
    }
    return "";
}

inline bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != text.npos;
}
