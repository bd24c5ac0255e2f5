#include "tp_summa_mpi.hpp"

#include <sched.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "fived/math/blas.hpp"

namespace fived {

namespace {

/// What a rank says of its collective in shared memory, where the others check it.
enum class Operation : std::uint32_t { broadcast = 1, sum };

/// Times that a product stops to let the next panel move.
constexpr std::size_t stops = 4;

template <class T>
void add_terms(std::byte* out, const std::byte* const* in, int inputs, std::size_t count) {
    T* const total = reinterpret_cast<T*>(out);
    for (std::size_t i = 0; i < count; ++i) {
        T sum = 0;
        for (int r = 0; r < inputs; ++r) sum += reinterpret_cast<const T*>(in[r])[i];
        total[i] = sum;
    }
}

template <class T>
Call call(Operation operation, std::size_t elements, int root, std::uint64_t number) {
    return {std::uint32_t(operation), sizeof(T), elements, std::uint64_t(root), number};
}

template <class T>
void copy(MatrixView<const T> from, MatrixView<T> to) {
    for (std::size_t i = 0; i < from.rows; ++i) std::ranges::copy(from.row(i), to.row(i).begin());
}

}  // namespace

GridShape most_square(int ranks) {
    GridShape grid{1, ranks};
    for (int rows = 1; rows * rows <= ranks; ++rows)
        if (ranks % rows == 0) grid = {rows, ranks / rows};
    return grid;
}

Line::Line(Communicator comm, Carrier carrier) : comm_(std::move(comm)) {
    if (carrier == Carrier::host && size() > 1) memory_ = std::make_unique<HostMemory>(comm_);
}

template <class T>
void Line::start_broadcast(std::span<T> data, int root) {
    if (size() == 1 || data.empty()) return;
    if (memory_)
        rounds_.emplace(broadcast(*memory_, call<T>(Operation::broadcast, data.size(), root, ++calls_),
                                  std::as_writable_bytes(data).data(), data.size_bytes(), root));
    else
        request_ = comm_.start_broadcast(data, root);
    test();
}

template <class T>
void Line::reduce(std::span<T> data, int root) {
    if (size() == 1 || data.empty()) return;
    if (memory_)
        rounds_.emplace(all_reduce(*memory_, call<T>(Operation::sum, data.size(), root, ++calls_),
                                   std::as_writable_bytes(data).data(), data.size_bytes(), sizeof(T),
                                   add_terms<T>, root));
    else
        request_ = comm_.start_reduce(data, root);
    wait();
}

bool Line::test() {
    if (!rounds_) return request_.test();
    const auto differs = [&](int r, const Call&) {
        comm_.fail("a collective in shared memory", "rank " + std::to_string(r) + " calls another one");
    };
    if (memory_->advance(*rounds_, differs)) rounds_.reset();
    return !rounds_;
}

void Line::wait() {
    if (!rounds_) request_.wait();
    for (int idle = 0; !test(); ++idle)
        if (idle > 1000) sched_yield();  // there may be more ranks than cores
}

template <class T>
Summa<T>::Summa(const Communicator& comm, GridShape grid, Shape whole, std::size_t panels, Carrier carrier,
                bool overlap)
    : whole_(whole),
      overlap_(overlap),
      row_(comm.split(comm.rank() / std::max(1, grid.columns), comm.rank(), "row"), carrier),
      column_(comm.split(comm.rank() % std::max(1, grid.columns), comm.rank(), "column"), carrier) {
    if (grid.rows < 1 || grid.columns < 1 || grid.rows * grid.columns != comm.size())
        comm.fail("Summa", "a grid of " + std::to_string(grid.rows) + " x " + std::to_string(grid.columns) +
                               " needs as many ranks");
    cut_panels(std::max<std::size_t>(1, panels));
    std::size_t longest = 0;
    for (const Panel& p : panels_) longest = std::max(longest, p.inner.length);
    for (int i = 0; i < 2; ++i) {
        room_a_[i] = std::make_unique<T[]>(rows_of_c().length * longest);
        room_b_[i] = std::make_unique<T[]>(longest * columns_of_c().length);
    }
}

template <class T>
void Summa<T>::cut_panels(std::size_t each) {
    const int R = column_.size(), C = row_.size();
    std::vector<std::size_t> edges;
    for (int c = 0; c <= C; ++c) edges.push_back(cut(whole_.K, C, c));
    for (int r = 0; r <= R; ++r) edges.push_back(cut(whole_.K, R, r));
    std::ranges::sort(edges);
    const auto owner = [&](std::size_t begin, int pieces) {
        int i = 0;
        while (range(whole_.K, pieces, i).end() <= begin) ++i;
        return i;
    };
    // a panel travels as one message
    const std::size_t widest = std::max<std::size_t>(
        1, max_message / std::max({std::size_t{1}, (whole_.M + R - 1) / R, (whole_.J + C - 1) / C}));
    for (std::size_t e = 0; e + 1 < edges.size(); ++e) {
        const std::size_t begin = edges[e], length = edges[e + 1] - begin;
        const std::size_t parts = std::min(length, std::max(each, (length + widest - 1) / widest));
        for (std::size_t i = 0; i < parts; ++i) {
            const Range piece = range(length, int(parts), int(i));
            panels_.push_back({{begin + piece.begin, piece.length}, owner(begin, C), owner(begin, R)});
        }
    }
}

template <class T>
void Summa<T>::check(MatrixView<const T> a, MatrixView<const T> b, MatrixView<const T> c) const {
    const auto fits = [](const char* name, MatrixView<const T> x, Range rows, Range columns) {
        check_piece(std::string("block of ") + name, x, rows, columns);
        if (x.stride != x.columns)
            throw std::invalid_argument(std::string(name) + " has gaps between its rows");
    };
    fits("A", a, rows_of_c(), columns_of_a());
    fits("B", b, rows_of_b(), columns_of_c());
    fits("C", c, rows_of_c(), columns_of_c());
}

/// Begins to broadcast panel p; both factors are there when both lines are done.
template <class T>
auto Summa<T>::start(std::size_t p, MatrixView<const T> a, MatrixView<const T> b) -> Factors {
    const auto [inner, column, row] = panels_[p];
    const MatrixView<T> room_a(room_a_[p % 2].get(), a.rows, inner.length),
        room_b(room_b_[p % 2].get(), inner.length, b.columns);
    Factors panel{room_a, room_b};
    const auto bring = [&](Line& line, int root, MatrixView<const T> x) {
        if (line.size() == 1) return;
        // the root's data are only read
        line.start_broadcast(std::span(const_cast<T*>(x.data), x.rows * x.columns), root);
        if (line.rank() == root) sent_ += (line.size() - 1) * x.rows * x.columns * sizeof(T);
    };
    if (row_.rank() == column) {
        panel.a = a.column_block(inner.begin - columns_of_a().begin, inner.length);
        if (row_.size() > 1 && panel.a.stride != inner.length) {  // columns of a block have gaps in memory
            copy<T>(panel.a, room_a);
            panel.a = room_a;
        }
    }
    if (column_.rank() == row) panel.b = b.row_block(inner.begin - rows_of_b().begin, inner.length);
    bring(row_, column, panel.a);
    bring(column_, row, panel.b);
    return panel;
}

template <class T>
void Summa<T>::multiply(MatrixView<const T> a, MatrixView<const T> b, MatrixView<T> c) {
    check(a, b, c);
    sent_ = 0;
    Factors here, next = start(0, a, b);
    for (std::size_t p = 0; p < panels_.size(); ++p) {
        row_.wait();
        column_.wait();
        here = next;
        const bool more = p + 1 < panels_.size();
        if (more && overlap_) next = start(p + 1, a, b);  // into memory that was last read two panels ago
        const std::size_t parts = more && overlap_ ? stops : 1;
        for (std::size_t i = 0; i < parts; ++i) {
            const Range part = range(c.rows, int(parts), int(i));
            gemm<T>(here.a.row_block(part.begin, part.length), here.b, c.row_block(part.begin, part.length),
                    p > 0 ? T(1) : T(0));
            row_.test();
            column_.test();
        }
        if (more && !overlap_) next = start(p + 1, a, b);
    }
}

/// `term` summed along the line, into `own` on its owner.
template <class T>
void Summa<T>::reduce(Line& line, int owner, MatrixView<T> term, MatrixView<T> own) {
    const std::span<T> numbers(term.data, term.rows * term.columns);
    line.reduce(numbers, owner);
    if (line.rank() == owner)
        copy<T>(term, own);
    else
        sent_ += numbers.size_bytes();
}

template <class T>
void Summa<T>::gradients(MatrixView<const T> a, MatrixView<const T> b, MatrixView<const T> dc,
                         MatrixView<T> da, MatrixView<T> db) {
    check(a, b, dc);
    check(da, db, dc);
    sent_ = 0;
    for (std::size_t p = 0; p < panels_.size(); ++p) {
        const auto [inner, column, row] = panels_[p];
        const Factors here = start(p, a, b);
        row_.wait();
        column_.wait();
        // the rooms of the other turn hold the terms
        const MatrixView<T> term_a(room_a_[(p + 1) % 2].get(), da.rows, inner.length),
            term_b(room_b_[(p + 1) % 2].get(), inner.length, db.columns);
        gemm<T>(dc, t(here.b), term_a);
        gemm<T>(t(here.a), dc, term_b);
        const bool mine_a = row_.rank() == column, mine_b = column_.rank() == row;
        reduce(row_, column, term_a,
               mine_a ? da.column_block(inner.begin - columns_of_a().begin, inner.length) : term_a);
        reduce(column_, row, term_b,
               mine_b ? db.row_block(inner.begin - rows_of_b().begin, inner.length) : term_b);
    }
}

template <class T>
std::size_t Summa<T>::bytes_forward() const {
    return (rows_of_c().length * columns_of_a().length * (row_.size() - 1) +
            rows_of_b().length * columns_of_c().length * (column_.size() - 1)) *
           sizeof(T);
}

template <class T>
std::size_t Summa<T>::bytes_backward() const {
    return bytes_forward() + (rows_of_c().length * (whole_.K - columns_of_a().length) +
                              (whole_.K - rows_of_b().length) * columns_of_c().length) *
                                 sizeof(T);
}

template class Summa<float>;
template class Summa<double>;

}  // namespace fived
