#include "reduce.hpp"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <concepts>
#include <stdexcept>
#include <string>

namespace fived {

namespace {

template <class T>
using Wide = std::conditional_t<std::same_as<T, c10::Half> || std::same_as<T, c10::BFloat16>, float, T>;

struct Sum {
    template <class T>
    static T apply(T a, T b) {
        if constexpr (std::same_as<T, bool>)
            return a || b;
        else
            return a + b;
    }
};
struct Product {
    template <class T>
    static T apply(T a, T b) {
        if constexpr (std::same_as<T, bool>)
            return a && b;
        else
            return a * b;
    }
};
struct Min {
    template <class T>
    static T apply(T a, T b) {
        return b < a ? b : a;
    }
};
struct Max {
    template <class T>
    static T apply(T a, T b) {
        return a < b ? b : a;
    }
};
struct And {
    template <class T>
    static T apply(T a, T b) {
        return a & b;
    }
};
struct Or {
    template <class T>
    static T apply(T a, T b) {
        return a | b;
    }
};
struct Xor {
    template <class T>
    static T apply(T a, T b) {
        return a ^ b;
    }
};

template <class T, class Op, bool average>
void reduce(std::byte* out, const std::byte* const* in, int inputs, std::size_t count) {
    T* const y = reinterpret_cast<T*>(out);
    const T* const a = reinterpret_cast<const T*>(in[0]);
    const Wide<T> scale = average ? Wide<T>(1) / Wide<T>(inputs) : Wide<T>(1);
    const auto finish = [scale](Wide<T> value) {
        if constexpr (average)
            return T(value * scale);
        else
            return T(value);
    };
    if (inputs == 2) {
        const T* const b = reinterpret_cast<const T*>(in[1]);
#pragma omp simd
        for (std::size_t i = 0; i < count; ++i) y[i] = finish(Op::apply(Wide<T>(a[i]), Wide<T>(b[i])));
        return;
    }
    // Blocks that stay in the nearest cache: every input is read from its start to its end.
    constexpr std::size_t block = 1024;
    Wide<T> total[block];
    for (std::size_t begin = 0; begin < count; begin += block) {
        const std::size_t n = std::min(block, count - begin);
        for (std::size_t i = 0; i < n; ++i) total[i] = Wide<T>(a[begin + i]);
        for (int r = 1; r < inputs; ++r) {
            const T* const b = reinterpret_cast<const T*>(in[r]) + begin;
#pragma omp simd
            for (std::size_t i = 0; i < n; ++i) total[i] = Op::apply(total[i], Wide<T>(b[i]));
        }
        for (std::size_t i = 0; i < n; ++i) y[begin + i] = finish(total[i]);
    }
}

}  // namespace

Reduce reduction(c10::ScalarType type, c10d::ReduceOp::RedOpType op) {
    const auto refuse = [&]() -> Reduce {
        static const char* names[] = {"sum",  "avg", "product", "min",       "max",
                                      "band", "bor", "bxor",    "premul_sum"};
        throw std::invalid_argument(std::string("no reduction '") + names[std::min<int>(op, 8)] +
                                    "' for tensors of " + c10::toString(type));
    };
    const auto choose = [&]<class T>() -> Reduce {
        constexpr bool complex = c10::is_complex<T>::value;
        switch (op) {
            case c10d::ReduceOp::SUM:
                return reduce<T, Sum, false>;
            case c10d::ReduceOp::PRODUCT:
                return reduce<T, Product, false>;
            default:
                break;
        }
        if constexpr (!std::integral<T>)
            if (op == c10d::ReduceOp::AVG) return reduce<T, Sum, true>;
        if constexpr (!complex) {
            if (op == c10d::ReduceOp::MIN) return reduce<T, Min, false>;
            if (op == c10d::ReduceOp::MAX) return reduce<T, Max, false>;
        }
        if constexpr (std::integral<T>) {
            if (op == c10d::ReduceOp::BAND) return reduce<T, And, false>;
            if (op == c10d::ReduceOp::BOR) return reduce<T, Or, false>;
            if (op == c10d::ReduceOp::BXOR) return reduce<T, Xor, false>;
        }
        return refuse();
    };
    switch (type) {
        case at::kFloat:
            return choose.operator()<float>();
        case at::kDouble:
            return choose.operator()<double>();
        case at::kHalf:
            return choose.operator()<c10::Half>();
        case at::kBFloat16:
            return choose.operator()<c10::BFloat16>();
        case at::kComplexFloat:
            return choose.operator()<c10::complex<float>>();
        case at::kComplexDouble:
            return choose.operator()<c10::complex<double>>();
        case at::kLong:
            return choose.operator()<std::int64_t>();
        case at::kInt:
            return choose.operator()<std::int32_t>();
        case at::kShort:
            return choose.operator()<std::int16_t>();
        case at::kChar:
            return choose.operator()<std::int8_t>();
        case at::kByte:
            return choose.operator()<std::uint8_t>();
        case at::kBool:
            return choose.operator()<bool>();
        default:
            return refuse();
    }
}

}  // namespace fived
